"""Rectangles against numpy masks: what they say of indices is what marking the indices says."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.checkpoint.rectangles import Rectangle, disjoint, flat_range, intersect, outside, split_longest, uncovered, whole

_shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def _rectangles(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Rectangle]]:
    shape = draw(_shapes)
    result = []
    for _ in range(count):
        bounds = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
        result.append(Rectangle(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    return shape, result


def _mask(shape: tuple[int, ...], *rectangles: Rectangle) -> np.ndarray:
    """How often each index is in a rectangle."""
    counts = np.zeros(shape, dtype=int)
    for rectangle in rectangles:
        counts[rectangle.slices()] += 1
    return counts


@given(_rectangles(2))
def test_intersection_and_difference(drawn: tuple[tuple[int, ...], list[Rectangle]]) -> None:
    shape, (a, b) = drawn
    common = intersect(a, b)
    both = _mask(shape, a) * _mask(shape, b)
    assert np.array_equal(_mask(shape, *([common] if common else [])), both)
    assert np.array_equal(_mask(shape, *outside(a, b)), _mask(shape, a) - both)


@given(_rectangles(5))
def test_uncovered(drawn: tuple[tuple[int, ...], list[Rectangle]]) -> None:
    shape, (a, *covers) = drawn
    expected = _mask(shape, a) * (_mask(shape, *covers) == 0)
    assert np.array_equal(_mask(shape, *uncovered(a, covers)), expected)


@given(_rectangles(4))
def test_disjoint(drawn: tuple[tuple[int, ...], list[Rectangle]]) -> None:
    shape, rectangles = drawn
    assert disjoint(rectangles) == (_mask(shape, *rectangles).max(initial=0) <= 1)


@given(_shapes, st.data())
def test_flat_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    numbers = np.arange(total).reshape(shape)
    parts = flat_range(shape, start, stop)
    joined = [number for part in parts for number in np.atleast_1d(numbers[part.slices()]).reshape(-1).tolist()]
    assert joined == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(_shapes, st.integers(1, 5))
def test_splitting_covers_once_and_evenly(shape: tuple[int, ...], count: int) -> None:
    parts = split_longest(whole(shape), count)
    assert len(parts) <= count
    assert np.array_equal(_mask(shape, *parts), np.ones(shape, dtype=int))
    if shape:
        lengths = [max(p.sizes[d] for d in range(len(shape)) if shape[d] == max(shape)) for p in parts]
        assert len(parts) == min(count, max(shape)) or max(lengths) == min(lengths)
