"""Products with a parameter, however they are written: `linear`, `addmm` (GPT-2), `x @ w`, `x @ w.T`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from atoll.graph.operators import OperatorTable

__all__ = ["Product", "find_product", "operator_name"]

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


def operator_name(node: fx.Node) -> str:
    """What an operator is called, whichever its overload: "view", "add"."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


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
