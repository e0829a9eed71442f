"""Lanes that divide a layer: which dimension of each value runs over samples, so that lanes can gather each other's.

Divided values hold all lanes' samples. That is right only where operators keep samples apart and in order; a layer where one does not
cannot be divided between lanes, and says why.
"""

import math
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import OperatorTable
from atoll.graph.sharding_products import find_product, operator_name
from atoll.graph.sharding_rewrites import ByDepth, DivideLoss, Gathering, Lookup, Operand, Sharding
from atoll.graph.sharding_rules import REDUCE, VIEWS, group_of

__all__ = ["find_gathering"]

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
        name = operator_name(node)
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
