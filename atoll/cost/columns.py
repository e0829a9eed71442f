"""Plans whose every stage divides the batch in the same way: micro-batches stay in their column and meet others only on shared links.

Columns run side by side, so a transfer finds its link taken by those of the other columns (and boundaries) that use it: it holds the link
for all of them. Every kind of column is played once.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from atoll.cost.in_flight import interleaved_limits
from atoll.cost.pipeline import NO_HOP, Hop, Worker, column_seconds, simulate
from atoll.cost.played import Counts, Played, Replicas
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


def play_columns(transfers: Transfers, plan: Plan, replicas: Replicas, counts: list[int], with_transfer: bool) -> Played:
    """Plays a plan in which replica i of every stage takes `counts[i]` micro-batches."""
    columns = _Columns(transfers, plan, counts)
    kinds = list(zip(counts, *([id(item) for item in row] for row in replicas), *(b.kinds for b in columns.boundaries), strict=True))
    first = dict(zip(reversed(kinds), reversed(range(len(kinds))), strict=True))
    known = {kind: _play_column(columns, plan, replicas, i, with_transfer) for kind, i in first.items()}
    played = [known[kind] for kind in kinds]
    stages = range(len(plan.stages))
    return Played(
        [[column.finish[s] for column in played] for s in stages],
        [[column.busy[s] for column in played] for s in stages],
        [[column.in_flight[s] for column in played] for s in stages],
        [[column.transfer[s] for column in played] for s in stages],
    )


class _Column(NamedTuple):
    """What a column did, stage by stage."""

    finish: list[float]
    busy: list[float]
    in_flight: list[int]
    transfer: list[float]


class _Columns:
    """The ways between the stages of each column, and who shares them."""

    def __init__(self, transfers: Transfers, plan: Plan, counts: list[int]) -> None:
        self._transfers, self._plan, self.counts = transfers, plan, counts
        self._bytes = [transfers.boundary_bytes(plan, stage) for stage in plan.stages[:-1]]
        self.boundaries = [transfers.boundary(here, there) for here, there in pairwise(plan.stages)]
        self._users: dict[tuple[str, ...], Counter[tuple[float, int]]] = {}  # seconds and micro-batches of those that share a link
        for boundary, (forth_bytes, back_bytes) in zip(self.boundaries, self._bytes, strict=True):
            if boundary.shared:
                self._note_users(boundary.onward, forth_bytes)
                self._note_users(boundary.back, back_bytes)

    def _note_users(self, row: tuple[Path, ...], nbytes: float) -> None:
        paths = {id(path): path for path in row}
        for (identity, count), times in Counter(zip(map(id, row), self.counts, strict=True)).items():
            path = paths[identity]
            if path.resource:
                use = (self._transfers.hop(self._plan, path, nbytes).occupancy, count)
                self._users.setdefault(path.resource, Counter())[use] += times

    def hops(self, column: int) -> tuple[list[Hop], list[Hop]]:
        """The hops of a column, forth and back."""
        count = self.counts[column]
        rows = list(zip(self.boundaries, self._bytes, strict=True))
        onward = [self._contended(boundary.onward[column], nbytes[0], count) for boundary, nbytes in rows]
        return onward, [self._contended(boundary.back[column], nbytes[1], count) for boundary, nbytes in rows]

    def _contended(self, path: Path, nbytes: float, count: int) -> Hop:
        """A hop that waits for everyone who uses its link as often, and for those who use it less as often as they do."""
        hop = self._transfers.hop(self._plan, path, nbytes)
        if not path.resource:
            return hop
        users = self._users[path.resource].items()
        return hop._replace(occupancy=sum(seconds * times * min(1.0, theirs / count) for (seconds, theirs), times in users))

    def codec(self, column: int) -> tuple[list[float], list[float]]:
        """Seconds each stage of a column spends on encoding a micro-batch: activations in forward, gradients in backward."""
        forward, backward = [0.0] * len(self._plan.stages), [0.0] * len(self._plan.stages)
        if self._plan.codecs:
            for s, (forth_bytes, back_bytes) in enumerate(self._bytes):
                forward[s] = self._transfers.codec_seconds(self._plan, self.boundaries[s].onward[column], forth_bytes)
                backward[s + 1] = self._transfers.codec_seconds(self._plan, self.boundaries[s].back[column], back_bytes)
        return forward, backward


def _play_column(columns: _Columns, plan: Plan, replicas: Replicas, i: int, with_transfer: bool) -> _Column:
    count = columns.counts[i]
    codec_forward, codec_backward = columns.codec(i)
    forward = [row[i].forward + extra for row, extra in zip(replicas, codec_forward, strict=True)]
    backward = [row[i].backward + extra for row, extra in zip(replicas, codec_backward, strict=True)]
    onward, back = columns.hops(i)
    if plan.schedule == "interleaved":
        return _play_interleaved(plan, i, forward, backward, onward, back, count)
    busy = [count * (f + b) for f, b in zip(forward, backward, strict=True)]
    finish = column_seconds(forward, backward, onward, back, count, plan.schedule)[1]
    transfer = [0.0] * len(finish)
    if with_transfer:
        none = [NO_HOP] * len(onward)
        alone = column_seconds(forward, backward, none, none, count, plan.schedule)[1]
        transfer = [max(0.0, a - b) for a, b in zip(finish, alone, strict=True)]
    stages = len(plan.stages)
    held = [count if plan.schedule == "gpipe" else min(count, stages - s) for s in range(stages)]
    return _Column(finish, busy, held, transfer)


def _play_interleaved(
    plan: Plan, column: int, forward: list[float], backward: list[float], onward: list[Hop], back: list[Hop], count: int
) -> _Column:
    """One column of virtual stages, task by task."""
    groups: dict[tuple[str, ...], int] = {}
    devices = [groups.setdefault(stage.replicas[column].devices, len(groups)) for stage in plan.stages]
    workers = [[Worker(f, b, device)] for f, b, device in zip(forward, backward, devices, strict=True)]
    ahead = [[hop._replace(link=2 * s)] * count for s, hop in enumerate(onward)]
    behind = [[hop._replace(link=2 * s + 1)] * count for s, hop in enumerate(back)]
    limits = interleaved_limits(len(plan.stages), len(groups))
    timeline = simulate(workers, [[0] * count] * len(workers), ahead, behind, plan.schedule, limits)
    busy = [count * (f + b) for f, b in zip(forward, backward, strict=True)]
    return _Column([row[0] for row in timeline.finish], busy, [row[0] for row in timeline.in_flight], [row[0] for row in timeline.transfer])
