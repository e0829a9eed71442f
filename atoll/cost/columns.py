"""Plans whose every stage divides the batch in the same way: micro-batches stay in their column and meet others only on shared links.

Columns run side by side, so a transfer finds its link taken by those of the other columns (and boundaries) that use it: it holds the link
for all of them. Every kind of column is played once.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from operator import add, ge, sub
from typing import NamedTuple

from atoll.cost.in_flight import interleaved_limits
from atoll.cost.pipeline import NO_HOP, Hop, Worker, column_seconds, simulate
from atoll.cost.played import Counts, Played, Replicas
from atoll.cost.setting import Place
from atoll.cost.transfer import Path, Transfers
from atoll.plan import Plan

__all__ = ["in_columns", "play_columns"]


def in_columns(plan: Plan, counts: Counts) -> bool:
    """Whether micro-batches stay in their column: stages divide the batch alike, and a column's virtual stages are on its own devices."""
    if any(row != counts[0] for row in counts):
        return False
    if plan.schedule != "interleaved":
        return True
    homes: dict[tuple[str, ...], int] = {}
    return all(homes.setdefault(replica.devices, i) == i for stage in plan.stages for i, replica in enumerate(stage.replicas))


def play_columns(
    transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: list[int], only_step: bool
) -> Played:
    """Plays a plan in which replica i of every stage takes `counts[i]` micro-batches.

    With `only_step` it gives the ends of columns alone, and of those that others outlast at every stage none: 0.
    """
    columns = _Columns(transfers, plan, places, counts)
    differing: list[Sequence[object]] = [counts] if _differ(counts) else []
    differing += [[id(item) for item in row] for row in replicas if _differ(row)]
    differing += [boundary.kinds for boundary in columns.boundaries if not boundary.alike]
    width = len(counts)
    if not differing:
        finish, busy, in_flight, transfer = _play_column(plan, columns.load(replicas, 0), 0, only_step)
        return Played(_widened(finish, width), _widened(busy, width), [[held] * width for held in in_flight], _widened(transfer, width))
    kinds = list(zip(*differing, strict=True))
    first = dict(zip(reversed(kinds), reversed(range(width)), strict=True))
    loads = {kind: columns.load(replicas, i) for kind, i in first.items()}
    if only_step and plan.schedule != "interleaved":
        ends = _decisive_ends(plan.schedule, loads)
        return Played([list(row) for row in zip(*[ends[kind] for kind in kinds], strict=True)], [], [], [])
    known = {kind: _play_column(plan, loads[kind], i, only_step) for kind, i in first.items()}
    played = [known[kind] for kind in kinds]
    stages = range(len(plan.stages))
    return Played(
        [[column.finish[s] for column in played] for s in stages],
        [[column.busy[s] for column in played] for s in stages],
        [[column.in_flight[s] for column in played] for s in stages],
        [[column.transfer[s] for column in played] for s in stages],
    )


_Kind = tuple[object, ...]


def _decisive_ends(schedule: str, loads: dict[_Kind, "_Load"]) -> dict[_Kind, list[float]]:
    """When the stages of each kind of column end; 0 where another kind surely ends, and begins its last backwards, no earlier."""
    ends: dict[_Kind, list[float]] = {}
    played: list[tuple[_Load, float]] = []  # with the earliest begin of a stage's last backward
    for kind, load in sorted(loads.items(), key=lambda item: -item[1].busiest):
        if any(load.bound(schedule) <= begin or _no_less(other, load) for other, begin in played):
            ends[kind] = [0.0] * len(load.forward)
        else:
            finish = column_seconds(load.forward, load.backward, load.onward, load.back, load.count, schedule)[1]
            played.append((load, min(map(sub, finish, load.backward))))
            ends[kind] = finish
    return ends


def _no_less(a: "_Load", b: "_Load") -> bool:
    """Whether a column has as much to do as another in every respect: then it ends no earlier, whatever it waits for."""
    return a.count >= b.count and all(map(ge, a.times, b.times))


def _widened(row: list[float], width: int) -> list[list[float]]:
    return [[value] * width for value in row]


def _differ(row: Sequence[object]) -> bool:
    return row.count(row[0]) != len(row)


class _Column(NamedTuple):
    """What a column did, stage by stage."""

    finish: list[float]
    busy: list[float]
    in_flight: list[int]
    transfer: list[float]


class _Load:
    """What a column has to do: micro-batches, and the seconds of one on every stage and link."""

    def __init__(self, count: int, forward: list[float], backward: list[float], onward: list[Hop], back: list[Hop]) -> None:
        self.count, self.forward, self.backward, self.onward, self.back = count, forward, backward, onward, back
        self.busiest = count * max(map(add, forward, backward))

    @cached_property
    def times(self) -> list[float]:
        """All of one micro-batch."""
        hops = (*self.onward, *self.back)
        return [*self.forward, *self.backward, *[hop[0] for hop in hops], *[hop[1] for hop in hops]]

    def bound(self, schedule: str) -> float:
        """No stage ends later: by playing one micro-batch after the other, or (1F1B) one round after the other."""
        back = [seconds + hop[0] + hop[1] for seconds, hop in zip(self.backward, (NO_HOP, *self.back), strict=True)]
        forth = sum(self.forward) + sum([hop[0] + hop[1] for hop in self.onward])
        serial = self.count * (forth + sum(back))
        if schedule != "1f1b":
            return serial
        return min(serial, self.count * (forth + max(back)) + (len(back) - 1) * max(back))


class _Columns:
    """The ways between the stages of each column, and who shares them."""

    def __init__(self, transfers: Transfers, plan: Plan, places: Sequence[Place], counts: list[int]) -> None:
        self._transfers, self._plan, self.counts = transfers, plan, counts
        self._bytes = [transfers.boundary_bytes(plan, stage) for stage in plan.stages[:-1]]
        self.boundaries = [transfers.boundary(here, there) for here, there in pairwise(places)]
        self._users: dict[tuple[str, ...], dict[int, float]] = {}  # of a link: seconds a round, by micro-batches of those that use it
        self._occupied: dict[tuple[tuple[str, ...], int], float] = {}
        unequal = _differ(counts)
        for boundary, both in zip(self.boundaries, self._bytes, strict=True):
            for direction, path, users in boundary.queued:
                seconds = transfers.hop(plan, path, both[direction]).occupancy
                load = self._users.setdefault(path.resource, {})
                for count, times in Counter([counts[column] for column in users]).items() if unequal else ((counts[0], len(users)),):
                    load[count] = load.get(count, 0.0) + seconds * times

    def load(self, replicas: Replicas, column: int) -> _Load:
        """What a column has to do."""
        forward, backward = [row[column].forward for row in replicas], [row[column].backward for row in replicas]
        if self._plan.codecs:
            codec_forward, codec_backward = self.codec(column)
            forward, backward = list(map(add, forward, codec_forward)), list(map(add, backward, codec_backward))
        return _Load(self.counts[column], forward, backward, *self.hops(column))

    def hops(self, column: int) -> tuple[list[Hop], list[Hop]]:
        """The hops of a column, forth and back."""
        count = self.counts[column]
        onward, back = [], []
        for boundary, (forth_bytes, back_bytes) in zip(self.boundaries, self._bytes, strict=True):
            onward.append(self._hop(boundary.onward[column], forth_bytes, count))
            back.append(self._hop(boundary.back[column], back_bytes, count))
        return onward, back

    def _hop(self, path: Path, nbytes: float, count: int) -> Hop:
        if not path.resource:
            return self._transfers.hop(self._plan, path, nbytes)
        return Hop(self._occupancy(path.resource, count), path.latency, -1)

    def _occupancy(self, resource: tuple[str, ...], count: int) -> float:
        """A link is held for everyone who uses it as often, and for those who use it less as often as they do."""
        found = self._occupied.get((resource, count))
        if found is None:
            users = self._users[resource].items()
            found = sum([seconds if theirs >= count else seconds * theirs / count for theirs, seconds in users])
            self._occupied[resource, count] = found
        return found

    def codec(self, column: int) -> tuple[list[float], list[float]]:
        """Seconds each stage of a column spends on encoding a micro-batch: activations in forward, gradients in backward."""
        forward, backward = [0.0] * len(self._plan.stages), [0.0] * len(self._plan.stages)
        for s, (boundary, (forth_bytes, back_bytes)) in enumerate(zip(self.boundaries, self._bytes, strict=True)):
            if self._plan.codecs and boundary.between_sites:
                forward[s] = self._transfers.codec_seconds(self._plan, boundary.onward[column], forth_bytes)
                backward[s + 1] = self._transfers.codec_seconds(self._plan, boundary.back[column], back_bytes)
        return forward, backward


def _play_column(plan: Plan, load: _Load, i: int, only_step: bool) -> _Column:
    if plan.schedule == "interleaved":
        return _play_interleaved(plan, load, i)
    forward, backward, count = load.forward, load.backward, load.count
    busy = [count * (f + b) for f, b in zip(forward, backward, strict=True)]
    finish = column_seconds(forward, backward, load.onward, load.back, count, plan.schedule)[1]
    transfer = [0.0] * len(finish)
    if not only_step:
        none = [NO_HOP] * len(load.onward)
        alone = column_seconds(forward, backward, none, none, count, plan.schedule)[1]
        transfer = [max(0.0, a - b) for a, b in zip(finish, alone, strict=True)]
    stages = len(plan.stages)
    held = [count if plan.schedule == "gpipe" else min(count, stages - s) for s in range(stages)]
    return _Column(finish, busy, held, transfer)


def _play_interleaved(plan: Plan, load: _Load, column: int) -> _Column:
    """One column of virtual stages, task by task."""
    count = load.count
    groups: dict[tuple[str, ...], int] = {}
    devices = [groups.setdefault(stage.replicas[column].devices, len(groups)) for stage in plan.stages]
    workers = [[Worker(f, b, device)] for f, b, device in zip(load.forward, load.backward, devices, strict=True)]
    ahead = [[hop._replace(link=2 * s)] * count for s, hop in enumerate(load.onward)]
    behind = [[hop._replace(link=2 * s + 1)] * count for s, hop in enumerate(load.back)]
    limits = interleaved_limits(len(plan.stages), len(groups))
    timeline = simulate(workers, [[0] * count] * len(workers), ahead, behind, plan.schedule, limits)
    busy = [count * (f + b) for f, b in zip(load.forward, load.backward, strict=True)]
    return _Column([row[0] for row in timeline.finish], busy, [row[0] for row in timeline.in_flight], [row[0] for row in timeline.transfer])
