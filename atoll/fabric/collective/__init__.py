"""Collectives over the fabric: weighted reductions among unequal peers, broadcast, states from several donors. docs/collectives.md."""

from atoll.fabric.collective.collective import Collective
from atoll.fabric.collective.download import StateDonor, fetch_state
from atoll.fabric.collective.feedback import SumFeedback
from atoll.fabric.collective.link_codecs import FED_BACK_CODECS, SUMMED_CODECS, AdaptiveCodecs, FixedCodecs, LinkCodecs
from atoll.fabric.collective.network import Network, PeerRates, equal_network
from atoll.fabric.collective.outcome import PartOutcome, Reduction
from atoll.fabric.collective.parts import Parts, WireRatios, parts
from atoll.fabric.collective.pieces import FilePieces, MemoryPieces, PieceStore
from atoll.fabric.collective.plan import Cell, Member, RoundPlan, broadcast_plan, make_plan
from atoll.fabric.collective.state import State, StateManifest

__all__ = [
    "FED_BACK_CODECS",
    "SUMMED_CODECS",
    "AdaptiveCodecs",
    "Cell",
    "Collective",
    "FilePieces",
    "FixedCodecs",
    "LinkCodecs",
    "Member",
    "MemoryPieces",
    "Network",
    "PartOutcome",
    "Parts",
    "PeerRates",
    "PieceStore",
    "Reduction",
    "RoundPlan",
    "State",
    "StateDonor",
    "StateManifest",
    "SumFeedback",
    "WireRatios",
    "broadcast_plan",
    "equal_network",
    "fetch_state",
    "make_plan",
    "parts",
]
