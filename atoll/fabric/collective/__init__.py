"""Collectives over the fabric: weighted reductions among unequal peers, broadcast, states from several donors. docs/collectives.md."""

from atoll.fabric.collective.collective import Collective
from atoll.fabric.collective.link_codecs import AdaptiveCodecs, FixedCodecs, LinkCodecs
from atoll.fabric.collective.network import Network, PeerRates, equal_network
from atoll.fabric.collective.outcome import PartOutcome, Reduction
from atoll.fabric.collective.parts import Parts, WireRatios, parts
from atoll.fabric.collective.plan import Cell, Member, RoundPlan, make_plan

__all__ = [
    "AdaptiveCodecs",
    "Cell",
    "Collective",
    "FixedCodecs",
    "LinkCodecs",
    "Member",
    "Network",
    "PartOutcome",
    "Parts",
    "PeerRates",
    "Reduction",
    "RoundPlan",
    "WireRatios",
    "equal_network",
    "make_plan",
    "parts",
]
