"""Routing: which replica of a stage takes which micro-batch."""

from collections import Counter
from functools import lru_cache
from heapq import heappop, heappush

__all__ = ["pair_counts", "route"]


@lru_cache(maxsize=1024)
def route(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Which replica takes each micro-batch, in order: every replica gets its count, and at any moment is less than one off its share.

    The j-th micro-batch of a replica has to come after `(j - 1) / share` were routed and no later than `j / share`; giving each turn to
    the earliest of those deadlines meets them all, as for periodic tasks on one processor.
    """
    width, total = len(counts), sum(counts)
    if len(set(counts)) == 1:
        return tuple(range(width)) * counts[0]
    released: list[list[int]] = [[] for _ in range(total)]  # by turn: deadline and replica, as one number
    for replica, count in enumerate(counts):
        for j in range(count):
            released[j * total // count].append(-(-(j + 1) * total // count) * width + replica)
    due: list[int] = []
    order = []
    for more in released:
        for deadline in more:
            heappush(due, deadline)
        order.append(heappop(due) % width)
    return tuple(order)


@lru_cache(maxsize=1024)
def pair_counts(before: tuple[int, ...], after: tuple[int, ...]) -> "Counter[tuple[int, int]]":
    """How many micro-batches go from each replica of a stage to each of the next, by the counts of both."""
    if before == after:
        return Counter({(i, i): count for i, count in enumerate(before) if count})
    return Counter(zip(route(before), route(after), strict=True))
