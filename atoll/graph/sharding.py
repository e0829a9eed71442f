"""Tensor parallelism on a layer of the captured program: which products divide by columns, which by depth, and what lies between.

The output dimension of every parameter product is tagged, and the tag is carried through the operators that act on each slice alone until
a product contracts over it (divided by depth, its result summed over devices) or a cross-entropy consumes it (the vocabulary). A tag that
meets an operator without a rule is withdrawn, so that product is repeated on every device: slower, never wrong.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable

__all__ = ["Sharding", "find_sharding"]

aten = torch.ops.aten
Split = Literal["", "rows", "columns", "depth"]


@dataclass
class Sharding:
    """How one layer divides. Bytes are of the whole captured batch."""

    split: dict[int, Split] = field(default_factory=dict)  # operator position → what tensor parallelism divides of it
    values: set[fx.Node] = field(default_factory=set)  # values of which each device holds a part
    parameters: set[fx.Node] = field(default_factory=set)  # parameters of which each device holds a part
    units: int = 0  # the most equal parts; 0: no limit but the vocabulary's
    reduced_bytes: float = 0.0  # summed over devices in forward; as much again in backward
    reductions: int = 0


@dataclass(frozen=True)
class _Tag:
    sources: frozenset[fx.Node]  # the products whose columns these are
    dim: int
    vocabulary: bool = False  # already normalised over the tagged dimension
    outer: int = 1  # the dimension is this many samples of the tagged one, as when heads are folded into the batch


class _NoRuleError(Exception):
    """These products cannot be divided."""


def _require(condition: bool) -> None:
    """Rules state what must hold for a tag to pass; what does not hold withdraws it."""
    if not condition:
        raise ValueError("the rule does not apply")


@dataclass(frozen=True)
class _Linear:
    """A product with a parameter: `x · weight`, the contraction over the last dimension of x."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


class _Region:
    """Products that must be divided alike, and into how many parts at most."""

    def __init__(self, columns: int):
        self.units = columns
        self.ended = False  # in a product by depth or in a loss
        self.vocabulary = False  # in a loss


_TRANSPOSES = (aten.t.default, aten.numpy_T.default, aten.transpose.int)
_SMALLEST_VOCABULARY = 64  # fewer classes are not worth dividing
_PASS = frozenset({"dropout", "to", "contiguous", "alias", "clone", "detach", "_to_copy", "type_as", "feature_dropout"})
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
_REDUCE = frozenset({"mean", "sum", "softmax", "_softmax", "amax", "log_softmax", "var", "std", "cumsum", "argmax"})


class _Analysis:
    """One attempt over one layer, with some products withdrawn."""

    def __init__(self, table: OperatorTable, start: int, stop: int, fused: set[fx.Node], withdrawn: set[fx.Node]):
        self.table, self.start, self.stop, self.fused, self.withdrawn = table, start, stop, fused, withdrawn
        self.tags: dict[fx.Node, _Tag] = {}
        self.region: dict[fx.Node, _Region] = {}
        self.result = Sharding()
        self.inside = {entry.node for entry in table.operators[start:stop]}

    def run(self) -> Sharding:
        for position in range(self.start, self.stop):
            node = self.table.operators[position].node
            tagged = [value for value in node.all_input_nodes if value in self.tags]
            linear = self._linear(node)
            if not tagged:
                if linear is not None:
                    self._start(node, linear, position)
                continue
            sources = frozenset().union(*(self.tags[value].sources for value in tagged))
            if any(source in self.withdrawn for source in sources):
                raise _NoRuleError(sources)
            try:
                self._carry(node, linear, position, sources)
            except _NoRuleError:
                raise
            except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
                raise _NoRuleError(self._joined(sources)) from error
        return self._finish()

    def _shape(self, node: Any) -> tuple[int, ...]:
        spec = self.table.specs[node]
        return spec.shape if isinstance(spec, TensorSpec) else ()

    def _is_parameter(self, value: Any, dimensions: int) -> bool:
        return isinstance(value, fx.Node) and value in self.table.parameters and len(self._shape(value)) == dimensions

    def _matrix(self, value: Any) -> fx.Node | None:
        """The two-dimensional parameter a value is, perhaps transposed."""
        while isinstance(value, fx.Node) and value.target in _TRANSPOSES:
            value = value.args[0]
        return value if self._is_parameter(value, 2) else None

    def _linear(self, node: fx.Node) -> _Linear | None:
        args: Any = node.args
        if node.target is aten.linear.default and self._is_parameter(args[1], 2):
            return _Linear(args[0], args[1], args[2] if len(args) > 2 else None)
        if node.target is aten.addmm.default and self._is_parameter(args[2], 2):
            return _Linear(args[1], args[2], args[0])
        if node.target in (aten.matmul.default, aten.mm.default) and (weight := self._matrix(args[1])) is not None:
            return _Linear(args[0], weight, None)
        return None

    def _start(self, node: fx.Node, linear: _Linear, position: int) -> None:
        """A product whose columns may be divided."""
        shape = self._shape(node)
        if node in self.withdrawn or shape[-1] < 2 or sum(user in self.inside for user in linear.weight.users) != 1:
            return
        self.tags[node] = _Tag(frozenset([node]), len(shape) - 1)
        self.region[node] = _Region(shape[-1])
        self.result.split[position] = "columns"
        self.result.values.add(node)
        self.result.parameters.add(linear.weight)
        if linear.bias is not None and linear.bias in self.table.parameters:
            self.result.parameters.add(linear.bias)

    def _joined(self, sources: frozenset[fx.Node]) -> frozenset[fx.Node]:
        regions = {id(self.region[source]) for source in sources}
        return frozenset(source for source, region in self.region.items() if id(region) in regions)

    def _unite(self, sources: frozenset[fx.Node]) -> _Region:
        regions = {id(region): region for region in (self.region[source] for source in sources)}
        first, *rest = regions.values()
        for other in rest:
            first.units = math.gcd(first.units, other.units)
            first.ended = first.ended or other.ended
            for source, region in self.region.items():
                if region is other:
                    self.region[source] = first
        return first

    def _limit(self, sources: frozenset[fx.Node], size: int) -> None:
        region = self._unite(sources)
        region.units = math.gcd(region.units, size)
        if region.units < 2:
            raise _NoRuleError(self._joined(sources))

    def _mark(self, node: fx.Node, position: int, tag: _Tag) -> None:
        self.tags[node] = tag
        self.result.values.add(node)
        self.result.split[position] = "rows"

    def _carry(self, node: fx.Node, linear: _Linear | None, position: int, sources: frozenset[fx.Node]) -> None:
        if linear is not None and linear.x in self.tags:
            return self._contract(node, linear, position, sources)
        name = _name(node)
        if name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"):
            return self._consume(node, position, sources)
        self._mark(node, position, replace(self._moved(node, name, sources), sources=sources))
        return None

    def _contract(self, node: fx.Node, linear: _Linear, position: int, sources: frozenset[fx.Node]) -> None:
        """A product that sums over the tagged dimension ends the region."""
        tag = self.tags[linear.x]
        _require(tag.dim == len(self._shape(linear.x)) - 1 and tag.outer == 1 and not tag.vocabulary)
        _require(sum(value in self.tags for value in node.all_input_nodes) == 1)
        self._unite(sources).ended = True
        self.result.split[position] = "depth"
        self.result.parameters.add(linear.weight)
        self.result.reductions += 1
        self.result.reduced_bytes += self.table.specs[node].bytes

    def _consume(self, node: fx.Node, position: int, sources: frozenset[fx.Node]) -> None:
        """A loss over a divided vocabulary exchanges each row's maximum, sum and target; the input's gradient is summed in backward."""
        logits: Any = node.args[0]
        tag = self.tags[logits]
        shape = self._shape(logits)
        _require(tag.dim == (1 if len(shape) > 1 else 0) and shape[tag.dim] >= _SMALLEST_VOCABULARY)
        region = self._unite(sources)
        region.ended = region.vocabulary = True
        self.result.split[position] = "rows"
        rows = math.prod(shape) // shape[tag.dim]
        inputs = {linear.x for source in sources if (linear := self._linear(source)) is not None}
        self.result.reductions += 2
        self.result.reduced_bytes += 3 * 4 * rows / 2 + sum(self.table.specs[value].bytes for value in inputs) / 2

    def _moved(self, node: fx.Node, name: str, sources: frozenset[fx.Node]) -> _Tag:
        """Where the tagged dimension is in the result."""
        args: Any = node.args
        first = args[0] if args and isinstance(args[0], fx.Node) else None
        tag = self.tags.get(first) if first is not None else None
        if tag is None or first is None:
            return self._together(node, name, sources)
        shape = self._shape(first)
        if name in _PASS or node.target is operator.getitem:
            return tag
        if name in _VIEWS:
            return _view(self, node, shape, tag, sources)
        if name in _RULES:
            return replace(tag, dim=_RULES[name](self, node, shape, tag.dim, sources))
        if name in _REDUCE:
            return self._reduced(node, name, shape, tag)
        return self._together(node, name, sources)

    def _reduced(self, node: fx.Node, name: str, shape: tuple[int, ...], tag: _Tag) -> _Tag:
        given: Any = node.args[1]
        dims = [d % len(shape) for d in (given if isinstance(given, (list, tuple)) else [given])]
        if name == "log_softmax" and tag.dim in dims:
            return replace(tag, vocabulary=True)
        _require(tag.dim not in dims)
        kept = len(self._shape(node)) == len(shape)
        return replace(tag, dim=tag.dim - (0 if kept else sum(d < tag.dim for d in dims)))

    def _together(self, node: fx.Node, name: str, sources: frozenset[fx.Node]) -> _Tag:
        """Operators on several tensors that act on each slice of the tagged dimension alone."""
        args: Any = node.args
        rank = len(self._shape(node))
        forbidden: set[int] = set()
        if name == "scaled_dot_product_attention":
            operands = [value for value in args[:4] if isinstance(value, fx.Node)]
            forbidden = {rank - 1, rank - 2}
            self._limit(sources, self._shape(args[1])[-3])
        elif name in ("matmul", "bmm", "baddbmm"):
            operands, forbidden = list(args[: 3 if name == "baddbmm" else 2]), {rank - 1, rank - 2}
        elif name in ("cat", "stack"):
            operands = list(args[0])
            forbidden = {(args[1] if len(args) > 1 else 0) % rank}
            _require(name == "cat")
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            operands = [value for value in node.all_input_nodes if isinstance(self.table.specs[value], TensorSpec)]
        else:
            raise ValueError(f"no rule for {name}")
        found = {(tag.dim + rank - len(self._shape(value)), tag.outer) for value in operands if (tag := self.tags.get(value)) is not None}
        _require(len(found) == 1)
        dim, outer = found.pop()
        _require(dim not in forbidden)
        self._limit(sources, self._shape(node)[dim] // outer)
        return _Tag(sources, dim, outer=outer)

    def _finish(self) -> Sharding:
        unfinished = frozenset(source for source, region in self.region.items() if not region.ended)
        if unfinished:
            raise _NoRuleError(unfinished)
        for node in self.inside:
            if node in self.tags and any(user not in self.inside for user in node.users):
                raise _NoRuleError(self._joined(self.tags[node].sources))
        regions = {id(region): region for region in self.region.values() if not region.vocabulary}
        self.result.units = math.gcd(*(region.units for region in regions.values())) if regions else 0
        if self.result.units == 1:  # no common number of parts: the region with the fewest is repeated instead
            fewest = min(regions.values(), key=lambda region: region.units)
            raise _NoRuleError(frozenset(source for source, region in self.region.items() if region is fewest))
        return self.result


def _view(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], tag: _Tag, sources: frozenset[fx.Node]) -> _Tag:
    """Reshapes regroup neighbouring dimensions; slices of the tagged one stay whole if what is before it in its group stays before it."""
    target = analysis._shape(node)
    left, right = _group(shape, target, tag.dim)
    before = tag.outer * math.prod(shape[d] for d in left if d < tag.dim)
    if sources & analysis.fused and before == 1 and len(right) > 1 and target[right[0]] <= 3:
        right = right[1:]  # two or three fused projections, one after another: each is divided by itself
    for d in right:
        if target[d] > before and target[d] % before == 0:
            analysis._limit(sources, target[d] // before)
            return replace(tag, dim=d, outer=before)
        _require(before % target[d] == 0)
        before //= target[d]
    raise ValueError("the tagged dimension is lost")


def _group(shape: tuple[int, ...], target: tuple[int, ...], dim: int) -> tuple[list[int], list[int]]:
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


def _transpose(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    a, b = (args[1] % len(shape), args[2] % len(shape)) if len(args) > 2 else (len(shape) - 2, len(shape) - 1)
    return int(b if dim == a else a if dim == b else dim)


def _permute(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    return [d % len(shape) for d in args[1]].index(dim)


def _unsqueeze(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    return dim + int(args[1] % (len(shape) + 1) <= dim)


def _squeeze(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    removed = args[1] % len(shape)
    _require(removed != dim)
    return dim - int(removed < dim and shape[removed] == 1)


def _expand(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    moved = dim + len(analysis._shape(node)) - len(shape)
    _require(analysis._shape(node)[moved] == shape[dim])
    return moved


def _slice(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    cut = (args[1] if len(args) > 1 else 0) % len(shape)
    length = analysis._shape(node)[dim]
    if cut == dim and length != shape[dim]:  # a fused projection taken apart: each piece is divided by itself
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        analysis._limit(sources, math.gcd(start % shape[dim], length))
    return dim


def _select(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    cut = args[1] % len(shape)
    _require(cut != dim)
    return dim - int(cut < dim)


def _split_into(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    """Fused projections: each block is divided by itself."""
    args: Any = node.args
    cut = (args[2] if len(args) > 2 else 0) % len(shape)
    if cut == dim:
        for part in analysis.table.specs[node]:
            analysis._limit(sources, part.shape[dim])
    return dim


def _unbind(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    cut = (args[1] if len(args) > 1 else 0) % len(shape)
    _require(cut != dim)
    return dim - int(cut < dim)


def _norm(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    args: Any = node.args
    _require(dim < len(shape) - len(args[1]))
    return dim


def _repeat_interleave(analysis: _Analysis, node: fx.Node, shape: tuple[int, ...], dim: int, sources: frozenset[fx.Node]) -> int:
    return dim


_Rule = Callable[[_Analysis, fx.Node, tuple[int, ...], int, frozenset[fx.Node]], int]
_RULES: dict[str, _Rule] = {
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split_into,
    "split_with_sizes": _split_into,
    "chunk": _split_into,
    "unbind": _unbind,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "repeat_interleave": _repeat_interleave,
}


def find_sharding(table: OperatorTable, start: int, stop: int) -> Sharding:
    """How operators `start` to `stop` divide under tensor parallelism."""
    fused: set[fx.Node] = set()  # products that failed once are tried as several fused into one, then withdrawn
    withdrawn: set[fx.Node] = set()
    while True:
        try:
            found = _Analysis(table, start, stop, fused, withdrawn).run()
            break
        except _NoRuleError as failure:
            (sources,) = failure.args
            untried = sources - fused
            assert untried or sources - withdrawn, "each attempt must change something"
            fused |= sources
            withdrawn |= set() if untried else sources
    _divide_embedding(table, start, stop, found)
    return found


def _divide_embedding(table: OperatorTable, start: int, stop: int, found: Sharding) -> None:
    """The largest embedding table of a layer is divided by vocabulary: rows looked up elsewhere are zero and the results summed."""
    lookups = [entry for entry in table.operators[start:stop] if entry.node.target is aten.embedding.default]
    tables: dict[Any, float] = {entry.node.args[0]: 0.0 for entry in lookups if entry.node.args[0] in table.parameters}
    if not tables:
        return
    largest = max(tables, key=lambda value: float(table.specs[value].bytes))
    if 2 * table.specs[largest].bytes < sum(table.specs[value].bytes for value in tables):
        return
    users = [entry for entry in lookups if entry.node.args[0] is largest]
    found.parameters.add(largest)
    found.reductions += len(users)
    found.reduced_bytes += sum(entry.outputs[0].bytes for entry in users) / 2  # summed in forward only
