"""Rules of sharding: which products can be divided, what must be divided alike, and where a divided dimension goes.

Products with a parameter are found however they are written: `linear`, `addmm` (GPT-2), `x @ w`, `x @ w.T`. Regions are products that must
be divided alike; tags say which dimension of a value is made of their columns. A rule says where a tagged dimension of an operator's first
argument is in its result, and which of its sizes shrink.

Lanes that divide a layer gather each other's samples: divided values hold all lanes' samples. That is right only where operators keep
samples apart and in order; a layer where one does not cannot be divided between lanes, and says why (`find_gathering`).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from atoll.graph.axes import find_axes, reshape_groups
from atoll.graph.fake import is_symbolic
from atoll.graph.operators import OperatorTable, schema_name
from atoll.graph.sharding_rewrites import ByDepth, Cut, DivideLoss, Gathering, Lookup, Operand, Sharding

__all__ = ["RULES", "ColumnTag", "NoRuleError", "Product", "Regions", "Step", "find_gathering", "find_product", "require"]

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

    table: OperatorTable
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

    def dim(self, position: int) -> int:
        """An argument that names a dimension of the first argument."""
        return int(self.argument(position, 0)) % len(self.shape)

    def limit(self, size: int) -> None:
        """A dimension of `size` must be divided in whole units."""
        self.regions.limit(self.tag.sources, size)

    def scale(self, position: int, index: int | None, size: Any) -> None:
        """A size among the arguments shrinks; -1 follows by itself."""
        if size != -1:
            self.scaled.append((position, index, size))


def _pass(step: Step) -> ColumnTag:
    return step.tag


def _follow(step: Step) -> ColumnTag:
    """Operators that act on each slice of the tagged axis alone, and keep it."""
    axes = find_axes(step.table, step.node)
    if axes is None:
        raise ValueError("its axes are not known")
    label = axes.operands[0][1][step.tag.dim]
    require(label is not None and label in axes.result and label not in axes.mixed)
    return replace(step.tag, dim=axes.result.index(label))


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
    left, right = _group_of(shape, target, tag.dim)
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


def _group_of(shape: tuple[int, ...], target: tuple[int, ...], dim: int) -> tuple[list[int], list[int]]:
    """The dimensions before and after a reshape that hold the same elements and include `dim`."""
    return next((left, right) for left, right in reshape_groups(shape, target) if dim in left)


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


def _repeat_interleave(step: Step) -> ColumnTag:
    require(isinstance(step.argument(1), int) and step.argument(2, step.node.kwargs.get("dim")) is not None)
    require("output_size" not in step.node.kwargs)
    return step.tag


def _reduce(step: Step) -> ColumnTag:
    """Sums and the like over other dimensions; a normalisation over the tagged one is that of a vocabulary."""
    if step.name == "log_softmax" and step.dim(1) == step.tag.dim:
        return replace(step.tag, vocabulary=True)
    return _follow(step)


_PASS = ("dropout", "to", "contiguous", "alias", "clone", "detach", "_to_copy", "type_as")
_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_REDUCE = ("mean", "sum", "softmax", "_softmax", "amax", "log_softmax", "var", "std", "cumsum", "argmax")

RULES: dict[str, Callable[[Step], ColumnTag]] = {
    **dict.fromkeys(_PASS, _pass),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_REDUCE, _reduce),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("transpose", "permute", "unsqueeze", "select", "unbind", "layer_norm", "rms_norm"), _follow),
    "getitem": _item,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "repeat_interleave": _repeat_interleave,
}

_ALONG = ("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "repeat_interleave")  # work along a dimension
_MATRICES = ("matmul", "bmm", "baddbmm", "scaled_dot_product_attention")  # work on the last two


class _MixedError(Exception):
    """Samples would be mixed."""


def find_gathering(table: OperatorTable, sharding: Sharding) -> Gathering:
    """What changes in a divided layer when lanes divide it."""
    try:
        return _Search(table, sharding).run()
    except _MixedError as error:
        return Gathering({}, (), refused=str(error))


class _Search:
    def __init__(self, table: OperatorTable, sharding: Sharding):
        self.table, self.sharding = table, sharding

    def run(self) -> Gathering:
        samples = {}
        ends = set()
        for rewrite in self.sharding.rewrites:
            value = rewrite.value if isinstance(rewrite, Operand) else rewrite.node
            if isinstance(rewrite, (ByDepth, DivideLoss, Lookup)):
                ends.add(rewrite.node)
            if isinstance(rewrite, DivideLoss):
                (_, value, *_) = rewrite.node.args  # type: ignore[assignment]
            if isinstance(rewrite, (Operand, ByDepth, DivideLoss, Lookup)):
                found = self._samples(value)
                if found is not None:
                    samples[value] = found
                elif not isinstance(rewrite, Operand):
                    raise _MixedError(f"{rewrite.node.name} does not depend on the samples")
        inside = sorted(self.sharding.values | ends, key=lambda node: self.table.position[node])
        for node in inside:
            self._check(node, node in ends)
        return Gathering(samples, tuple(size for node in inside for size in self._sizes(node)))

    def _samples(self, node: fx.Node) -> tuple[int, int] | None:
        """The dimension of a tensor that runs over samples, and its length for one."""
        value = node.meta.get("val")
        if node in self.table.parameters or not isinstance(value, torch.Tensor):
            return None
        found = [(d, self._per_sample(node, size)) for d, size in enumerate(value.shape) if is_symbolic(size)]
        if len(found) > 1:
            raise _MixedError(f"{node.name} has {len(found)} dimensions that grow with the samples")
        return found[0] if found else None

    def _per_sample(self, node: fx.Node, size: Any) -> int:
        """What a size that grows with the samples is for one of them."""
        expression = size.node.expr
        symbols = list(expression.free_symbols)
        count = int(size.node.hint) // self.table.samples if size.node.hint is not None else 0
        if len(symbols) != 1 or expression != count * symbols[0]:
            raise _MixedError(f"a size of {node.name}, {expression}, is not a multiple of the samples")
        return count

    def _sizes(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node, int]]:
        sizes = []
        for value in node.all_input_nodes:
            size = value.meta.get("val")
            if is_symbolic(size):
                sizes.append((node, value, self._per_sample(node, size)))
        return sizes

    def _check(self, node: fx.Node, ends: bool) -> None:
        """That an operator keeps samples apart, and in order."""
        name = schema_name(node)
        first: Any = node.args[0]
        if ends or find_product(self.table, node) is not None:
            return
        where = self._samples(node)
        before = self._samples(first) if isinstance(first, fx.Node) else where
        if name in _MATRICES:
            mixed = where is None or where[0] >= len(self.table.specs[node].shape) - 2
        elif before is not None and name in _ALONG:
            mixed = before[0] == self._dimension(node, name) % len(self.table.specs[node if name == "cat" else first].shape)
        elif before is None or where is None:
            mixed = before is not None
        elif name in _VIEWS:
            mixed = not self._leads(first, node, before[0], where[0])
        elif name in _REDUCE:
            given: Any = node.args[1]
            rank = len(self.table.specs[first].shape)
            mixed = before[0] in {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])}
        else:
            mixed = False
        if mixed:
            raise _MixedError(f"{node.name} does not keep samples apart")

    @staticmethod
    def _dimension(node: fx.Node, name: str) -> int:
        position = {"split": 2, "split_with_sizes": 2, "chunk": 2, "repeat_interleave": 2}.get(name, 1)
        found: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
        return int(found)

    def _leads(self, first: fx.Node, node: fx.Node, before: int, after: int) -> bool:
        """Whether a reshape leaves each sample's elements together: samples come first in their group of dimensions on both sides."""
        shape, target = self.table.specs[first].shape, self.table.specs[node].shape
        left, right = _group_of(shape, target, before)
        ahead = [shape[d] for d in left if d < before] + [target[d] for d in right if d < after]
        return after in right and math.prod(ahead) == 1
