"""Tensor parallelism on a layer of the captured program: which products divide by columns, which by depth, and what lies between.

The output dimension of every parameter product is tagged, and the tag is carried through the operators that act on each slice alone until
a product contracts over it (divided by depth, its result summed over devices) or a cross-entropy consumes it (the vocabulary). A tag that
meets an operator without a rule is withdrawn, so that product is repeated on every device: slower, never wrong.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable, schema_name
from atoll.graph.sharding_rewrites import (
    ByDepth,
    Cut,
    DividedParameter,
    DivideDraw,
    DivideLoss,
    DivideNormalisation,
    Lookup,
    Operand,
    Rewrite,
    Scale,
    Sharding,
    Split,
)
from atoll.graph.sharding_rules import RULES, ColumnTag, NoRuleError, Product, Regions, Step, find_gathering, find_product, require

__all__ = ["Sharding", "Split", "find_sharding", "find_shardings"]

aten = torch.ops.aten
_SMALLEST_VOCABULARY = 64  # fewer classes are not worth dividing
_NARROW = 8  # products of so many times fewer columns than what they are contracted to are not divided
_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
_NORMS = ("layer_norm", "rms_norm")


def find_shardings(table: OperatorTable, ranges: Sequence[tuple[int, int]]) -> list[Sharding]:
    """How each layer divides. A parameter that several layers share is divided alike in all of them, or stays whole in all."""
    whole: set[fx.Node] = set()
    found = [find_sharding(table, start, stop) for start, stop in ranges]
    while True:
        cuts: dict[fx.Node, set[Cut | None]] = defaultdict(set)
        for (start, stop), sharding in zip(ranges, found, strict=True):
            read = {value for entry in table.operators[start:stop] for value in entry.node.all_input_nodes if value in table.parameters}
            for value in read:
                cuts[value].add(sharding.divided[value].cut if value in sharding.divided else None)
        disputed = {value for value, ways in cuts.items() if len(ways) > 1}
        if not disputed:
            return found
        whole |= disputed
        for index, (start, stop) in enumerate(ranges):
            if disputed & found[index].parameters:
                found[index] = find_sharding(table, start, stop, frozenset(whole))


def find_sharding(table: OperatorTable, start: int, stop: int, whole: frozenset[fx.Node] = frozenset()) -> Sharding:
    """How operators `start` to `stop` divide under tensor parallelism; the parameters in `whole` are not divided."""
    fused: set[fx.Node] = set()  # products that failed once are tried as several fused into one, then withdrawn
    withdrawn: set[fx.Node] = set()
    while True:
        try:
            found = _Analysis(table, start, stop, fused=frozenset(fused), withdrawn=frozenset(withdrawn), whole=whole).run()
        except NoRuleError as failure:
            withdrawn |= set() if failure.sources - fused else failure.sources
            fused |= failure.sources
            continue
        disputed = _divide_embedding(table, start, stop, found, whole)
        if disputed is None:
            found.rewrites.sort(key=lambda rewrite: table.position[rewrite.node])
            found.gathering = find_gathering(table, found)
            found.backward = _backward_share(table, found)
            return found
        whole |= {disputed}
        fused, withdrawn = set(), set()


def _backward_share(table: OperatorTable, found: Sharding) -> float:
    """Of what backward would sum if all that enters divided regions needed a gradient, the part that does."""
    entering = {rewrite.value for rewrite in found.rewrites if isinstance(rewrite, Operand) and rewrite.gradient}
    specs = [spec for value in entering if isinstance(spec := table.specs[value], TensorSpec)]
    everything = sum(spec.bytes for spec in specs)
    return sum(spec.bytes for spec in specs if spec.requires_grad) / everything if everything else 1.0


def _divide_embedding(table: OperatorTable, start: int, stop: int, found: Sharding, whole: frozenset[fx.Node]) -> fx.Node | None:
    """The largest embedding table of a layer is divided by vocabulary: rows looked up elsewhere are zero and the results summed.

    So is one whose rows the output layer divides. Returns a table that output layer and embedding would divide differently.
    """
    inside = [entry.node for entry in table.operators[start:stop]]
    lookups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in inside:
        first = node.args[0] if node.target is aten.embedding.default else None
        if isinstance(first, fx.Node) and first in table.parameters:
            lookups[first].append(node)
    everything = sum(table.specs[value].bytes for value in lookups)
    for value, users in lookups.items():
        rows = table.specs[value].shape[0]
        cut = Cut(0, (rows,), rows)
        possible = rows >= _SMALLEST_VOCABULARY and value not in whole and all(_plain(node) for node in users)
        if value in found.divided:
            if not possible or found.divided[value].cut != cut:
                return value
        elif not possible or 2 * table.specs[value].bytes < everything or any(user in inside and user not in users for user in value.users):
            continue
        found.parameters.add(value)
        found.divided[value] = DividedParameter(table.parameters[value], table.specs[value].shape, cut)
        for node in users:
            _look_up(table, node, cut, found)
    return None


def _plain(node: fx.Node) -> bool:
    """Whether gradients of the table's rows are just added up."""
    return not node.kwargs and not any(node.args[3:])


def _look_up(table: OperatorTable, node: fx.Node, cut: Cut, found: Sharding) -> None:
    indices: Any = node.args[1]
    found.rewrites += [Operand(node, indices, False), Lookup(node, cut)]
    found.reductions += 1
    found.reduced_bytes += table.specs[node].bytes / 2  # summed in forward only


@dataclass(frozen=True)
class _Use:
    """A divided parameter is read by `reader`, its dimension `dim` being made of the tagged columns."""

    reader: fx.Node
    dim: int
    tag: ColumnTag


class _Analysis:
    """One attempt over operators `start` to `stop`, with some products withdrawn and some parameters to be kept whole."""

    def __init__(
        self,
        table: OperatorTable,
        start: int,
        stop: int,
        *,
        fused: frozenset[fx.Node],
        withdrawn: frozenset[fx.Node],
        whole: frozenset[fx.Node],
    ):
        self.table, self.start, self.stop, self.withdrawn, self.whole = table, start, stop, withdrawn, whole
        self.tags: dict[fx.Node, ColumnTag] = {}
        self.regions = Regions(fused)
        self.result = Sharding()
        self.inside = {entry.node for entry in table.operators[start:stop]}
        self._uses: dict[fx.Node, list[_Use]] = defaultdict(list)
        self._rewrites: list[Callable[[], Rewrite]] = []  # made at the end, when units and blocks are known

    def run(self) -> Sharding:
        """How the layer divides; raises `NoRuleError` with the products that cannot."""
        for position in range(self.start, self.stop):
            node = self.table.operators[position].node
            tagged = [value for value in node.all_input_nodes if value in self.tags]
            product = find_product(self.table, node)
            if not tagged:
                if product is not None:
                    self._start(node, product, position)
                continue
            sources = frozenset[fx.Node]().union(*(self.tags[value].sources for value in tagged))
            if sources & self.withdrawn:
                raise NoRuleError(sources)
            try:
                self._carry(node, product, position, sources)
            except NoRuleError:
                raise
            except (IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
                raise NoRuleError(self.regions.joined(sources)) from error
        return self._finish()

    def _shape(self, node: Any) -> tuple[int, ...]:
        spec = self.table.specs[node]
        return spec.shape if isinstance(spec, TensorSpec) else ()

    def _start(self, node: fx.Node, product: Product, position: int) -> None:
        """A product whose columns may be divided."""
        shape = self._shape(node)
        readers = [user for user in product.parameter.users if user in self.inside and user.target is not aten.embedding.default]
        if node in self.withdrawn or product.parameter in self.whole or shape[-1] < 2 or len(readers) != 1:
            return
        if any(self._is_written_after(node, value) for value in node.all_input_nodes):
            return
        tag = ColumnTag(frozenset([(node, 0, shape[-1])]), len(shape) - 1)
        self.tags[node] = tag
        self.regions.start(node, shape[-1])
        self.result.split[position] = "columns"
        self.result.values.add(node)
        self._divide(product.parameter, _Use(readers[0], product.columns_dim, tag))
        self._operand(node, product.x)
        if product.bias is not None:
            self._start_bias(node, product.bias, tag)

    def _start_bias(self, node: fx.Node, bias: fx.Node, tag: ColumnTag) -> None:
        dim, columns = len(self._shape(bias)) - 1, self._shape(node)[-1]
        if self._shape(bias)[-1:] != (columns,):
            self._operand(node, bias)
        elif bias in self.table.parameters and len(bias.users) == 1 and bias not in self.whole:
            self._divide(bias, _Use(node, dim, tag))
        else:
            self._operand(node, bias, tag, columns, dim)

    def _divide(self, parameter: fx.Node, use: _Use) -> None:
        self.result.parameters.add(parameter)
        self._uses[parameter].append(use)

    def _operand(self, node: fx.Node, value: fx.Node, tag: ColumnTag | None = None, size: int = 0, dim: int = 0) -> None:
        spec = self.table.specs[value]
        if isinstance(spec, TensorSpec):
            require(not self._is_written_after(node, value))
            cut = (lambda: self.regions.cut(tag, size, dim)) if tag is not None else (lambda: None)
            self._rewrites.append(lambda: Operand(node, value, spec.dtype.is_floating_point, cut()))

    def _is_written_after(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a value is changed in place after `node` read it: then no reader can have its gradient summed with another's."""
        root = self.table.memory[value]
        views, seen = [root], {root}
        while views:
            for user in views.pop().users:
                if user in seen or self.table.memory.get(user) is not root:
                    continue
                if torch.Tag.inplace in getattr(user.target, "tags", ()) and self.table.position[user] > self.table.position[node]:
                    return True
                seen.add(user)
                views.append(user)
        return False

    def _carry(self, node: fx.Node, product: Product | None, position: int, sources: frozenset[fx.Node]) -> None:
        if product is not None and product.x in self.tags:
            return self._contract(node, product, position)
        name = schema_name(node)
        if name in _LOSSES:
            return self._consume(node, position, sources)
        tag = self._moved(node, name, sources)
        self.tags[node] = tag
        self.result.values.add(node)
        self.result.split[position] = "rows"
        self._note_draws(node, name, tag)
        return None

    def _contract(self, node: fx.Node, product: Product, position: int) -> None:
        """A product that sums over the tagged dimension ends the region."""
        x, tag = product.x, self.tags[product.x]
        require(tag.dim == len(self._shape(x)) - 1 and tag.outer == 1 and not tag.vocabulary and not tag.pieces)
        require(sum(value in self.tags for value in node.all_input_nodes) == 1 and not node.kwargs)
        narrow = _NARROW * self._shape(x)[-1] <= self._shape(node)[-1]  # an adapter: the sum of its result would cost more than it saves
        if narrow or product.parameter in self.whole:
            raise NoRuleError(self.regions.joined(tag.sources))
        self.regions.unite(tag.sources).ended = True
        self.result.split[position] = "depth"
        reader = node if product.weight is product.parameter else next(user for user in product.parameter.users if user in self.inside)
        self._divide(product.parameter, _Use(reader, product.depth_dim, tag))
        self._rewrites.append(lambda: ByDepth(node))
        self.result.reductions += 1
        self.result.reduced_bytes += self.table.specs[node].bytes

    def _consume(self, node: fx.Node, position: int, sources: frozenset[fx.Node]) -> None:
        """A loss over a divided vocabulary exchanges each row's maximum, sum and target; the input's gradient is summed in backward."""
        logits, target, *rest = node.args
        assert isinstance(logits, fx.Node)
        tag, shape = self.tags[logits], self._shape(logits)
        require(tag.dim == (1 if len(shape) > 1 else 0) and shape[tag.dim] >= _SMALLEST_VOCABULARY and tag.outer == 1 and not node.kwargs)
        require(isinstance(target, fx.Node) and target not in self.tags and not self.table.specs[target].dtype.is_floating_point)
        require(not rest or rest[0] not in self.tags)
        region = self.regions.unite(sources)
        region.ended = region.vocabulary = True
        self.result.split[position] = "rows"
        rows = math.prod(shape) // shape[tag.dim]
        inputs = {product.x for source in sources if (product := find_product(self.table, source)) is not None}
        self.result.reductions += 2
        self.result.reduced_bytes += 3 * 4 * rows / 2 + sum(self.table.specs[value].bytes for value in inputs) / 2
        assert isinstance(target, fx.Node)
        self._operand(node, target)
        self._rewrites.append(lambda: DivideLoss(node, self._one_block(tag, shape[tag.dim])))

    def _one_block(self, tag: ColumnTag, size: int) -> Cut:
        cut = self.regions.cut(tag, size)
        if len(cut.blocks) > 1:
            raise NoRuleError(self.regions.joined(tag.sources))
        return cut

    def _note_draws(self, node: fx.Node, name: str, tag: ColumnTag) -> None:
        """Random numbers and normalisation over the tagged dimension take more than the rule of their kind."""
        args: Any = node.args
        if name == "log_softmax" and tag.vocabulary and tag.dim == args[1] % len(self._shape(node)):
            require(tag.outer == 1 and not self.tags[args[0]].vocabulary)
            self._rewrites.append(lambda: DivideNormalisation(node, self._one_block(tag, self._shape(node)[tag.dim])))
        elif name == "dropout" and args[1] > 0 and args[2]:
            self._rewrites.append(lambda: DivideDraw(node, self._cut_of(node, tag), self._order(args[0])))
        elif name == "scaled_dot_product_attention":
            if len(args) > 4 and args[4] > 0:
                self._rewrites.append(lambda: DivideDraw(node, self._cut_of(node, tag), tuple(range(len(self._shape(node))))))
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            require(name == "dropout")

    def _order(self, value: fx.Node) -> tuple[int, ...]:
        stride = self.table.specs[value].stride
        return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))

    def _cut_of(self, node: fx.Node, tag: ColumnTag) -> Cut:
        return self.regions.cut(tag, self._shape(node)[tag.dim] // tag.outer)

    def _moved(self, node: fx.Node, name: str, sources: frozenset[fx.Node]) -> ColumnTag:
        """Where the tagged dimension is in the result."""
        first: Any = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or first not in self.tags or name not in RULES:
            return self._together(node, name, sources)
        spec = self.table.specs[node]
        result: Any = spec.shape if isinstance(spec, TensorSpec) else [one.shape for one in spec]
        step = Step(self.table, node, name, self.tags[first], self._shape(first), result, self.regions)
        tag = RULES[name](step)
        for position, index, size in step.scaled:
            self._rewrites.append(partial(self._scale, node, position, index, size, next(iter(sources))))
        if name in _NORMS:
            for value in node.all_input_nodes[1:]:
                require(value not in self.tags)
                self._operand(node, value)
        return tag

    def _scale(self, node: fx.Node, position: int, index: int | None, size: int | fx.Node, source: fx.Node) -> Scale:
        return Scale(node, position, index, size, self.regions.of[source].units)

    def _operands(self, node: fx.Node, name: str, sources: frozenset[fx.Node]) -> tuple[list[fx.Node], set[int]]:
        """What an operator on several tensors works on, and the dimensions of its result that do not stay apart."""
        args: Any = node.args
        rank = len(self._shape(node))
        if name == "scaled_dot_product_attention":
            self.regions.limit(sources, self._shape(args[1])[-3])
            return [value for value in args[:4] if isinstance(value, fx.Node)], {rank - 1, rank - 2}
        if name in ("matmul", "bmm", "baddbmm"):
            operands = list(args[: 3 if name == "baddbmm" else 2])
            require(all(len(self._shape(value)) >= 2 for value in operands))
            return operands, {rank - 1, rank - 2}
        if name == "cat":
            return list(args[0]), {(args[1] if len(args) > 1 else 0) % rank}
        require(torch.Tag.pointwise in getattr(node.target, "tags", ()))
        require(torch.Tag.nondeterministic_seeded not in node.target.tags)  # type: ignore[union-attr]
        if torch.Tag.inplace in node.target.tags:  # type: ignore[union-attr]
            require(args[0] in self.tags)
        return [value for value in node.all_input_nodes if isinstance(self.table.specs[value], TensorSpec)], set()

    def _together(self, node: fx.Node, name: str, sources: frozenset[fx.Node]) -> ColumnTag:
        """Operators on several tensors that act on each slice of the tagged dimension alone."""
        operands, forbidden = self._operands(node, name, sources)
        rank = len(self._shape(node))
        tagged = [value for value in operands if value in self.tags]
        found = {(self.tags[value].dim + rank - len(self._shape(value)), self.tags[value].outer) for value in tagged}
        require(len(found) == 1 and all(not self.tags[value].pieces for value in tagged))
        dim, outer = found.pop()
        require(dim not in forbidden)
        size = self._shape(node)[dim] // outer
        self.regions.limit(sources, size)
        tag = ColumnTag(frozenset().union(*(self.tags[value].spans for value in tagged)), dim, outer=outer)
        for value in operands:
            own = dim - (rank - len(self._shape(value)))
            length = self._shape(value)[own] if own >= 0 else 1
            if value not in self.tags and length == 1:
                self._operand(node, value)
            elif value not in self.tags:
                require(length % outer == 0)
                self._operand(node, value, tag, length // outer, own)
        return tag

    def _finish(self) -> Sharding:
        unfinished = frozenset(source for source, region in self.regions.of.items() if not region.ended)
        if unfinished:
            raise NoRuleError(unfinished)
        for node in self.inside:
            if node in self.tags and any(user not in self.inside for user in node.users):
                raise NoRuleError(self.regions.joined(self.tags[node].sources))
        self.result.units = self._units()
        self._check_values()
        self.result.divided = {parameter: self._divided(parameter, uses) for parameter, uses in self._uses.items()}
        self.result.rewrites = [make() for make in self._rewrites]
        return self.result

    def _units(self) -> int:
        regions = {id(region): region for region in self.regions.of.values() if not region.vocabulary}
        units = math.gcd(*(region.units for region in regions.values())) if regions else 0
        if units == 1:  # no common number of parts: the region with the fewest is repeated instead
            fewest = min(regions.values(), key=lambda region: region.units)
            raise NoRuleError(frozenset(source for source, region in self.regions.of.items() if region is fewest))
        return units

    def _check_values(self) -> None:
        """Values made of several products' columns need the same blocks of each."""
        for node, tag in self.tags.items():
            if not tag.pieces and isinstance(self.table.specs[node], TensorSpec):
                self._cut_of(node, tag)

    def _divided(self, parameter: fx.Node, uses: list[_Use]) -> DividedParameter:
        shape = self._shape(parameter)
        cuts = {self.regions.cut(use.tag, shape[use.dim], use.dim) for use in uses}
        readers = {user for user in parameter.users if user in self.inside and user.target is not aten.embedding.default}
        if len(cuts) != 1 or readers != {use.reader for use in uses}:
            raise NoRuleError(self.regions.joined(frozenset().union(*(use.tag.sources for use in uses))))
        return DividedParameter(self.table.parameters[parameter], shape, cuts.pop())
