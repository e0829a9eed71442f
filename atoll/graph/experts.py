"""Mixture of experts in the captured program: which products an expert computes, and what is sent to experts."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import Operator, OperatorTable

__all__ = ["Experts", "find_experts"]

aten = torch.ops.aten
_PRODUCTS = (aten.bmm.default, aten.matmul.default, aten.baddbmm.default)


@dataclass
class Experts:
    """The experts of one layer."""

    count: int = 0
    parameters: set[fx.Node] = field(default_factory=set)  # one slice an expert, along their first dimension
    positions: set[int] = field(default_factory=set)  # operators that experts compute
    dispatched_bytes: float = 0.0  # routed rows, of the whole captured batch


def _expert_weights(table: OperatorTable, entry: Operator) -> list[fx.Node]:
    """Parameters with an expert dimension that a product reads."""
    node: Any = entry.node
    grouped = "_grouped_mm" in str(node.target)
    if node.target not in _PRODUCTS and not grouped:
        return []
    roots = [table.memory[value] for value in entry.inputs]
    return [root for root in roots if root in table.parameters and len(table.specs[root].shape) == 3]


def find_experts(table: OperatorTable, start: int, stop: int) -> Experts:
    """Experts among operators `start` to `stop`; `count` is 0 when there are none."""
    found = Experts()
    products: list[int] = []
    for position in range(start, stop):
        weights = _expert_weights(table, table.operators[position])
        if weights:
            products.append(position)
            found.parameters.update(weights)
    if not products:
        return found
    found.count = max(table.specs[weight].shape[0] for weight in found.parameters)
    found.parameters = {weight for weight in found.parameters if table.specs[weight].shape[0] == found.count}
    found.positions = _between(table, products)
    found.parameters |= _biases(table, found)
    found.dispatched_bytes = _input_bytes(table, products[0])
    return found


def _between(table: OperatorTable, products: list[int]) -> set[int]:
    """The products and every operator on a path from one of them to another."""
    first, last = products[0], products[-1]
    nodes = [table.operators[position].node for position in range(first, last + 1)]
    marked = {table.operators[position].node for position in products}
    after: set[fx.Node] = set()
    for node in nodes:
        if node in marked or any(value in after for value in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in marked or any(user in before for user in node.users):
            before.add(node)
    return {table.position[node] for node in after & before}


def _biases(table: OperatorTable, found: Experts) -> set[fx.Node]:
    """Two-dimensional parameters with the expert dimension that are read between the products."""
    roots = {table.memory[value] for position in found.positions for value in table.operators[position].inputs}
    return {root for root in roots if root in table.parameters and table.specs[root].shape[:1] == (found.count,)}


def _input_bytes(table: OperatorTable, position: int) -> float:
    entry = table.operators[position]
    activations = [table.specs[value] for value in entry.inputs if table.memory[value] not in table.parameters]
    return float(max((math.prod(spec.shape) * spec.dtype.itemsize for spec in activations), default=0))
