"""Axes: which dimension of an operator's result is which dimension of its operands.

Every dimension gets a label; equal labels are the same axis, as the letters of an einsum are. An operator acts on each slice of an axis
alone when the axis is in its result and not among those it mixes, so a rewrite may give it some slices instead of all. An operator that
is not known here has no axes, and whoever asks must leave it whole.
"""

import operator
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable, schema_name

__all__ = ["Axes", "find_axes", "operator_name", "reshape_groups"]

Labels = tuple[object, ...]

_LAST = (None, torch.iinfo(torch.int64).max)  # how a slice says "to the end"
_SAME = frozenset({"dropout", "to", "contiguous", "alias", "clone", "detach", "_to_copy"})
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
_MIXED_KEPT = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"})  # over one dimension, which stays
_REDUCED = frozenset({"sum", "mean", "amax", "amin", "argmax", "var", "std"})  # over dimensions, which go
_CUT = frozenset({"split", "split_with_sizes", "chunk", "unbind", "slice", "select", "narrow"})


@dataclass(frozen=True)
class Axes:
    """Labels of an operator's operands and result. None stands for a dimension of one element that is repeated."""

    operands: tuple[tuple[fx.Node, Labels], ...]
    result: Labels
    mixed: frozenset[object] = field(default_factory=frozenset)  # axes along which slices are not independent
    sums: bool = False  # an axis that is not in the result was summed over products, so sums of parts can be added


def operator_name(node: fx.Node) -> str:
    """`add` for `aten.add.Tensor` and for `aten.add_.Tensor`."""
    name = schema_name(node)
    return name.rstrip("_") if not name.startswith("__") else name


def find_axes(table: OperatorTable, node: fx.Node) -> Axes | None:
    """The axes of one operator of the program; None when it is not one of those known here."""
    name = operator_name(node)
    try:
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or name == "type_as":
            return _pointwise(table, node)
        if name in _SAME or node.target is operator.getitem:
            return _moved(table, node, lambda labels: labels)
        return _RULES[name](table, node) if name in _RULES else None
    except (IndexError, KeyError, ValueError, TypeError, AttributeError):
        return None  # a call in a form that the rule does not know


def _shape(table: OperatorTable, value: Any) -> tuple[int, ...]:
    spec = table.specs[value]
    if isinstance(spec, (list, tuple)):
        spec = spec[0]
    if not isinstance(spec, TensorSpec):
        raise TypeError("not a tensor")
    return spec.shape


def _tensors(table: OperatorTable, node: fx.Node) -> list[fx.Node]:
    return [value for value in node.all_input_nodes if isinstance(table.specs[value], TensorSpec)]


def _aligned(shape: Sequence[int], result: Sequence[int]) -> Labels:
    """Broadcasting: dimensions are counted from the right, those of one element are repeated."""
    offset = len(result) - len(shape)
    return tuple(d + offset if size == result[d + offset] else None for d, size in enumerate(shape))


def _pointwise(table: OperatorTable, node: fx.Node) -> Axes:
    result = _shape(table, node)
    return Axes(tuple((value, _aligned(_shape(table, value), result)) for value in _tensors(table, node)), tuple(range(len(result))))


def _moved(table: OperatorTable, node: fx.Node, move: Callable[[Labels], Labels], mixed: Sequence[object] = ()) -> Axes:
    """An operator on its first argument alone."""
    value: Any = node.args[0]
    labels = tuple(range(len(_shape(table, value))))
    return Axes(((value, labels),), move(labels), frozenset(mixed))


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _transpose(table: OperatorTable, node: fx.Node) -> Axes:
    rank = len(_shape(table, node))
    a, b = (_argument(node, 1, "dim0", rank - 2) % rank, _argument(node, 2, "dim1", rank - 1) % rank)

    def swap(labels: Labels) -> Labels:
        swapped = list(labels)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return tuple(swapped)

    return _moved(table, node, swap)


def _permute(table: OperatorTable, node: fx.Node) -> Axes:
    order: Any = node.args[1]
    return _moved(table, node, lambda labels: tuple(labels[d] for d in order))


def _unsqueeze(table: OperatorTable, node: fx.Node) -> Axes:
    place = _argument(node, 1, "dim", 0) % len(_shape(table, node))
    return _moved(table, node, lambda labels: (*labels[:place], "new", *labels[place:]))


def _squeeze(table: OperatorTable, node: fx.Node) -> Axes:
    shape = _shape(table, node.args[0])
    given: Any = node.args[1]
    gone = {d % len(shape) for d in (given if isinstance(given, (list, tuple)) else [given])}
    return _moved(table, node, lambda labels: tuple(label for d, label in enumerate(labels) if d not in gone or shape[d] != 1))


def _expand(table: OperatorTable, node: fx.Node) -> Axes:
    value: Any = node.args[0]
    result = _shape(table, node)
    return Axes(((value, _aligned(_shape(table, value), result)),), tuple(range(len(result))))


def _view(table: OperatorTable, node: fx.Node) -> Axes:
    """Dimensions that a reshape leaves alone keep their axis; those it merges or divides are new ones."""
    value: Any = node.args[0]
    before, after = _sizes(table, value), _sizes(table, node)
    labels: list[object] = [("before", d) for d in range(len(before))]
    result: list[object] = [("after", d) for d in range(len(after))]
    for left, right in reshape_groups(_shape(table, value), _shape(table, node)):
        if len(left) == len(right) == 1 and left[0] < len(before) and right[0] < len(after) and before[left[0]] == after[right[0]]:
            result[right[0]] = labels[left[0]]
    return Axes(((value, tuple(labels)),), tuple(result))


def _sizes(table: OperatorTable, value: fx.Node) -> list[str]:
    """Sizes as the program knows them: symbols of the batch's sizes stay symbols, so that equal numbers are not taken for equal sizes."""
    traced = value.meta.get("val")
    return [str(size) for size in (traced.shape if isinstance(traced, torch.Tensor) else _shape(table, value))]


def reshape_groups(shape: tuple[int, ...], target: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Dimensions before and after a reshape that hold the same elements; where one side has no more, the next that it would have."""
    i = j = 0
    while i < len(shape) or j < len(target):
        left, right = [i], [j]
        a = shape[i] if i < len(shape) else 1
        b = target[j] if j < len(target) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                left.append(i)
                a, i = a * shape[i], i + 1
            else:
                right.append(j)
                b, j = b * target[j], j + 1
        yield left, right


def _mixing(table: OperatorTable, node: fx.Node) -> Axes:
    dim = _argument(node, 1, "dim", -1) % len(_shape(table, node))
    return _moved(table, node, lambda labels: labels, [dim])


def _reduce(table: OperatorTable, node: fx.Node) -> Axes:
    rank = len(_shape(table, node.args[0]))
    given = _argument(node, 1, "dim", None)
    gone = {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])} or set(range(rank))
    kept = len(_shape(table, node)) == rank
    return _moved(table, node, lambda labels: tuple(label for d, label in enumerate(labels) if kept or d not in gone), sorted(gone))


def _cut(table: OperatorTable, node: fx.Node) -> Axes:
    """Operators that take parts of one dimension; a slice that takes all of it leaves it alone."""
    name = operator_name(node)
    shape = _shape(table, node.args[0])
    dim = _argument(node, {"split": 2, "split_with_sizes": 2, "chunk": 2}.get(name, 1), "dim", 0) % len(shape)
    if name in ("select", "unbind"):
        return _moved(table, node, lambda labels: (*labels[:dim], *labels[dim + 1 :]), [dim])
    whole = name == "slice" and not _argument(node, 2, "start", 0) and _argument(node, 3, "end", None) in _LAST
    return _moved(table, node, lambda labels: labels, [] if whole and _argument(node, 4, "step", 1) == 1 else [dim])


def _norm(table: OperatorTable, node: fx.Node) -> Axes:
    """Normalisation over the last dimensions, with weights of their shape."""
    value: Any = node.args[0]
    shape, over = _shape(table, value), len(_argument(node, 1, "normalized_shape", ()))
    labels = tuple(range(len(shape)))
    others = tuple((other, labels[len(shape) - over :]) for other in _tensors(table, node) if other is not value)
    return Axes(((value, labels), *others), labels, frozenset(labels[len(shape) - over :]))


def _cat(table: OperatorTable, node: fx.Node) -> Axes:
    values: Any = node.args[0]
    labels = tuple(range(len(_shape(table, node))))
    return Axes(tuple((value, labels) for value in values), labels, frozenset([_argument(node, 1, "dim", 0) % len(labels)]))


def _linear(table: OperatorTable, node: fx.Node) -> Axes:
    value, weight, *bias = _tensors(table, node)
    labels = tuple(range(len(_shape(table, value))))
    depth, columns = labels[-1], "columns"
    operands: list[tuple[fx.Node, Labels]] = [(value, labels), (weight, (columns, depth)), *((other, (columns,)) for other in bias)]
    return Axes(tuple(operands), (*labels[:-1], columns), sums=not bias)


def _matmul(table: OperatorTable, node: fx.Node) -> Axes:
    """`bmm` and `matmul` of at least two dimensions each; `baddbmm` adds a first operand to the product."""
    *added, left, right = _tensors(table, node)
    a, b, result = _shape(table, left), _shape(table, right), _shape(table, node)
    if len(a) < 2 or len(b) < 2:
        raise ValueError("vectors have no rows")
    batch = result[:-2]
    operands: list[tuple[fx.Node, Labels]] = [
        (left, (*_aligned(a[:-2], batch), len(batch), "depth")),
        (right, (*_aligned(b[:-2], batch), "depth", len(batch) + 1)),
    ]
    operands += [(value, _aligned(_shape(table, value), result)) for value in added]
    return Axes(tuple(operands), tuple(range(len(result))), sums=not added)


def _einsum(table: OperatorTable, node: fx.Node) -> Axes:
    equation: Any = node.args[0]
    values: Any = node.args[1]
    sides = equation.replace(" ", "").split("->")
    letters = sides[0].split(",")
    once = [letter for letter in sorted(set(sides[0]) & set(string.ascii_letters)) if sides[0].count(letter) == 1]
    result = sides[1] if len(sides) > 1 else "".join(once)
    if "." in equation or any(len(set(word)) < len(word) for word in (*letters, result)):
        raise ValueError("ellipses and diagonals have no rule")
    operands = []
    for value, word in zip(values, letters, strict=True):
        sizes = dict(zip(word, _shape(table, value), strict=True))
        full = {letter: max(_size(table, values, letters, letter)) for letter in word}
        operands.append((value, tuple(letter if sizes[letter] == full[letter] else None for letter in word)))
    return Axes(tuple(operands), tuple(result), sums=True)


def _size(table: OperatorTable, values: Sequence[fx.Node], words: Sequence[str], letter: str) -> list[int]:
    return [_shape(table, value)[word.index(letter)] for value, word in zip(values, words, strict=True) if letter in word]


_Rule = Callable[[OperatorTable, fx.Node], Axes]
_RULES: dict[str, _Rule] = {
    "transpose": _transpose,
    "t": _transpose,
    "numpy_T": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "cat": _cat,
    "linear": _linear,
    "bmm": _matmul,
    "matmul": _matmul,
    "baddbmm": _matmul,
    "einsum": _einsum,
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_MIXED_KEPT, _mixing),
    **dict.fromkeys(_REDUCED, _reduce),
    **dict.fromkeys(_CUT, _cut),
}
