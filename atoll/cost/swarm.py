"""The end of a swarm's step: sums that begin when all stages have ended, and with staleness go on beside the next step.

A swarm seals a step when every micro-batch is in a buffer, so no backward hides its sums, and it commits when all stages have theirs.
Without staleness the next step waits for that and for the optimizer: the three add up. With staleness=1 the next step is computed while
the sums are exchanged, one exchange at a time: steps follow each other as fast as the slower of the two allows. What both need is not
free. Devices make the optimizer's step between micro-batches, with a copy of the weights before it; links that carry sums and activations
are held by one after the other.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from atoll.cost.context import DevicePlace
from atoll.cost.transfer import Transfers
from atoll.cost.workers import Counts
from atoll.plan import Plan
from atoll.plan.division import pair_counts
from atoll.plan.modes import mode_rules

__all__ = ["Ending", "activation_seconds", "is_overlapped", "overlapped_ending", "swarm_ending", "with_copying"]

_COPIED_BYTES = 8.0  # read and written to keep a parameter as it was before the step


class Ending(NamedTuple):
    """When a step ends, because of which stage, and what comes after that stage's last backward."""

    seconds: float
    critical: int
    sync: float  # what exchanging gradients adds
    update: float


def is_overlapped(plan: Plan) -> bool:
    """Whether a step is computed while the sums of the one before are exchanged."""
    return plan.staleness > 0 and mode_rules(plan.mode).most_staleness > 0


def swarm_ending(finish: Sequence[float], exchange: Sequence[float], update: Sequence[float]) -> Ending:
    """One after the other, each until all stages have done it. All by stage: the last backward's end, seconds of sums, of the optimizer."""
    critical = max(range(len(finish)), key=lambda s: finish[s])
    sync, own = max(exchange), max(update)
    return Ending(finish[critical] + sync + own, critical, sync, own)


def overlapped_ending(finish: Sequence[float], exchange: Sequence[float], update: Sequence[float], beside: Sequence[float]) -> Ending:
    """From step to step where sums go on beside the next one. `beside` are seconds in which a stage's links carry activations instead."""
    critical = max(range(len(finish)), key=lambda s: finish[s] + update[s])
    computed = finish[critical] + update[critical]
    exchanged = max(sums + others if sums else 0.0 for sums, others in zip(exchange, beside, strict=True))
    return Ending(max(computed, exchanged), critical, max(0.0, exchanged - computed), update[critical])


def with_copying(update: float, update_bytes: float) -> float:
    """The optimizer's seconds, with those of copying the weights before it; it moves `update_bytes` for a parameter."""
    return update * (1 + _COPIED_BYTES / update_bytes)


def activation_seconds(transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], counts: Counts) -> dict[str, float]:
    """How long activations and their gradients hold each host's interface and each link between sites, in its busier direction."""
    held: dict[tuple[str, tuple[str, ...]], float] = {}
    for s, (before, after) in enumerate(pairwise(map(tuple, counts))):
        sizes = transfers.boundary_bytes(plan, plan.stages[s])
        for (i, j), times in pair_counts(before, after).items():
            for path, nbytes in zip(transfers.both_ways(places[s], places[s + 1], i, j), sizes, strict=True):
                if path.resource:
                    key = (path.link if path.between_sites else path.resource[0], path.resource)
                    held[key] = held.get(key, 0.0) + times * transfers.hop(plan, path, nbytes).occupancy
    return _busier(held.items())


def _busier(held: Iterable[tuple[tuple[str, tuple[str, ...]], float]]) -> dict[str, float]:
    busiest: dict[str, float] = {}
    for (name, _), seconds in held:
        busiest[name] = max(busiest.get(name, 0.0), seconds)
    return busiest
