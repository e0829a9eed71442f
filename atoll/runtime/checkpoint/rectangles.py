"""Rectangles: axis-parallel boxes of a tensor's indices, and the arithmetic by which any division of a tensor becomes any other. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

__all__ = ["Rectangle", "disjoint", "flat_range", "intersect", "outside", "split_longest", "uncovered", "whole"]


class Rectangle(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The indices from `offsets` on, `sizes` many in each dimension. A scalar's rectangle has no dimensions and one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.sizes)

    def relative_to(self, origin: "Rectangle") -> "Rectangle":
        """The same indices, counted from the origin's first."""
        return Rectangle(tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True)), self.sizes)

    def with_range(self, dim: int, start: int, size: int) -> "Rectangle":
        """This rectangle with another extent in one dimension."""
        return Rectangle(
            (*self.offsets[:dim], start, *self.offsets[dim + 1 :]),
            (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )

    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with to get this part."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has all these indices."""
        return len(shape) == len(self.offsets) == len(self.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Rectangle:
    """All indices of a tensor."""
    return Rectangle((0,) * len(shape), tuple(shape))


def intersect(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The indices in both, or None when there are none."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    stops = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    if any(stop <= offset for offset, stop in zip(offsets, stops, strict=True)):
        return None
    return Rectangle(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))


def outside(a: Rectangle, b: Rectangle) -> list[Rectangle]:
    """The indices of `a` that are not in `b`, as disjoint rectangles: at most two for each dimension."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.elements else []
    rest, remaining = [], a
    for dim, (offset, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        start, stop = remaining.offsets[dim], remaining.offsets[dim] + remaining.sizes[dim]
        if start < offset:
            rest.append(remaining.with_range(dim, start, offset - start))
        if offset + size < stop:
            rest.append(remaining.with_range(dim, offset + size, stop - offset - size))
        remaining = remaining.with_range(dim, offset, size)
    return rest


def uncovered(a: Rectangle, covers: Iterable[Rectangle]) -> list[Rectangle]:
    """The indices of `a` that are in none of `covers`, as disjoint rectangles."""
    rest = [a] if a.elements else []
    for cover in covers:
        if not rest:
            break
        rest = [piece for part in rest for piece in outside(part, cover)]
    return rest


def disjoint(rectangles: Sequence[Rectangle]) -> bool:
    """Whether no two share an index. They are passed along the dimension that tells most of them apart."""
    if len(rectangles) < 2 or not rectangles[0].offsets:
        return len([rectangle for rectangle in rectangles if rectangle.elements]) < 2
    dim = max(range(len(rectangles[0].offsets)), key=lambda d: len({rectangle.offsets[d] for rectangle in rectangles}))
    active: list[Rectangle] = []
    for one in sorted(rectangles, key=lambda rectangle: rectangle.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > one.offsets[dim]]
        if any(intersect(one, other) for other in active):
            return False
        active.append(one)
    return True


def split_longest(rectangle: Rectangle, count: int) -> list[Rectangle]:
    """At most `count` nearly equal parts along the longest dimension, the first such."""
    if not rectangle.sizes:
        return [rectangle]
    dim = max(range(len(rectangle.sizes)), key=lambda d: rectangle.sizes[d])
    offset, length = rectangle.offsets[dim], rectangle.sizes[dim]
    cuts = [offset + length * i // min(count, length) for i in range(min(count, length) + 1)] if length else []
    parts = [rectangle.with_range(dim, start, stop - start) for start, stop in pairwise(cuts)]
    return parts or [rectangle]


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Elements `start` to `stop` of the tensor laid out flat, as rectangles in that order.

    Laid out flat themselves, one after another, the rectangles are the range: at most `2·dimensions - 1` of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        return _in_row(shape, last, start - last * inner, stop - last * inner)
    head = _in_row(shape, first - 1, start - (first - 1) * inner, inner) if start < first * inner else []
    rows = [Rectangle((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    tail = _in_row(shape, last, 0, stop - last * inner) if stop > last * inner else []
    return head + rows + tail


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Rectangle]:
    return [Rectangle((row, *part.offsets), (1, *part.sizes)) for part in flat_range(shape[1:], start, stop)]
