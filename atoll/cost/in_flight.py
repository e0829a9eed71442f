"""How many micro-batches a replica holds at once: what a schedule allows, and therefore what memory must hold."""

from math import ceil

from atoll.plan import Plan

__all__ = ["device_limits", "in_flight_bounds", "micro_batch_counts"]


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


def device_limits(plan: Plan, counts: list[list[int]], groups: dict[tuple[str, ...], int]) -> list[int]:
    """The bound for each group of devices; under interleaving it is Megatron-LM's warm-up over all the stages a group holds."""
    limits = [0] * len(groups)
    if plan.schedule == "interleaved":
        per_group = len(plan.stages) * len(plan.stages[0].replicas) // len(groups)
        depth = len(plan.stages) // max(1, per_group)
        for s, stage in enumerate(plan.stages[:depth]):
            for replica in stage.replicas:
                limits[groups[replica.devices]] = (depth - s - 1) * 2 + (per_group - 1) * depth + 1
        return limits
    for stage, row in zip(plan.stages, _warm_up(counts), strict=True):
        for replica, limit in zip(stage.replicas, row, strict=True):
            limits[groups[replica.devices]] += limit
    return limits
