"""The policy of 1F1B, GPipe and interleaved schedules: whether a worker does a forward or a backward next, and how much it may hold.

A worker does a forward while there are some left and there is room, else a backward, waiting for either if need be. Room is what a schedule
allows it to hold at once, and therefore what memory must hold. That alone decides the order in a column of stages, whatever tasks take. The
schedules that runtimes follow (`runtime/modes/lockstep/schedule_builder.py`) and the cost model's engines (`cost/pipeline.py`) are played
by it; `cost/columns.py` has the recurrence that it comes to in a column, under a test that compares the two.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from atoll.plan import Plan
from atoll.plan.division import micro_batch_counts
from atoll.plan.modes import mode_rules

__all__ = ["device_limits", "forward_next", "held_bounds", "in_flight_bounds", "interleaved_limits"]


def forward_next(forwards_left: int, held: int, limit: int) -> bool:
    """Whether a worker that holds so many micro-batches does a forward next (or waits for one), rather than a backward."""
    return forwards_left > 0 and held < limit


def in_flight_bounds(plan: Plan) -> list[list[int]]:
    """The most micro-batches each replica may hold, by schedule."""
    counts = micro_batch_counts(plan)
    if plan.schedule == "gpipe":
        return counts
    columns = all(row == counts[0] for row in counts)
    if plan.schedule == "interleaved":
        return _interleaved_bounds(plan, counts, columns)
    if columns:  # each a pipeline of its own
        return [[min(count, len(counts) - s) for count in row] for s, row in enumerate(counts)]
    limits = _warm_up(counts)
    return [[min(count, limit) for count, limit in zip(row, bounds, strict=True)] for row, bounds in zip(counts, limits, strict=True)]


def held_bounds(plan: Plan, scheduled: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The most micro-batches each replica holds where a schedule has it hold so many: more in modes that keep some under way for every
    worker. A replica holds its share of them all until their backwards come, but for the last stage, whose backward follows at once."""
    per_worker = mode_rules(plan.mode).under_way_per_worker
    if not per_worker:
        return scheduled
    under_way = per_worker * len({replica.devices for stage in plan.stages for replica in stage.replicas})
    counts = micro_batch_counts(plan)
    total = sum(counts[0])
    rows = [
        [min(count, max(held, ceil(under_way * count / total))) for held, count in zip(*both, strict=True)]
        for both in zip(scheduled[:-1], counts[:-1], strict=True)
    ]
    return [*rows, scheduled[-1]]


def _interleaved_bounds(plan: Plan, counts: list[list[int]], columns: bool) -> list[list[int]]:
    """Exact where stages go round the devices in turn; else what the devices may hold in all."""
    groups: dict[tuple[str, ...], int] = {}
    homes = [[groups.setdefault(replica.devices, len(groups)) for replica in stage.replicas] for stage in plan.stages]
    depth = len({tuple(row) for row in homes})
    if columns and all(row == homes[s % depth] for s, row in enumerate(homes)):
        held = {count: interleaved_held(len(counts), depth, count) for count in set(counts[0])}
        return [[held[count][s] for count in row] for s, row in enumerate(counts)]
    limits = device_limits(plan, counts, groups)
    return [[min(count, limits[home]) for count, home in zip(*rows, strict=True)] for rows in zip(counts, homes, strict=True)]


@lru_cache(maxsize=1024)
def interleaved_held(stages: int, depth: int, count: int) -> tuple[int, ...]:
    """The most micro-batches each of `stages` holds when `depth` devices take them in turn: by the order alone, whatever tasks take."""
    most = [0] * stages
    for position, limit in enumerate(interleaved_limits(stages, depth)):
        tasks = [(m // depth, stage, m) for stage in range(position, stages, depth) for m in range(count)]
        forwards = [stage for _, stage, _ in sorted(tasks)]
        backwards = [stage for _, stage, _ in sorted(tasks, key=lambda task: (task[0], -task[1], task[2]))]
        holding = [0] * stages
        undone = 0
        for done, stage in enumerate(forwards):
            if done - undone == limit:
                holding[backwards[undone]] -= 1
                undone += 1
            holding[stage] += 1
            most[stage] = max(most[stage], holding[stage])
    return tuple(most)


def _warm_up(counts: list[list[int]]) -> list[list[int]]:
    """1F1B's warm-up, for any numbers of replicas: enough to give each replica from here to the end one, in proportion to the share."""
    ahead = 0
    rows = []
    for row in reversed(counts):
        ahead += len(row)
        total = sum(row) or 1
        rows.append([max(1, ceil(ahead * count / total - 1e-9)) for count in row])
    return rows[::-1]


def interleaved_limits(stages: int, depth: int) -> list[int]:
    """Micro-batches (of any of its stages) that each of `depth` devices may hold: Megatron-LM's warm-up and the one under way."""
    per_device = stages // depth
    if per_device == 1:
        return [depth - position for position in range(depth)]
    return [(depth - position - 1) * 2 + (per_device - 1) * depth + 1 for position in range(depth)]


def device_limits(plan: Plan, counts: list[list[int]], groups: dict[tuple[str, ...], int]) -> list[int]:
    """The bound for each group of devices, all its stages together."""
    limits = [0] * len(groups)
    places: dict[frozenset[int], int] = {}  # sets of groups that run the same stages, in order of their first
    homes = [[groups[replica.devices] for replica in stage.replicas] for stage in plan.stages]
    for row in homes:
        places.setdefault(frozenset(row), len(places))
    if len(places) < len(plan.stages):
        bounds = interleaved_limits(len(plan.stages), len(places))
        for row in homes:
            for group in row:
                limits[group] = bounds[places[frozenset(row)]]
        return limits
    for row, warm_up in zip(homes, _warm_up(counts), strict=True):
        for group, limit in zip(row, warm_up, strict=True):
            limits[group] += limit
    return limits
