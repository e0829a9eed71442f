"""Tensor parallelism on a layer of the captured program: which products divide by columns, which by depth, and what lies between.

The output dimension of every parameter product is tagged, and the tag is carried through the operators that act on each slice alone until
a product contracts over it (divided by depth, its result summed over devices) or a cross-entropy consumes it (the vocabulary). A tag that
meets an operator without a rule is withdrawn, so that product is repeated on every device: slower, never wrong.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import OperatorTable
from atoll.graph.sharding_analysis import SMALLEST_VOCABULARY, Analysis
from atoll.graph.sharding_gathering import find_gathering
from atoll.graph.sharding_regions import NoRuleError
from atoll.graph.sharding_rewrites import Cut, DividedParameter, Lookup, Operand, Sharding, Split

__all__ = ["Sharding", "Split", "find_sharding", "find_shardings"]

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
