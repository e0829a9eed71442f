"""Collectives over the fabric: weighted reductions among unequal peers. docs/collectives.md."""

from atoll.fabric.collective.collective import Collective
from atoll.fabric.collective.link_codecs import FED_BACK_CODECS, SUMMED_CODECS, AdaptiveCodecs, FixedCodecs, LinkCodecs
from atoll.fabric.collective.plan import Cell, Network, Parts, PeerRates, RoundMember, RoundPlan, equal_network, make_plan, parts
from atoll.fabric.collective.result import PartOutcome, ReductionResult, SumFeedback

__all__ = [
    "FED_BACK_CODECS",
    "SUMMED_CODECS",
    "AdaptiveCodecs",
    "Cell",
    "Collective",
    "FixedCodecs",
    "LinkCodecs",
    "Network",
    "PartOutcome",
    "Parts",
    "PeerRates",
    "ReductionResult",
    "RoundMember",
    "RoundPlan",
    "SumFeedback",
    "equal_network",
    "make_plan",
    "parts",
]
