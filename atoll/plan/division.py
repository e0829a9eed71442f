"""How a plan divides the global batch: into micro-batches, these among replicas, each among lanes; and layers among devices. Pure.

Runtimes do it this way, so the cost model prices what they do: a micro-batch of 3 on 2 lanes is 2 and 1 samples, not 1.5 twice.

A layer that can be split consists of `Layer.tensor_units` units, and all of its split tensors are cut along the same units: of 25 heads and
6,400 columns of a feed-forward, unit 3 is head 3 and columns 768 to 1,023. The devices of a lane hold consecutive runs of units, as many as
their `tensor_shares` say, so the shares' sum divides the units of every layer that is split. Without shares the runs are equal.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import gcd

from atoll.graph import Layer
from atoll.plan.plan import Plan, Stage

__all__ = [
    "apportion",
    "even_shares",
    "has_empty_lane",
    "lane_bounds",
    "lane_pieces",
    "micro_batch_counts",
    "micro_batches_of",
    "pair_counts",
    "part_of",
    "route",
    "routes_of",
    "split_units",
    "unit_runs",
]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts proportional to the weights: each is rounded down, what is left goes to the largest remainders."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def micro_batch_counts(plan: Plan) -> list[list[int]]:
    """How many micro-batches each replica of each stage works through in a step."""
    size = plan.micro_batch_size
    return [[-(-sum(replica.samples) // size) for replica in stage.replicas] for stage in plan.stages]


def micro_batches_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Samples of the global batch that each micro-batch is: start and stop.

    With one stage every replica cuts its own contiguous share, evenly if it has lanes: each must get something of every micro-batch.
    With several stages whole micro-batches are routed.
    """
    shares = [replica.samples for replica in plan.stages[0].replicas] if len(plan.stages) == 1 else [(plan.batch_size,)]
    sizes = [size for samples in shares for size in _sizes(plan.micro_batch_size, len(plan.stages) == 1, samples)]
    return tuple(pairwise(accumulate(sizes, initial=0)))


def _sizes(size: int, one_stage: bool, samples: Sequence[int]) -> list[int]:
    """The micro-batches of a replica whose lanes take so many samples of the batch."""
    share = sum(samples)
    count = -(-share // size)
    if one_stage and len(samples) > 1:
        return apportion(share, [1] * count)
    return [size] * (count - 1) + [share - size * (count - 1)]


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


def routes_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The replica of each stage that takes each micro-batch: `routes_of(plan)[stage][micro_batch]`."""
    if len(plan.stages) == 1:
        return (tuple(r for r, count in enumerate(micro_batch_counts(plan)[0]) for _ in range(count)),)
    return tuple(_route(plan, stage, counts) for stage, counts in zip(plan.stages, micro_batch_counts(plan), strict=True))


def _route(plan: Plan, stage: Stage, counts: list[int]) -> tuple[int, ...]:
    """Evenly in turn, and the last micro-batch, where it is short, to the replica whose share is not whole."""
    order = list(route(tuple(counts)))
    short = [r for r, replica in enumerate(stage.replicas) if replica.total_samples % plan.micro_batch_size]
    if short and order[-1] != short[0]:
        last = len(order) - 1 - order[::-1].index(short[0])
        order[last], order[-1] = order[-1], order[last]
    return tuple(order)


def lane_pieces(sizes: Sequence[int], samples: Sequence[int]) -> list[list[int]]:
    """How many samples of each of a replica's micro-batches every lane takes, where lanes take `samples` of the batch."""
    left = list(samples)
    rows = []
    for size in sizes:
        row = apportion(size, left)
        left = [own - taken for own, taken in zip(left, row, strict=True)]
        rows.append(row)
    return rows


@lru_cache(maxsize=8192)
def lane_bounds(size: int, one_stage: bool, samples: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The fewest and the most samples of a micro-batch of `size` that each lane of a replica ever takes, of `samples` of the batch."""
    total = sum(samples)
    if len(samples) == 1 or not total:
        return ((min(size, total), min(size, total)),) * len(samples)
    rows = lane_pieces(_sizes(size, one_stage, samples), samples)
    return tuple((min(column), max(column)) for column in zip(*rows, strict=True))


def has_empty_lane(plan: Plan) -> bool:
    """Whether some lane gets no sample of some micro-batch: lanes that exchange tensors in lockstep need one of each."""
    size, one_stage = plan.micro_batch_size, len(plan.stages) == 1
    lanes = {replica.samples for stage in plan.stages if stage.lanes > 1 for replica in stage.replicas}
    return any(fewest == 0 for samples in lanes for fewest, _ in lane_bounds(size, one_stage, samples))


def split_units(layers: Iterable[Layer]) -> list[int]:
    """The units of those layers that can be split."""
    return [layer.tensor_units for layer in layers if layer.tensor_units > 1]


def even_shares(units: Iterable[int], tensor: int) -> tuple[int, ...] | None:
    """Tensor shares as equal as layers of these units allow: () where all divide by `tensor`, None where nothing divides them alike."""
    common = gcd(*units)
    if common % tensor == 0:
        return ()
    if common < tensor:
        return None
    each, more = divmod(common, tensor)
    return (each + 1,) * more + (each,) * (tensor - more)


def unit_runs(units: int, tensor: int, shares: tuple[int, ...] = ()) -> tuple[range, ...]:
    """Which units of a layer each of `tensor` devices of a lane holds. `validate` sees to it that shares deal out whole units."""
    parts = shares or (1,) * tensor
    total = sum(parts)
    assert units % total == 0, f"{units} units cannot be dealt out as {parts}"
    return tuple(range(a * units // total, b * units // total) for a, b in pairwise(accumulate(parts, initial=0)))


def part_of(size: int, units: int, run: range) -> range:
    """Where a run of units lies in a split dimension of `size`; a vocabulary's units may differ by one row."""
    return range(size * run.start // units, size * run.stop // units)
