"""Gradient synchronisation: who agrees with whom once a step, over which links, and how long it takes when all stages do so at once.

A swarm seals a step when every micro-batch is in a buffer, so no backward hides its sums, and it commits when all stages have theirs.
Without staleness the next step waits for that and for the optimizer: the three add up. With staleness=1 the next step is computed while
the sums are exchanged, one exchange at a time: steps follow each other as fast as the slower of the two allows. What both need is not
free. Devices make the optimizer's step between micro-batches, with a copy of the weights before it; links that carry sums and activations
are held by one after the other.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from atoll.cluster import Device
from atoll.cost.communication import Group, Span, all_reduce_seconds, distinct_groups, slowest_of
from atoll.cost.context import DevicePlace, Memo, PricingContext
from atoll.cost.pipeline import Counts
from atoll.cost.transfer import Transfers
from atoll.plan import Plan, Stage
from atoll.plan.division import pair_counts
from atoll.plan.modes import mode_rules

__all__ = ["Ending", "ReductionWork", "Synchronisation", "activation_seconds", "is_overlapped", "overlapped_ending", "swarm_ending"]

_Loads = dict[str, list[tuple[float, int]]]  # by host or link: bytes of those that use it, and how many


class ReductionWork(NamedTuple):
    """What the devices of a stage reduce: bytes of each, in groups."""

    nbytes: float
    groups: tuple[Group, ...]


class Synchronisation:
    """Synchronisation times of any plan; where groups live is remembered."""

    def __init__(self, setting: PricingContext) -> None:
        self._setting = setting
        self._groups = Memo(self._agreeing)
        self._tied_groups = Memo(self._tied)
        self._tied_spans: Memo[tuple[DevicePlace, ...], Span] = Memo(
            lambda places: slowest_of(self._tied_groups[places], setting.calibration)
        )

    def groups(self, place: DevicePlace, across_lanes: bool) -> tuple[Group, ...]:
        """Where the devices that hold the same parameters live: over replicas, and over lanes too where lanes repeat them. Groups of
        one device are left out."""
        return self._groups[place, across_lanes]

    def _agreeing(self, key: tuple[DevicePlace, bool]) -> tuple[Group, ...]:
        place, across_lanes = key
        rows = [[self._setting.devices[name] for name in group] for group in place.groups]
        apart = place.tensor if across_lanes else len(rows[0])
        members = [[device for row in rows for device in row[position::apart]] for position in range(apart)]
        return self._distinct([group for group in members if len(group) > 1])

    def _distinct(self, groups: list[list[Device]]) -> tuple[Group, ...]:
        return distinct_groups(self._setting.cluster, groups, self._setting.calibration)

    def volumes(self, stage: Stage) -> list[tuple[bool, float]]:
        """(across lanes?, bytes of gradient) that each device of a stage reduces once a step."""
        held = self._setting.most_held(stage)
        size = self._setting.calibration.gradient_bytes
        lanes = stage.lanes
        volumes = [(False, held.dense * size / lanes)] if stage.sharded else [(lanes > 1, held.dense * size)]
        if held.expert and stage.expert:
            volumes.append((False, held.expert * size))
        elif held.expert:
            volumes = [(volumes[0][0], volumes[0][1] + held.expert * size / (lanes if stage.sharded else 1))]
        if held.divided:
            volumes.append((False, held.divided * size))
        return volumes

    def works(self, plan: Plan, places: Sequence[DevicePlace]) -> list[list[ReductionWork]]:
        """What the replicas of each stage have to agree on."""
        return [
            [ReductionWork(nbytes, self.groups(place, across)) for across, nbytes in self.volumes(stage) if nbytes]
            for stage, place in zip(plan.stages, places, strict=True)
        ]

    def seconds(self, works: list[list[ReductionWork]]) -> list[float]:
        """Seconds each stage's replicas need to agree on their gradients, all stages at once."""
        loads = _loads(works) if len(works) > 1 else {}
        return [sum([self._slowest(work, loads) for work in row]) for row in works]

    def _slowest(self, work: ReductionWork, loads: _Loads) -> float:
        slowest, nbytes = 0.0, work.nbytes
        for group in work.groups:
            contended = {"site_sharing": _sharing(group.hosts, nbytes, loads), "wan_sharing": _sharing(group.links, nbytes, loads)}
            slowest = max(slowest, all_reduce_seconds(group.span, nbytes, self._setting.calibration, **contended))
        return slowest

    def tied(self, plan: Plan, places: Sequence[DevicePlace], volumes: "list[tuple[list[int], float]]") -> list[float]:
        """Seconds each stage spends on gradients of parameters it shares with other stages."""
        seconds = [0.0] * len(plan.stages)
        for homes, nbytes in volumes:
            taken = all_reduce_seconds(self._tied_spans[tuple([places[s] for s in homes])], nbytes, self._setting.calibration)
            for s in homes:
                seconds[s] += taken
        return seconds

    def tied_volumes(self, plan: Plan) -> list[tuple[list[int], float]]:
        """Stages that hold copies of a parameter, and bytes of its gradient that a device of each exchanges."""
        setting = self._setting
        starts = [stage.start for stage in plan.stages]
        volumes = []
        for shared in setting.graph.shared:
            homes = sorted({bisect_right(starts, layer) - 1 for layer in shared.layers})
            if shared.trained and len(homes) > 1:
                tensor = min(plan.stages[s].tensor for s in homes) if setting.amounts.is_split(shared) else 1
                volumes.append((homes, shared.parameters * setting.calibration.gradient_bytes / tensor))
        return volumes

    def tied_groups(self, places: Sequence[DevicePlace]) -> tuple[Group, ...]:
        """Where copies of a parameter of several stages live: one group for each replica and position."""
        return self._tied_groups[tuple(places)]

    def _tied(self, places: tuple[DevicePlace, ...]) -> tuple[Group, ...]:
        replicas, tensor = max(len(place.groups) for place in places), min(place.tensor for place in places)
        rows = [[place.groups[i % len(place.groups)] for place in places] for i in range(replicas)]
        return self._distinct([[self._setting.devices[names[position]] for names in row] for row in rows for position in range(tensor)])


def _loads(works: list[list[ReductionWork]]) -> _Loads:
    """Bytes that groups put on every interface and link between sites."""
    loads: _Loads = {}
    for row in works:
        for nbytes, groups in row:
            for _, hosts, links, times in groups:
                for name in (*hosts, *links):
                    loads.setdefault(name, []).append((nbytes, times))
    return loads


def _sharing(names: tuple[str, ...], nbytes: float, loads: _Loads) -> float:
    """Groups that leave the same host or site share its way out evenly, as long as they have something to send."""
    most = 0.0
    for name in names:
        users = loads.get(name, ())
        if len(users) > 1:  # one user is the group itself, with what its span knows of
            most = max(most, sum([times if theirs >= nbytes else theirs / nbytes * times for theirs, times in users]))
    return most


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
    busiest: dict[str, float] = {}
    for (name, _), seconds in held.items():
        busiest[name] = max(busiest.get(name, 0.0), seconds)
    return busiest
