"""Balance: shares of a batch for unequal replicas, and cuts of the layers for unequal stages. Pure functions.

`shares` is Whale's hardware-aware balance: load in proportion to speed. `balanced_cuts` gives every stage the
same time by bisection on that time.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

__all__ = ["balanced_cuts", "lane_samples", "shares"]

_NEAR = 5  # looks that are close to perfect balance, before the time between is halved


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
    proven = False  # where other layers are dear to other stages, less than perfect balance of the whole is possible
    for number in range(30):
        middle = (low + high) / 2
        if number < _NEAR:
            middle = min(middle, 1.1 * low)  # the least time is rarely far above perfect balance
        found = _fill(ends, prefixes, fits, middle)
        if found is None:
            low, proven = middle, True
        else:
            best = found
            high = max(prefix[b] - prefix[a] for prefix, (a, b) in zip(prefixes, pairwise(found), strict=True))
        if high - low < 1e-3 * high:
            if proven:
                break
            low, proven = _least(prefixes), True
    return best


def _least(prefixes: Sequence[Sequence[float]]) -> float:
    """No stage's time can be the greatest and less than this: every layer where it is cheapest, divided evenly."""
    cheapest = (min(prefix[b] - prefix[a] for prefix in prefixes) for a, b in pairwise(range(len(prefixes[0]))))
    return sum(cheapest) / len(prefixes)


def _fill(
    ends: Sequence[int], prefixes: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] | None, limit: float
) -> list[int] | None:
    """Boundaries with which no stage takes longer than `limit` and all fit; None where there are none.

    Each stage in turn is given as many layers as it can take. That is best, unless it leaves a stage with a layer that is too much for it.
    """
    taken, stages = [0], len(prefixes)  # of the ends
    for s, prefix in enumerate(prefixes):
        most = _most(ends, prefix, s, fits, limit, taken[-1], len(ends) - (stages - 1 - s))
        if most == taken[-1]:
            return _search(ends, prefixes, fits, limit)
        taken.append(most)
    return [0, *(ends[count - 1] for count in taken[1:])] if taken[-1] == len(ends) else None


def _search(
    ends: Sequence[int], prefixes: Sequence[Sequence[float]], fits: Callable[[int, int, int], bool] | None, limit: float
) -> list[int] | None:
    """The same, with every number of ends that the stages so far can have taken."""
    stages, reached = len(prefixes), [{0: 0}]  # and how many were taken before
    for s, prefix in enumerate(prefixes):
        following: dict[int, int] = {}
        for count in sorted(reached[-1], reverse=True):
            most = _most(ends, prefix, s, fits, limit, count, len(ends) - (stages - 1 - s))
            following |= dict.fromkeys(range(count + 1, most + 1), count)
        reached.append(following)
    count, bounds = len(ends), []
    for before in reversed(reached[1:]):
        if count not in before:
            return None
        bounds.append(ends[count - 1])
        count = before[count]
    return [0, *reversed(bounds)]


def _most(
    ends: Sequence[int],
    prefix: Sequence[float],
    stage: int,
    fits: Callable[[int, int, int], bool] | None,
    limit: float,
    count: int,
    last: int,
) -> int:
    """How many ends are taken at most, `last` or fewer, with a stage that begins after `count` of them; `count` where it can have none."""
    start = ends[count - 1] if count else 0
    reach = bisect_right(prefix, prefix[start] + limit * (1 + 1e-9)) - 1  # the most layers by time
    most = min(bisect_right(ends, reach), last)
    if fits is None or most <= count:
        return max(most, count)
    furthest = _furthest(ends, count, most, lambda stop: fits(stage, start, stop))
    return count if furthest is None else furthest + 1


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
