"""Plans whose every stage divides the batch in the same way: micro-batches stay in their column and meet others only on shared links.

Columns run side by side, so a transfer finds its link taken by those of the other columns (and boundaries) that use it: it holds the link
for all of them. Every kind of column is played once.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from operator import add, ge, sub
from typing import TypeVar

from atoll.cost.context import DevicePlace
from atoll.cost.pipeline import NO_HOP, Counts, Hop, Hops, Played, Replicas, StageReplica, Timeline, simulate
from atoll.cost.transfer import Path, SharedLinks, Transfers
from atoll.plan import Plan
from atoll.plan.schedule_policy import interleaved_limits

__all__ = ["column_seconds", "in_columns", "play_columns"]

_ROUNDS_BETWEEN_LOOKS = 4  # looking whether a column has come to its steady state costs as much as a third of a round
_Row = tuple[int, float, float, float, float, float, float]  # stage; its forward, backward; queue and delay of the links onward and back


def column_seconds(
    forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop], micro_batches: int, schedule: str
) -> tuple[float, list[float]]:
    """Step of one column of stages, and when each stage ends. `onward[s]` leads from stage s to s+1, `back[s]` the other way.

    Under 1F1B, round m computes on each of S stages in turn the forward of micro-batch m and then the backward of m - (S - s) + 1. In that
    order all that a task waits for has been computed: the forward before it in this round, the gradient in the round before. A round maps
    the times by maxima and sums, so once a round moves all of them by the same step, every later one does.
    """
    if schedule == "gpipe":
        return _gpipe(forward, backward, onward, back, micro_batches)
    stages = len(forward)
    walk = _Walk(forward, backward, onward, back)
    first = min(stages - 1, micro_batches)
    for m in range(first):  # the stages before the last m have no gradient to go back with yet
        walk.turn_round(walk.forth_only(walk.rows[: stages - 1 - m]), walk.rows[stages - 1 - m :])
    left = micro_batches - first
    while left > _ROUNDS_BETWEEN_LOOKS + 1:
        for _ in range(_ROUNDS_BETWEEN_LOOKS - 1):
            walk.turn_round(0.0, walk.rows)
        before = walk.times()
        walk.turn_round(0.0, walk.rows)
        left -= _ROUNDS_BETWEEN_LOOKS
        if step := _common_step(before, walk.times()):
            walk.leap(step * (left - 1))
            left = 1
    for _ in range(left):
        walk.turn_round(0.0, walk.rows)
    for m in range(micro_batches, micro_batches + stages - 1):
        walk.back_only(walk.rows[max(0, stages - 1 - m) : micro_batches + stages - 1 - m])
    return max(walk.free), walk.free


def _gpipe(
    forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop], micro_batches: int
) -> tuple[float, list[float]]:
    ready = [0.0] * micro_batches
    free: list[float] = []
    for s, seconds in enumerate(forward):
        ready, end = _through(ready, seconds, 0.0, onward[s] if s < len(onward) else NO_HOP)
        free.append(end)
    ready = [free[-1]] * micro_batches
    for s in range(len(backward) - 1, -1, -1):
        ready, free[s] = _through(ready, backward[s], free[s], back[s - 1] if s else NO_HOP)
    return max(free), free


def _through(ready: list[float], seconds: float, free: float, hop: Hop) -> tuple[list[float], float]:
    """Micro-batches through one server and then one link, in order."""
    arrivals = []
    link_free = 0.0
    for when in ready:
        free = (free if free > when else when) + seconds
        link_free = (link_free if link_free > free else free) + hop.occupancy
        arrivals.append(link_free + hop.latency)
    return arrivals, free


class _Walk:
    """The times of a column of stages, round by round."""

    def __init__(self, forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop]) -> None:
        stages = len(forward)
        self.free = [0.0] * stages  # when each stage ends what was given to it so far
        self.came_back = [0.0] * (stages + 1)  # when the gradient of the next backward arrives, from stage s + 1
        self.links, self.back_links = [0.0] * stages, [0.0] * stages  # when each link ends what was given to it so far
        self.rows = [
            (s, forth_seconds, back_seconds, *_queue_and_delay(hop, forth_seconds), *_queue_and_delay(back_hop, back_seconds))
            for s, forth_seconds, back_seconds, hop, back_hop in zip(
                range(stages), forward, backward, (*onward, NO_HOP), (NO_HOP, *back), strict=True
            )
        ]

    def forth_only(self, rows: list[_Row]) -> float:
        """Takes a micro-batch forward through stages; returns when it arrives after them."""
        free, links = self.free, self.links
        arrival = 0.0
        for s, seconds, _, queue, delay, _, _ in rows:
            end = free[s]
            end = free[s] = (end if end > arrival else arrival) + seconds
            if queue:
                start = links[s]
                end = links[s] = (start if start > end else end) + queue
            arrival = end + delay
        return arrival

    def turn_round(self, arrival: float, rows: list[_Row]) -> None:
        """Takes the micro-batch that arrives forward through stages, each of which then goes back with an earlier one."""
        free, came_back, links, back_links = self.free, self.came_back, self.links, self.back_links
        for s, seconds, back_seconds, queue, delay, back_queue, back_delay in rows:
            end = free[s]
            end = (end if end > arrival else arrival) + seconds
            if queue:
                start = links[s]
                start = links[s] = (start if start > end else end) + queue
                arrival = start + delay
            else:
                arrival = end + delay
            gradient = came_back[s]
            end = free[s] = (end if end > gradient else gradient) + back_seconds
            if back_queue:
                start = back_links[s]
                end = back_links[s] = (start if start > end else end) + back_queue
            came_back[s - 1] = end + back_delay

    def back_only(self, rows: list[_Row]) -> None:
        """Each stage goes back with a micro-batch."""
        free, came_back, back_links = self.free, self.came_back, self.back_links
        for s, _, seconds, _, _, queue, delay in rows:
            end, gradient = free[s], came_back[s]
            end = free[s] = (end if end > gradient else gradient) + seconds
            if queue:
                start = back_links[s]
                end = back_links[s] = (start if start > end else end) + queue
            came_back[s - 1] = end + delay

    def times(self) -> list[float]:
        """What decides over the next round; of links, only those that can make a transfer wait."""
        return self.free + self.links + self.back_links

    def leap(self, seconds: float) -> None:
        """Moves all times; those of links on which nothing waits stay zero."""
        self.free = [value + seconds for value in self.free]
        self.came_back = [value + seconds for value in self.came_back]
        self.came_back[len(self.free) - 1] = 0.0  # the last stage waits for no gradient
        self.links = [value + seconds if value else 0.0 for value in self.links]
        self.back_links = [value + seconds if value else 0.0 for value in self.back_links]


def _queue_and_delay(hop: Hop, seconds: float) -> tuple[float, float]:
    """Transfers of a stage whose tasks are further apart than the link needs for each never wait: they are a delay alone."""
    return (hop.occupancy, hop.latency) if hop.occupancy > seconds else (0.0, hop.occupancy + hop.latency)


def _common_step(before: list[float], after: list[float]) -> float:
    """By how much every time grew, or 0 where they grew differently; a time that is zero is of a link on which nothing waits."""
    step = after[0] - before[0]
    slack = 1e-12 + 1e-9 * step
    for was, value in zip(before, after, strict=True):
        if value and not -slack <= value - was - step <= slack:
            return 0.0
    return step


def in_columns(plan: Plan, counts: Counts) -> bool:
    """Whether micro-batches stay in their column: stages divide the batch alike, and a column's virtual stages are on its own devices."""
    if any(row != counts[0] for row in counts):
        return False
    if plan.schedule != "interleaved":
        return True
    homes: dict[tuple[str, ...], int] = {}
    return all(homes.setdefault(replica.devices, i) == i for stage in plan.stages for i, replica in enumerate(stage.replicas))


def play_columns(
    transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], replicas: Replicas, counts: list[int], only_step: bool
) -> Played:
    """Plays a plan in which replica i of every stage takes `counts[i]` micro-batches.

    Columns that others outlast at every stage are not played: they end at 0. With `only_step` it says no more than when columns end.
    """
    columns = _Columns(transfers, plan, places, counts)
    kinds = _kinds(columns, replicas, counts)
    width = len(counts)
    first = dict(zip(reversed(kinds), reversed(range(width)), strict=True))
    loads = {kind: columns.load(replicas, i) for kind, i in first.items()}
    if plan.schedule == "interleaved":
        return _play_interleaved(plan, loads, first, kinds)
    ends = _decisive_ends(plan.schedule, loads)
    finish = _by_stage(ends, kinds)
    if only_step:
        return Played(finish, [], [], lambda s, i: 0.0)
    stages = len(plan.stages)
    held = [counts if plan.schedule == "gpipe" else [min(count, stages - s) for count in counts] for s in range(stages)]

    def transfer(s: int, i: int) -> float:
        load = loads[kinds[i]]
        none = [NO_HOP] * len(load.onward)
        return max(0.0, finish[s][i] - column_seconds(load.forward, load.backward, none, none, load.count, plan.schedule)[1][s])

    return Played(finish, _by_stage({kind: load.busy() for kind, load in loads.items()}, kinds), held, transfer)


_T = TypeVar("_T")
_Kind = tuple[object, ...]


def _kinds(columns: "_Columns", replicas: Replicas, counts: list[int]) -> list[_Kind]:
    """What tells columns apart: those of equal kind do the same at the same time."""
    differing: list[Sequence[object]] = [counts] if _differ(counts) else []
    differing += [[id(item) for item in row] for row in replicas if _differ(row)]
    differing += [boundary.kinds for boundary in columns.boundaries if not boundary.alike]
    return list(zip(*differing, strict=True)) if differing else [()] * len(counts)


def _by_stage(rows: dict[_Kind, list[_T]], kinds: list[_Kind]) -> list[list[_T]]:
    """From rows of stages by kind of column to rows of columns by stage."""
    if len(rows) == 1:
        return [[value] * len(kinds) for value in rows[kinds[0]]]
    return [list(row) for row in zip(*[rows[kind] for kind in kinds], strict=True)]


def _decisive_ends(schedule: str, loads: dict[_Kind, "_Load"]) -> dict[_Kind, list[float]]:
    """When the stages of each kind of column end; 0 where another kind surely ends, and begins its last backwards, no earlier."""
    ends: dict[_Kind, list[float]] = {}
    played: list[tuple[_Load, float]] = []  # with the earliest begin of a stage's last backward
    for kind, load in sorted(loads.items(), key=lambda item: -item[1].busiest):
        if any(load.bound(schedule) <= begin or other.outlasts(load) for other, begin in played):
            ends[kind] = [0.0] * len(load.forward)
        else:
            finish = column_seconds(load.forward, load.backward, load.onward, load.back, load.count, schedule)[1]
            played.append((load, min(map(sub, finish, load.backward))))
            ends[kind] = finish
    return ends


def _differ(row: Sequence[object]) -> bool:
    return row.count(row[0]) != len(row)


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

    def outlasts(self, other: "_Load") -> bool:
        """Whether it has as much to do as another in every respect: then it ends no earlier, whatever it waits for."""
        return self.count >= other.count and all(map(ge, self.times, other.times))

    def busy(self) -> list[float]:
        """Seconds each stage works in a step."""
        return [self.count * (f + b) for f, b in zip(self.forward, self.backward, strict=True)]

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

    def __init__(self, transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], counts: list[int]) -> None:
        self._transfers, self._plan, self.counts = transfers, plan, counts
        self._bytes = [transfers.boundary_bytes(plan, stage) for stage in plan.stages[:-1]]
        self.boundaries = [transfers.boundary(here, there) for here, there in pairwise(places)]
        self._shared = SharedLinks()
        unequal = _differ(counts)
        for boundary, both in zip(self.boundaries, self._bytes, strict=True):
            for direction, path, users in boundary.queued:
                seconds = transfers.hop(plan, path, both[direction]).occupancy
                for count, times in Counter([counts[column] for column in users]).items() if unequal else ((counts[0], len(users)),):
                    self._shared.add(path.resource, count, seconds * times)

    def load(self, replicas: Replicas, column: int) -> _Load:
        """What a column has to do; encoding a micro-batch is a part of the forward and backward that it follows."""
        plan, transfers, count = self._plan, self._transfers, self.counts[column]
        forward, backward = [row[column].forward for row in replicas], [row[column].backward for row in replicas]
        onward, back = [], []
        for s, (boundary, (forth_bytes, back_bytes)) in enumerate(zip(self.boundaries, self._bytes, strict=True)):
            forth, returning = boundary.onward[column], boundary.back[column]
            if plan.codecs and boundary.between_sites:
                forward[s] += transfers.codec_seconds(plan, forth, forth_bytes)
                backward[s + 1] += transfers.codec_seconds(plan, returning, back_bytes)
            onward.append(self._hop(forth, forth_bytes, count))
            back.append(self._hop(returning, back_bytes, count))
        return _Load(count, forward, backward, onward, back)

    def _hop(self, path: Path, nbytes: float, count: int) -> Hop:
        if not path.resource:
            return self._transfers.hop(self._plan, path, nbytes)
        return Hop(self._shared.occupancy(path.resource, count), path.latency, -1)


def _play_interleaved(plan: Plan, loads: dict[_Kind, _Load], first: dict[_Kind, int], kinds: list[_Kind]) -> Played:
    """Columns of virtual stages, task by task."""
    played = {kind: _interleaved_column(plan, load, first[kind]) for kind, load in loads.items()}
    transfers = _by_stage({kind: [row[0] for row in timeline.transfer] for kind, timeline in played.items()}, kinds)
    return Played(
        _by_stage({kind: [row[0] for row in timeline.finish] for kind, timeline in played.items()}, kinds),
        _by_stage({kind: load.busy() for kind, load in loads.items()}, kinds),
        _by_stage({kind: [row[0] for row in timeline.in_flight] for kind, timeline in played.items()}, kinds),
        lambda s, i: transfers[s][i],
    )


def _interleaved_column(plan: Plan, load: _Load, column: int) -> Timeline:
    groups: dict[tuple[str, ...], int] = {}
    devices = [groups.setdefault(stage.replicas[column].devices, len(groups)) for stage in plan.stages]
    workers = [[StageReplica(f, b, device)] for f, b, device in zip(load.forward, load.backward, devices, strict=True)]
    ahead: list[Hops] = [{(0, 0): hop._replace(link=2 * s)} for s, hop in enumerate(load.onward)]
    behind: list[Hops] = [{(0, 0): hop._replace(link=2 * s + 1)} for s, hop in enumerate(load.back)]
    limits = interleaved_limits(len(plan.stages), len(groups))
    return simulate(workers, [[0] * load.count] * len(workers), ahead, behind, plan.schedule, limits)
