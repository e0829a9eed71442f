"""Units: who holds what of a layer that tensor parallelism divides.

A layer that can be split consists of `Layer.tensor_units` units, and all of its split tensors are cut along the same units: of 25 heads and
6,400 columns of a feed-forward, unit 3 is head 3 and columns 768 to 1,023. The devices of a lane hold consecutive runs of units, as many as
their `tensor_shares` say, so the shares' sum divides the units of every layer that is split. Without shares the runs are equal.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from math import gcd

from atoll.graph import Layer

__all__ = ["even_shares", "part_of", "split_units", "unit_runs"]


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
