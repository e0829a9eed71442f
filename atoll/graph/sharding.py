"""Tensor parallelism on a layer of the captured program: which products divide by columns, which by depth, and what lies between.

The output dimension of every parameter product is tagged, and the tag is carried through the operators that act on each slice alone until
a product contracts over it (divided by depth, its result summed over devices) or a cross-entropy consumes it (the vocabulary). A tag that
meets an operator without a rule is withdrawn, so that product is repeated on every device: slower, never wrong.

Lanes that divide a layer gather each other's samples: divided values hold all lanes' samples. That is right only where operators keep
samples apart and in order; a layer where one does not cannot be divided between lanes, and says why.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import OperatorTable, schema_name
from atoll.graph.sharding_analysis import SMALLEST_VOCABULARY, Analysis
from atoll.graph.sharding_rewrites import ByDepth, Cut, DividedParameter, DivideLoss, Gathering, Lookup, Operand, Sharding, Split
from atoll.graph.sharding_rules import REDUCE, VIEWS, NoRuleError, find_product, group_of

__all__ = ["Sharding", "Split", "find_sharding", "find_shardings"]

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
        found = [(d, self._per_sample(node, size)) for d, size in enumerate(value.shape) if _is_symbolic(size)]
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
            if _is_symbolic(size):
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
        elif name in VIEWS:
            mixed = not self._leads(first, node, before[0], where[0])
        elif name in REDUCE:
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
        left, right = group_of(shape, target, before)
        ahead = [shape[d] for d in left if d < before] + [target[d] for d in right if d < after]
        return after in right and math.prod(ahead) == 1


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


aten = torch.ops.aten


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
            found = Analysis(table, start, stop, fused=frozenset(fused), withdrawn=frozenset(withdrawn), whole=whole).run()
        except NoRuleError as failure:
            withdrawn |= set() if failure.sources - fused else failure.sources
            fused |= failure.sources
            continue
        disputed = _divide_embedding(table, start, stop, found, whole)
        if disputed is None:
            found.rewrites.sort(key=lambda rewrite: table.position[rewrite.node])
            found.gathering = find_gathering(table, found)
            return found
        whole |= {disputed}
        fused, withdrawn = set(), set()


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
        possible = rows >= SMALLEST_VOCABULARY and value not in whole and all(_plain(node) for node in users)
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
