"""Rules of sharding: where a tagged dimension of an operator's first argument is in its result, and which of its sizes shrink."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from atoll.graph.sharding_regions import Regions, Tag, require

__all__ = ["REDUCE", "RULES", "VIEWS", "Step", "group_of"]

Scaled = tuple[int, int | None, int | fx.Node]  # position among the arguments, index in a list there, the size


@dataclass
class Step:
    """One operator whose first argument is tagged."""

    node: fx.Node
    name: str
    tag: Tag
    shape: tuple[int, ...]  # of the first argument
    result: Any  # shape of the result, or of each of its results
    regions: Regions
    scaled: list[Scaled] = field(default_factory=list)  # filled by the rule

    def argument(self, position: int, default: Any = None) -> Any:
        """A positional argument."""
        return self.node.args[position] if len(self.node.args) > position else default

    def dim(self, position: int, default: int = 0) -> int:
        """An argument that names a dimension of the first argument."""
        return int(self.argument(position, default)) % len(self.shape)

    def limit(self, size: int) -> None:
        """A dimension of `size` must be divided in whole units."""
        self.regions.limit(self.tag.sources, size)

    def scale(self, position: int, index: int | None, size: Any) -> None:
        """A size among the arguments shrinks; -1 follows by itself."""
        if size != -1:
            self.scaled.append((position, index, size))


def _pass(step: Step) -> Tag:
    return step.tag


def _view(step: Step) -> Tag:
    """Reshapes regroup neighbouring dimensions; slices of the tagged one stay whole if what is before it in its group stays before it."""
    tag = _regrouped(step)
    if step.name == "unflatten":
        first = step.dim(1)
        if first <= tag.dim < first + len(step.argument(2)):
            step.scale(2, tag.dim - first, step.argument(2)[tag.dim - first])
    elif step.name != "flatten":
        step.scale(1, tag.dim, step.argument(1)[tag.dim])
    return tag


def _regrouped(step: Step) -> Tag:
    shape, target, tag = step.shape, step.result, step.tag
    left, right = group_of(shape, target, tag.dim)
    before = tag.outer * math.prod(shape[d] for d in left if d < tag.dim)
    if step.regions.fused & tag.sources and before == 1 and len(right) > 1 and target[right[0]] <= 3:
        # Two or three fused projections, one after another: each is divided by itself.
        pieces, length = target[right[0]], shape[tag.dim] // target[right[0]]
        spans = [step.regions.piece(tag, i * length, (i + 1) * length, shape[tag.dim]).spans for i in range(pieces)]
        tag, right = replace(tag, spans=frozenset().union(*spans)), right[1:]
    for d in right:
        if target[d] > before and target[d] % before == 0:
            step.limit(target[d] // before)
            return replace(tag, dim=d, outer=before)
        require(before % target[d] == 0)
        before //= target[d]
    raise ValueError("the tagged dimension is lost")


def group_of(shape: tuple[int, ...], target: tuple[int, ...], dim: int) -> tuple[list[int], list[int]]:
    """The dimensions before and after a reshape that hold the same elements and include `dim`."""
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
        if dim in left:
            return left, right
    raise ValueError("not a reshape")


def _transpose(step: Step) -> Tag:
    a, b = (step.dim(1), step.dim(2)) if len(step.node.args) > 2 else (len(step.shape) - 2, len(step.shape) - 1)
    dim = step.tag.dim
    return replace(step.tag, dim=b if dim == a else a if dim == b else dim)


def _permute(step: Step) -> Tag:
    return replace(step.tag, dim=[d % len(step.shape) for d in step.argument(1)].index(step.tag.dim))


def _unsqueeze(step: Step) -> Tag:
    return replace(step.tag, dim=step.tag.dim + int(step.argument(1) % (len(step.shape) + 1) <= step.tag.dim))


def _squeeze(step: Step) -> Tag:
    removed, dim = step.dim(1), step.tag.dim
    require(isinstance(step.argument(1), int) and removed != dim)
    return replace(step.tag, dim=dim - int(removed < dim and step.shape[removed] == 1))


def _expand(step: Step) -> Tag:
    moved = step.tag.dim + len(step.result) - len(step.shape)
    require(step.result[moved] == step.shape[step.tag.dim])
    step.scale(1, moved, step.argument(1)[moved])
    return replace(step.tag, dim=moved)


def _slice(step: Step) -> Tag:
    """A fused projection taken apart: each piece is divided by itself."""
    cut, dim = step.dim(1), step.tag.dim
    size, length = step.shape[dim], step.result[dim]
    if cut != dim or length == size:
        return step.tag
    start = step.argument(2) or 0
    require(step.argument(4, 1) == 1)
    start = start % size
    step.scale(2, None, start)
    step.scale(3, None, start + length)
    return step.regions.piece(step.tag, start, start + length, size)


def _select(step: Step) -> Tag:
    require(step.dim(1) != step.tag.dim)
    return replace(step.tag, dim=step.tag.dim - int(step.dim(1) < step.tag.dim))


def _split(step: Step) -> Tag:
    """Fused projections: each block is divided by itself."""
    dim, size = step.tag.dim, step.shape[step.tag.dim]
    if step.dim(2) != dim:
        return step.tag
    lengths = [shape[dim] for shape in step.result]
    pieces, start = [], 0
    for length in lengths:
        step.regions.piece(step.tag, start, start + length, size)
        pieces.append((start, start + length))
        start += length
    if step.name == "chunk":
        require(len(set(lengths)) == 1)
    elif step.name == "split" and not isinstance(step.argument(1), (list, tuple)):
        step.scale(1, None, step.argument(1))
    else:
        for index, given in enumerate(step.argument(1)):
            step.scale(1, index, given)
    return replace(step.tag, pieces=tuple(pieces))


def _item(step: Step) -> Tag:
    """One of several results."""
    if not step.tag.pieces:
        return step.tag
    start, stop = step.tag.pieces[step.argument(1)]
    return step.regions.piece(step.tag, start, stop, step.tag.pieces[-1][1])


def _unbind(step: Step) -> Tag:
    require(step.dim(1) != step.tag.dim)
    return replace(step.tag, dim=step.tag.dim - int(step.dim(1) < step.tag.dim))


def _norm(step: Step) -> Tag:
    require(step.tag.dim < len(step.shape) - len(step.argument(1)))
    return step.tag


def _repeat_interleave(step: Step) -> Tag:
    require(isinstance(step.argument(1), int) and step.argument(2, step.node.kwargs.get("dim")) is not None)
    require("output_size" not in step.node.kwargs)
    return step.tag


def _reduce(step: Step) -> Tag:
    """Sums and the like over other dimensions."""
    given = step.argument(1)
    dims = [d % len(step.shape) for d in (given if isinstance(given, (list, tuple)) else [given])]
    if step.name == "log_softmax" and step.tag.dim in dims:
        return replace(step.tag, vocabulary=True)
    require(bool(dims) and step.tag.dim not in dims)
    kept = len(step.result) == len(step.shape)
    return replace(step.tag, dim=step.tag.dim - (0 if kept else sum(d < step.tag.dim for d in dims)))


_PASS = ("dropout", "to", "contiguous", "alias", "clone", "detach", "_to_copy", "type_as")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
REDUCE = ("mean", "sum", "softmax", "_softmax", "amax", "log_softmax", "var", "std", "cumsum", "argmax")

RULES: dict[str, Callable[[Step], Tag]] = {
    **dict.fromkeys(_PASS, _pass),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(REDUCE, _reduce),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "getitem": _item,
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "repeat_interleave": _repeat_interleave,
}
