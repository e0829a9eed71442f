"""How many micro-batches a replica holds at once: what a schedule allows, and therefore what memory must hold."""

from math import ceil

from atoll.plan import Plan

__all__ = ["device_limits", "in_flight_bounds", "interleaved_limits", "micro_batch_counts"]


def micro_batch_counts(plan: Plan) -> list[list[int]]:
    """How many micro-batches each replica of each stage works through in a step."""
    size = plan.micro_batch_size
    return [[-(-replica.total_samples // size) for replica in stage.replicas] for stage in plan.stages]


def in_flight_bounds(plan: Plan) -> list[list[int]]:
    """The most micro-batches each replica may hold, by schedule."""
    counts = micro_batch_counts(plan)
    if plan.schedule == "gpipe":
        return counts
    if plan.schedule == "interleaved":
        return [[min(count, len(plan.stages)) for count in row] for row in counts]
    if all(row == counts[0] for row in counts):  # columns, each a pipeline of its own
        return [[min(count, len(counts) - s) for count in row] for s, row in enumerate(counts)]
    limits = _warm_up(counts)
    return [[min(count, limit) for count, limit in zip(row, bounds, strict=True)] for row, bounds in zip(counts, limits, strict=True)]


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
    return [(depth - position - 1) * 2 + (per_device - 1) * depth + 1 for position in range(depth)]


def device_limits(plan: Plan, counts: list[list[int]], groups: dict[tuple[str, ...], int]) -> list[int]:
    """The bound for each group of devices, all its stages together."""
    limits = [0] * len(groups)
    if plan.schedule == "interleaved":
        depth = max(1, len(groups) // len(plan.stages[0].replicas))
        for stage, limit in zip(plan.stages, interleaved_limits(len(plan.stages), depth), strict=False):
            for replica in stage.replicas:
                limits[groups[replica.devices]] = limit
        return [limit or len(plan.stages) for limit in limits]
    for stage, row in zip(plan.stages, _warm_up(counts), strict=True):
        for replica, limit in zip(stage.replicas, row, strict=True):
            limits[groups[replica.devices]] += limit
    return limits
