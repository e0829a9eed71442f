"""Where the captured program may be cut, and what crosses each cut.

A value crosses when it is made before the cut and read after it. What can be made again from the batch alone — masks, positions, rotary
tables — is not sent: each stage makes its own. A value is made again only if it depends on no parameter, is not random and nothing it
shares memory with is.
"""

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable
from atoll.graph.regions import cuts_off_gradients, is_random, operators_in, written

__all__ = ["Liveness", "StagePart"]

aten = torch.ops.aten


@dataclass(frozen=True)
class StagePart:
    """A run of the program as a stage executes it."""

    receives: tuple[str, ...]  # values that come from earlier stages
    run: tuple[str, ...]  # operators to execute, in program order; some are made again here
    sends: tuple[str, ...]  # values later stages need, whoever made them


def _has_effect(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return "assert" in str(node.target) or (schema is not None and not schema.returns)


def _makes_numbers(node: fx.Node, table: OperatorTable) -> bool:
    """Whether something it makes can have a gradient: whole numbers have none."""
    specs = [spec for spec in pytree.tree_leaves(table.specs[node], is_leaf=_is_spec) if _is_spec(spec)]
    return any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec)


def _is_unrepeatable(node: fx.Node, table: OperatorTable) -> bool:
    """Random, or with an effect; for a region (`no_grad`) whatever runs inside it."""
    return any(is_random(inner) or _has_effect(inner) for inner in operators_in(node, table.module))


def _changes_nothing(table: OperatorTable, node: fx.Node) -> fx.Node | None:
    """The argument a cast or copy hands on unchanged, if that is all it does."""
    if node.target not in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.contiguous.default, aten.alias.default):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or table.memory[node] is not table.memory[source] or table.specs[node] != table.specs[source]:
        return None
    return source


class Liveness:
    """Answers for one program; positions are those of `OperatorTable.operators`, and a cut at p is made before operator p."""

    def __init__(self, table: OperatorTable):
        self.table = table
        self._nodes = [entry.node for entry in table.operators]
        self._place = self._places()
        self._mutators = self._find_mutators()
        self._tainted = self._find_tainted()
        self._canonical = self._find_canonical()
        self._differentiated = self._find_differentiated()
        self._last_use = self._find_last_uses()
        self._values = [node for node in self._nodes if self._may_cross(node)]
        self._starts = sorted((self._place[value], index) for index, value in enumerate(self._values))
        self.illegal = self._find_illegal()

    def _places(self) -> dict[fx.Node, int]:
        """Position at which a value exists; the parts of a tuple exist when the tuple does."""
        place: dict[fx.Node, int] = {}
        for node in self._nodes:
            source: Any = node.args[0] if node.target is operator.getitem else None
            place[node] = place.get(source, self.table.position[node])
        return place

    def _find_mutators(self) -> dict[fx.Node, list[fx.Node]]:
        """Memory → the operators that write to it."""
        mutators: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            for value in written(node, self.table.module):
                mutators[self.table.memory[value]].append(node)
        return mutators

    def _find_tainted(self) -> set[fx.Node]:
        """Values that cannot be made again on another stage."""
        table = self.table
        tainted: set[fx.Node] = set(table.parameters)
        tainted |= {root for root in self._mutators if root.op != "call_function"}  # state: changed once, in one place
        tainted |= {node for node in self._nodes if _is_unrepeatable(node, self.table)}
        before = -1
        while before != len(tainted):  # memory taints its views backwards too, so one pass may not be enough
            before = len(tainted)
            for node in self._nodes:
                root = table.memory[node]
                if node in tainted or root in tainted or any(value in tainted for value in node.all_input_nodes):
                    tainted.add(node)
                    if root in self._mutators:
                        tainted.add(root)
            tainted |= {root for root, nodes in self._mutators.items() if not tainted.isdisjoint(nodes)}  # whatever those return
        return tainted

    def place(self, node: fx.Node) -> int:
        """Position at which a value exists; the parts of a tuple exist when the tuple does."""
        return self._place[node]

    def is_changed(self, value: fx.Node) -> bool:
        """Whether some operator writes to its memory."""
        return self.table.memory[value] in self._mutators

    def recomputable(self, node: fx.Node) -> bool:
        """Whether every stage can make this value from the batch."""
        return node not in self._tainted

    def _find_canonical(self) -> dict[fx.Node, fx.Node]:
        canonical: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            source = _changes_nothing(self.table, node)
            canonical[node] = canonical.get(source, source) if source is not None and source.op == "call_function" else node
        return canonical

    def _may_cross(self, node: fx.Node) -> bool:
        """Tensors and numbers that are not made again may cross a cut, aliases of the same value once."""
        structured = isinstance(self.table.specs[node], (list, tuple, dict, type(None)))
        return node in self._tainted and self._canonical[node] is node and not structured

    def _find_last_uses(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for node in self._nodes:
            value = self._canonical[node]
            uses = [self._place[user] for user in node.users if user.op == "call_function" and self._canonical[user] is not value]
            if node in self.table.results:
                uses.append(len(self._nodes))
            last[value] = max([last.get(value, -1), *uses])
        return last

    def _find_illegal(self) -> set[int]:
        """Cuts with a value before them that is changed in place after them, or a buffer that is changed before and read after them."""
        illegal: set[int] = set()
        for root, nodes in self._mutators.items():
            if root.op == "call_function" and root not in self._tainted:
                continue
            uses = [self._place[root]] if root.op == "call_function" else [self._place[user] for user in root.users if user in self._place]
            last = max(self._place[node] for node in nodes)
            illegal.update(range(min(uses, default=0) + 1, max([last, *uses]) + 1))
        return illegal

    def crossing(self, cut: int) -> list[fx.Node]:
        """Values made before the cut that are read after it and must be sent."""
        values = self._values
        before = bisect_right(self._starts, (cut, -1))
        return [values[index] for _, index in self._starts[:before] if self._last_use[values[index]] >= cut]

    def crossing_counts(self) -> list[int]:
        """How many values cross each cut."""
        change = [0] * (len(self._nodes) + 2)
        for value in self._values:
            if self._last_use[value] > self._place[value]:
                change[self._place[value] + 1] += 1
                change[self._last_use[value] + 1] -= 1
        return list(accumulate(change[:-1]))

    def needed_by(self, start: int, stop: int) -> list[fx.Node]:
        """Values from before `start` that operators of the run read: what must be kept to compute the run again."""
        found: dict[fx.Node, None] = {}
        for node in self._nodes[start:stop]:
            for value in node.all_input_nodes:
                if value.op == "call_function" and value in self._tainted and self._place[value] < start:
                    found[self._canonical[value]] = None
        return list(found)

    def bytes_of(self, values: Iterable[fx.Node]) -> float:
        """Bytes of values of the whole captured batch."""
        specs = [self.table.specs[value] for value in values]
        return float(sum(spec.bytes if isinstance(spec, TensorSpec) else 8 for spec in specs))

    def wants_gradient(self, value: fx.Node) -> bool:
        """Whether a gradient comes back for a value that crosses."""
        spec = self.table.specs[value]
        return isinstance(spec, TensorSpec) and spec.requires_grad and value in self._differentiated

    def gets_none(self, value: fx.Node) -> bool:
        """Whether it could have a gradient and gets none: whatever reads it is not differentiated (an `argmax`, a `detach`)."""
        spec = self.table.specs[value]
        return isinstance(spec, TensorSpec) and spec.requires_grad and value not in self._differentiated

    def _find_differentiated(self) -> set[fx.Node]:
        """Values that a gradient of the results comes to. Where that cannot be told, it does."""
        table, found, wanted = self.table, set[fx.Node](), list(self.table.results)
        writing = {node for nodes in self._mutators.values() for node in nodes}  # what it makes may be in what it writes into
        while wanted:
            node = wanted.pop()
            called = node.op == "call_function"
            if node in found or (
                called and (cuts_off_gradients(node, table.module) or not (node in writing or _makes_numbers(node, table)))
            ):
                continue
            found.add(node)
            root = table.memory.get(node, node)
            wanted += [*node.all_input_nodes, root, *self._mutators.get(root, ())]
        return found

    def stage(self, start: int, stop: int) -> StagePart:
        """The run from operator `start` to `stop` as a stage of its own."""
        own = {node for node in self._nodes if node in self._tainted and start <= self._place[node] < stop}
        last = stop >= len(self._nodes)
        wanted = [value for node in own for value in node.all_input_nodes] + (list(self.table.results) if last else [])
        again: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node.op != "call_function" or node in again or node in self._tainted:
                continue
            again.add(node)
            wanted += [*node.all_input_nodes, *self._mutators.get(self.table.memory[node], ())]
        receives = self.crossing(start) if start else []
        sends = [] if last else self.crossing(stop)
        run = [node.name for node in self._nodes if node in own or node in again]
        return StagePart(tuple(value.name for value in receives), tuple(run), tuple(value.name for value in sends))

    def aliases(self) -> dict[str, str]:
        """Names of values that are another value unchanged, and that value's name: only the latter is sent."""
        return {node.name: value.name for node, value in self._canonical.items() if node is not value}
