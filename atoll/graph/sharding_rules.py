"""Rules of sharding: which products can be divided, what must be divided alike, and where a divided dimension goes.

Products with a parameter are found however they are written: `linear`, `addmm` (GPT-2), `x @ w`, `x @ w.T`. Regions are products that must
be divided alike; tags say which dimension of a value is made of their columns. A rule says where a tagged dimension of an operator's first
argument is in its result, and which of its sizes shrink.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import OperatorTable
from atoll.graph.sharding_rewrites import Cut

__all__ = ["REDUCE", "RULES", "VIEWS", "ColumnTag", "NoRuleError", "Product", "Regions", "Step", "find_product", "group_of", "require"]

aten = torch.ops.aten
_TRANSPOSES = (aten.t.default, aten.numpy_T.default, aten.transpose.int)


@dataclass(frozen=True)
class Product:
    """`x · weight`, the contraction over the last dimension of x."""

    x: fx.Node
    weight: fx.Node  # as the product reads it
    parameter: fx.Node  # the weight, or what it is a transpose of
    columns_dim: int  # the parameter's dimension that becomes the result's last
    bias: fx.Node | None = None

    @property
    def depth_dim(self) -> int:
        """The parameter's dimension that is summed over."""
        return 1 - self.columns_dim


def find_product(table: OperatorTable, node: fx.Node) -> Product | None:
    """The product with a two-dimensional parameter that an operator is, if it is one."""
    args: Any = node.args
    if node.target is aten.linear.default and _is_matrix(table, args[1]):
        return Product(args[0], args[1], args[1], 0, args[2] if len(args) > 2 else None)
    if node.target is aten.addmm.default and _is_matrix(table, args[2]):
        return Product(args[1], args[2], args[2], 1, args[0])
    if node.target in (aten.matmul.default, aten.mm.default):
        parameter, turns = args[1], 0
        while isinstance(parameter, fx.Node) and parameter.target in _TRANSPOSES:
            parameter, turns = parameter.args[0], turns + 1
        if _is_matrix(table, parameter):
            return Product(args[0], args[1], parameter, (1 + turns) % 2)
    return None


def _is_matrix(table: OperatorTable, value: Any) -> bool:
    return isinstance(value, fx.Node) and value in table.parameters and len(table.specs[value].shape) == 2


Span = tuple[fx.Node, int, int]  # a product, and the range of its columns


class NoRuleError(Exception):
    """These products cannot be divided."""

    def __init__(self, sources: frozenset[fx.Node]):
        super().__init__(sources)
        self.sources = sources


def require(condition: bool) -> None:
    """Rules state what must hold for a tag to pass; what does not hold withdraws it."""
    if not condition:
        raise ValueError("the rule does not apply")


@dataclass(frozen=True)
class ColumnTag:
    """Dimension `dim` of a value is made of columns of products. Every span describes the whole of the dimension."""

    spans: frozenset[Span]
    dim: int
    vocabulary: bool = False  # already normalised over the tagged dimension
    outer: int = 1  # the dimension is this many samples of the tagged one, as when heads are folded into the batch
    pieces: tuple[tuple[int, int], ...] = ()  # of a list of tensors: the range of the dimension that each one is

    @property
    def sources(self) -> frozenset[fx.Node]:
        """The products whose columns these are."""
        return frozenset(source for source, _, _ in self.spans)


class Region:
    """Products that must be divided alike, and into how many parts at most."""

    def __init__(self, columns: int):
        self.units = columns
        self.ended = False  # in a product by depth or in a loss
        self.vocabulary = False  # in a loss


class Regions:
    """All regions of a layer. Columns have a boundary where fused projections are taken apart; each piece is divided by itself."""

    def __init__(self, fused: frozenset[fx.Node]) -> None:
        self.fused = fused  # products to be seen as two or three projections in one
        self.of: dict[fx.Node, Region] = {}
        self._boundaries: dict[fx.Node, set[int]] = defaultdict(set)

    def start(self, source: fx.Node, columns: int) -> None:
        """A product whose columns may be divided."""
        self.of[source] = Region(columns)

    def joined(self, sources: frozenset[fx.Node]) -> frozenset[fx.Node]:
        """All products that are divided as these are."""
        regions = {id(self.of[source]) for source in sources}
        return frozenset(source for source, region in self.of.items() if id(region) in regions)

    def unite(self, sources: frozenset[fx.Node]) -> Region:
        """The one region of these products."""
        first, *rest = {id(self.of[source]): self.of[source] for source in sorted(sources, key=lambda source: source.name)}.values()
        for other in rest:
            first.units = math.gcd(first.units, other.units)
            first.ended = first.ended or other.ended
            first.vocabulary = first.vocabulary or other.vocabulary
            for source, region in self.of.items():
                if region is other:
                    self.of[source] = first
        return first

    def limit(self, sources: frozenset[fx.Node], size: int) -> None:
        """A dimension of `size` must be divided in whole units."""
        region = self.unite(sources)
        region.units = math.gcd(region.units, size)
        if region.units < 2:
            raise NoRuleError(self.joined(sources))

    def piece(self, tag: ColumnTag, start: int, stop: int, size: int) -> ColumnTag:
        """The range `start` to `stop` of a tagged dimension of `size`, divided by itself."""
        require(tag.outer == 1)
        self.limit(tag.sources, math.gcd(start, stop - start))
        spans = set()
        for source, first, last in tag.spans:
            columns = last - first
            require(columns * start % size == 0 and columns * stop % size == 0)
            span = (source, first + columns * start // size, first + columns * stop // size)
            self._boundaries[source] |= {span[1], span[2]}
            spans.add(span)
        return replace(tag, spans=frozenset(spans), pieces=())

    def cut(self, tag: ColumnTag, size: int, dim: int | None = None) -> Cut:
        """How a dimension of `size` that is made of the tagged columns is divided. Known only once the whole layer was seen."""
        units = self.of[next(iter(tag.spans))[0]].units
        found = {self._blocks(span, size) for span in tag.spans}
        if len(found) != 1 or any(block % units for block in next(iter(found))):
            raise NoRuleError(self.joined(tag.sources))
        return Cut(tag.dim if dim is None else dim, found.pop(), units)

    def _blocks(self, span: Span, size: int) -> tuple[int, ...]:
        source, start, stop = span
        inside = sorted(point for point in self._boundaries[source] if start < point < stop)
        points = [start, *inside, stop]
        if any((point - start) * size % (stop - start) for point in points):
            raise NoRuleError(self.joined(frozenset([source])))
        return tuple((b - a) * size // (stop - start) for a, b in pairwise(points))


Scaled = tuple[int, int | None, int | fx.Node]  # position among the arguments, index in a list there, the size


@dataclass
class Step:
    """One operator whose first argument is tagged."""

    node: fx.Node
    name: str
    tag: ColumnTag
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


def _pass(step: Step) -> ColumnTag:
    return step.tag


def _view(step: Step) -> ColumnTag:
    """Reshapes regroup neighbouring dimensions; slices of the tagged one stay whole if what is before it in its group stays before it."""
    tag = _regrouped(step)
    if step.name == "unflatten":
        first = step.dim(1)
        if first <= tag.dim < first + len(step.argument(2)):
            step.scale(2, tag.dim - first, step.argument(2)[tag.dim - first])
    elif step.name != "flatten":
        step.scale(1, tag.dim, step.argument(1)[tag.dim])
    return tag


def _regrouped(step: Step) -> ColumnTag:
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


def _transpose(step: Step) -> ColumnTag:
    a, b = (step.dim(1), step.dim(2)) if len(step.node.args) > 2 else (len(step.shape) - 2, len(step.shape) - 1)
    dim = step.tag.dim
    return replace(step.tag, dim=b if dim == a else a if dim == b else dim)


def _permute(step: Step) -> ColumnTag:
    return replace(step.tag, dim=[d % len(step.shape) for d in step.argument(1)].index(step.tag.dim))


def _unsqueeze(step: Step) -> ColumnTag:
    return replace(step.tag, dim=step.tag.dim + int(step.argument(1) % (len(step.shape) + 1) <= step.tag.dim))


def _squeeze(step: Step) -> ColumnTag:
    removed, dim = step.dim(1), step.tag.dim
    require(isinstance(step.argument(1), int) and removed != dim)
    return replace(step.tag, dim=dim - int(removed < dim and step.shape[removed] == 1))


def _expand(step: Step) -> ColumnTag:
    moved = step.tag.dim + len(step.result) - len(step.shape)
    require(step.result[moved] == step.shape[step.tag.dim])
    step.scale(1, moved, step.argument(1)[moved])
    return replace(step.tag, dim=moved)


def _slice(step: Step) -> ColumnTag:
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


def _select(step: Step) -> ColumnTag:
    require(step.dim(1) != step.tag.dim)
    return replace(step.tag, dim=step.tag.dim - int(step.dim(1) < step.tag.dim))


def _split(step: Step) -> ColumnTag:
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


def _item(step: Step) -> ColumnTag:
    """One of several results."""
    if not step.tag.pieces:
        return step.tag
    start, stop = step.tag.pieces[step.argument(1)]
    return step.regions.piece(step.tag, start, stop, step.tag.pieces[-1][1])


def _unbind(step: Step) -> ColumnTag:
    require(step.dim(1) != step.tag.dim)
    return replace(step.tag, dim=step.tag.dim - int(step.dim(1) < step.tag.dim))


def _norm(step: Step) -> ColumnTag:
    require(step.tag.dim < len(step.shape) - len(step.argument(1)))
    return step.tag


def _repeat_interleave(step: Step) -> ColumnTag:
    require(isinstance(step.argument(1), int) and step.argument(2, step.node.kwargs.get("dim")) is not None)
    require("output_size" not in step.node.kwargs)
    return step.tag


def _reduce(step: Step) -> ColumnTag:
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

RULES: dict[str, Callable[[Step], ColumnTag]] = {
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
