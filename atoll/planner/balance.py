"""Balance: shares of a batch for unequal replicas, and cuts of the layers for unequal stages. Pure functions.

`shares` is Whale's hardware-aware balance: load in proportion to speed. `balanced_cuts` gives every stage the
same time by bisection on that time.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

__all__ = ["balanced_cuts", "lane_samples", "shares"]


def shares(total: int, speeds: Sequence[float]) -> list[int] | None:
    """Whole numbers summing to `total` that minimise the largest share ÷ speed; every replica gets at least one; None if that cannot be."""
    n = len(speeds)
    if total < n:
        return None
    fastest = sum(speeds)
    taken = [max(1, int(total * speed / fastest)) for speed in speeds]
    while sum(taken) > total:  # the ones that were lifted to 1 took too much: the most loaded gives
        worst = max((i for i in range(n) if taken[i] > 1), key=lambda i: (taken[i] / speeds[i], i))
        taken[worst] -= 1
    heap = [((taken[i] + 1) / speeds[i], i) for i in range(n)]
    heapq.heapify(heap)
    for _ in range(total - sum(taken)):
        _, i = heap[0]
        taken[i] += 1
        heapq.heapreplace(heap, ((taken[i] + 1) / speeds[i], i))
    return taken


def lane_samples(batch_size: int, micro: int, lanes: int, speeds: Sequence[float], any_share: bool) -> list[tuple[int, ...]] | None:
    """Samples of each lane of replicas of these speeds: any number of them, else whole micro-batches.

    None where the batch cannot be divided so, or a lane would not have a sample of every micro-batch.
    """
    unit = 1 if any_share else micro
    counts = shares(batch_size // unit, speeds)
    if counts is None or batch_size % unit or (any_share and min(counts) < lanes):
        return None
    return [_even(count, lanes) if any_share else tuple(count * part for part in _even(micro, lanes)) for count in counts]


def _even(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers as equal as can be."""
    return tuple(total * (i + 1) // parts - total * i // parts for i in range(parts))


def balanced_cuts(
    ends: Sequence[int], prefixes: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] | None = None
) -> list[int] | None:
    """Boundaries 0 = c₀ < c₁ < … < c_S at legal `ends` (the last is the number of layers) with the least greatest stage time.

    `prefixes[s]` are sums of the layers' times on stage s. With `fits(s, start, stop)` every stage must also fit; more layers never fit
    where fewer do not. None where no boundaries fit.
    """
    stages = len(prefixes)
    if len(ends) < stages:
        return None
    layers = ends[-1]
    low = layers and 1.0 / sum(1.0 / prefix[layers] for prefix in prefixes if prefix[layers] > 0)
    high = max(prefix[layers] for prefix in prefixes)
    best = _fill(ends, prefixes, fits, high)
    if best is None:
        return None
    for _ in range(20):
        middle = min((low + high) / 2, 1.1 * low)  # the least time is rarely far above perfect balance
        found = _fill(ends, prefixes, fits, middle)
        if found is None:
            low = middle
        else:
            best = found
            high = max(prefix[b] - prefix[a] for prefix, (a, b) in zip(prefixes, pairwise(found), strict=True))
        if high - low < 1e-3 * high:
            break
    return best


def _fill(
    ends: Sequence[int], prefixes: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] | None, limit: float
) -> list[int] | None:
    """Gives each stage in turn as many layers as `limit` and its memory allow; None where some are left over."""
    stages = len(prefixes)
    bounds = [0]
    position = 0  # in ends
    for s in range(stages):
        prefix, start = prefixes[s], bounds[-1]
        last = len(ends) - (stages - s)  # leave one end for each stage to come
        reach = bisect_right(prefix, prefix[start] + limit * (1 + 1e-9)) - 1  # the most layers by time
        here = min(bisect_right(ends, reach) - 1, last)
        if here < position:
            return None
        if fits is not None:
            furthest = _furthest(ends, position, here + 1, lambda stop, s=s, start=start: fits(s, start, stop))  # type: ignore[misc]
            if furthest is None:
                return None
            here = furthest
        bounds.append(ends[here])
        position = here + 1
    return bounds if bounds[-1] == ends[-1] else None


def _furthest(ends: Sequence[int], low: int, high: int, allowed: Callable[[int], bool]) -> int | None:
    """The last index in [low, high) whose end is allowed, when those allowed come first."""
    if low >= high or not allowed(ends[low]):
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        if allowed(ends[middle]):
            low = middle
        else:
            high = middle
    return low
