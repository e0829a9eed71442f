"""Random operators on some rows of a micro-batch: they draw what they would for all of it, so that dividing it changes no number.

Every draw is seeded for its micro-batch (`rng.py`), and which number falls on which sample depends on the shape drawn for. A piece is
therefore filled up to the whole, the operator runs on that, and the piece is cut out again. Only operators that draw as many numbers
whatever the values are, and mix no samples, can be treated so.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from atoll.runtime.stage.module import StageModule, UnitModule
from atoll.runtime.stage.program import Crossing, StageProgram, Unit
from atoll.runtime.stage.rng import Draw
from atoll.runtime.stage.sizes import Sizes

__all__ = ["RowDraw", "Rows", "draws_by_rows", "why_rows_cannot_draw"]

aten = torch.ops.aten
_BY_ROWS = (
    *(aten.dropout.default, aten.native_dropout.default, aten.alpha_dropout.default, aten.scaled_dot_product_attention.default),
    *(aten.feature_dropout.default, aten.feature_alpha_dropout.default, aten.rand_like.default, aten.randn_like.default),
)


@dataclass
class Rows:
    """Which rows of the micro-batch are under way."""

    start: int = 0
    total: int = 0


class RowDraw(nn.Module):
    """A random operator that is given a piece: `dims` is where each of its arguments counts samples (None: nowhere)."""

    def __init__(self, operator: Any, number: int, draw: Draw, rows: Rows, lock: threading.Lock, dims: tuple[int | None, ...]) -> None:
        super().__init__()
        self._operator, self._number, self._draw, self._rows, self._lock, self._dims = operator, number, draw, rows, lock, dims

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The operator's own result for these rows."""
        dim = next(dim for dim in self._dims if dim is not None)
        size = arguments[self._dims.index(dim)].shape[dim]
        filled = [value if at is None else _filled(value, at, self._rows) for value, at in zip(arguments, self._dims, strict=True)]
        with self._lock:  # others of this process seed the same generators
            self._draw(self._number)
            result = self._operator(*filled, **named)
        if isinstance(result, Tensor):
            return result.narrow(dim, self._rows.start, size)
        return tuple(one.narrow(dim, self._rows.start, size) for one in result)


def _filled(value: Tensor, dim: int, rows: Rows) -> Tensor:
    """The value among copies of its first row, with dimensions in memory as it has them: numbers are drawn in that order."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    inner, along = value.permute(order), order.index(dim)
    row = inner.detach().narrow(along, 0, 1)

    def copies(count: int) -> Tensor:
        return row.expand(*(count if at == along else size for at, size in enumerate(row.shape)))

    after = rows.total - rows.start - value.shape[dim]
    whole = torch.cat([copies(rows.start), inner, copies(after)], along)
    return whole.permute([order.index(at) for at in range(value.dim())])


def why_rows_cannot_draw(program: StageProgram, sizes: Sizes) -> str | None:
    """Why a stage's random numbers would depend on how its micro-batches are divided; None where they would not."""
    for unit in program.units:
        for node in unit.graph.nodes:
            if node.name in unit.draws and _sample_dims(node, sizes) is None:
                return f"its random operator {node.name!r} draws for the samples of a micro-batch together"
    return None


def draws_by_rows(module: StageModule, program: StageProgram, sizes: Sizes, draw: Draw, rows: Rows, lock: threading.Lock) -> None:
    """Lets a built stage's random operators draw for whole micro-batches. `lock` is held while a generator is seeded and drawn from."""
    for built, unit in zip(module.units, program.units, strict=True):
        assert isinstance(built, UnitModule)
        _replace(built.graph_module, unit, sizes, draw, rows, lock)


def _replace(module: fx.GraphModule, unit: Unit, sizes: Sizes, draw: Draw, rows: Rows, lock: threading.Lock) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_module" and isinstance(module.get_submodule(node.target), Draw):
            module.graph.erase_node(node)  # it seeds without holding the lock
        elif node.name in unit.draws:
            dims = _sample_dims(node, sizes)
            assert dims is not None
            name = f"draw_{node.name}"
            module.add_module(name, RowDraw(node.target, unit.draws[node.name], draw, rows, lock, dims))
            node.op, node.target = "call_module", name
    module.recompile()


def _sample_dims(node: fx.Node, sizes: Sizes) -> tuple[int | None, ...] | None:
    """Where each argument counts samples; None where the operator, an argument or the result does not allow division."""
    if node.target not in _BY_ROWS or not all(isinstance(value, (bool, int, float, type(None))) for value in node.kwargs.values()):
        return None
    dims: list[int | None] = []
    for argument in node.args:
        crossing = _crossing(argument)
        if crossing is None:
            dims.append(None)
        elif not sizes.divisible(crossing):
            return None
        else:
            dims.append(sizes.sample_dim(crossing))
    found = {dim for dim in dims if dim is not None}
    return tuple(dims) if len(found) == 1 and dims[0] is not None else None


def _crossing(argument: Any) -> Crossing | None:
    """A tensor argument with the expressions of its shape."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(value, Tensor):
        return None
    shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
    return Crossing(str(argument), value.dtype, shape, False)
