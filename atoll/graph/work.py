"""Operators → `Work`: the kernels of a layer as the roofline sees them, equal ones counted together."""

import math
from collections import Counter
from typing import Any

import msgspec
import torch

from atoll.graph.experts import LayerExperts
from atoll.graph.flops import Kernel, TensorSpec
from atoll.graph.graph import Work
from atoll.graph.operators import Operator, OperatorTable
from atoll.graph.sharding import Sharding, Split

__all__ = ["work_of_layer"]

aten = torch.ops.aten


def work_of_layer(table: OperatorTable, start: int, stop: int, sharding: Sharding, experts: LayerExperts) -> tuple[Work, ...]:
    """All forward kernels of operators `start` to `stop`."""
    kinds: Counter[Work] = Counter()
    for position in range(start, stop):
        entry = table.operators[position]
        split = sharding.split.get(position, "")
        for work in _work(table, entry, split, experts.count if position in experts.positions else 0):
            kinds[msgspec.structs.replace(work, count=1)] += work.count
    return tuple(msgspec.structs.replace(work, count=count) for work, count in kinds.items())


def _ratio(backward: float, forward: float) -> float:
    return round(backward / forward, 4) if forward else 0.0


def _work(table: OperatorTable, entry: Operator, split: Split, experts: int) -> list[Work]:
    cost, samples = entry.cost, table.samples
    if entry.node.target is aten.scaled_dot_product_attention.default:
        return [_attention(entry, samples, split)]
    if cost.kernels:
        backward = _ratio(cost.backward_flops, cost.flops)
        return [_product(table, entry, kernel, split, experts, backward) for kernel in cost.kernels if kernel.flops]
    if not cost.bytes or _is_bookkeeping(entry):
        return []
    if entry.node.target is aten.embedding.default:
        return [_gather(table, entry)]
    backward = _ratio(cost.backward_bytes, cost.bytes)
    divided: Split = "" if split != "rows" or experts else "rows"
    amount = cost.bytes / samples / max(experts, 1)
    copies = max(experts, 1)
    return [Work(kind="memory", bytes=amount, backward=backward, split=divided, expert=bool(experts), count=copies, operator=_name(entry))]


def _name(entry: Operator) -> str:
    """`gelu` for `aten.gelu.default` and for `aten.gelu_.default`: in place or not, it is the same work."""
    target = entry.node.target
    return target._overloadpacket.__name__.rstrip("_") if isinstance(target, torch._ops.OpOverload) else ""


def _is_bookkeeping(entry: Operator) -> bool:
    """Counters, assertions and other numbers of no weight."""
    return not entry.requires_grad and all(math.prod(spec.shape) <= 1 for spec in entry.outputs)


def _attention(entry: Operator, samples: int, split: Split) -> Work:
    cost, kernel = entry.cost, entry.cost.kernels[0]
    return Work(
        kind="attention",
        flops=cost.flops / samples,
        bytes=cost.bytes / samples,
        rows=kernel.rows / samples,
        columns=kernel.columns,
        depth=kernel.depth,
        backward=_ratio(cost.backward_flops, cost.flops),
        split=split,
        operator=f"{_name(entry)}{_variant(entry)}",
    )


def _variant(entry: Operator) -> str:
    """Kernels for causal attention leave out half of the scores; with dropout, CPUs have no fused kernel."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, entry.node.args, strict=False)) | dict(entry.node.kwargs)
    return ".dropout" if given.get("dropout_p") else ".causal" if given.get("is_causal") else ""


def _gather(table: OperatorTable, entry: Operator) -> Work:
    """Rows of a table, read and written; backward reads the gradient and adds it to rows, whatever the size of the table."""
    out = entry.outputs[0]
    rows = math.prod(out.shape[:-1]) / table.samples
    backward = 1.5 if entry.requires_grad else 0.0
    weights = next((table.specs[value] for value in entry.inputs if len(table.specs[value].shape) == 2), None)
    return Work(
        kind="gather",
        bytes=2.0 * out.bytes / table.samples,
        rows=rows,
        columns=out.shape[-1],
        depth=weights.shape[0] if weights is not None else 0,
        backward=backward,
        operator=_name(entry),
    )


def _weight(table: OperatorTable, entry: Operator, kernel: Kernel) -> TensorSpec | None:
    """The parameter that is one operand of a product."""
    for value in entry.inputs:
        root = table.memory[value]
        if root not in table.parameters:
            continue
        spec: TensorSpec = table.specs[value]
        if math.prod(spec.shape) in (kernel.right_numel, kernel.left_numel):
            return spec
    return None


def _product(table: OperatorTable, entry: Operator, kernel: Kernel, split: Split, experts: int, backward: float) -> Work:
    samples = table.samples
    element = entry.outputs[0].dtype.itemsize if entry.outputs else 4
    weight = _weight(table, entry, kernel)
    rows, columns, depth = kernel.rows, kernel.columns, kernel.depth
    operator = f"{_name(entry)}.bias" if entry.cost.backward_bytes else _name(entry)  # its gradient is a sum over all rows
    common: dict[str, Any] = {"flops": kernel.flops / samples, "backward": backward, "split": split, "count": kernel.count}
    if kernel.convolution:
        read = entry.inputs[0] if entry.inputs else None
        moved = (table.specs[read].bytes if read is not None else 0) + rows * columns * element
        weights = float(kernel.right_numel * element)
        return Work(kind="conv", bytes=moved / samples, weight_bytes=weights, rows=rows / samples, columns=columns, depth=depth, **common)
    matrices = _expert_matrices(table, entry) if experts else None
    if matrices is not None:
        columns, depth = _expert_shape(entry, matrices)
        rows_each = kernel.flops / (2 * columns * depth) / samples / experts
        common |= {"flops": kernel.flops / samples / experts, "split": "", "expert": True, "count": experts}
        moved = rows_each * (columns + depth) * element
        weights = float(columns * depth * element)
        return Work(kind="matmul", bytes=moved, weight_bytes=weights, rows=rows_each, columns=columns, depth=depth, **common)
    if weight is None:
        moved = (kernel.left_numel + kernel.right_numel + rows * columns) * element / samples
        return Work(kind="attention", bytes=moved, rows=rows / samples, columns=columns, depth=depth, **common)
    if math.prod(weight.shape) == kernel.left_numel != kernel.right_numel:  # weight · x: the same product transposed
        rows, columns = kernel.right_numel // depth, rows
    moved = rows * (columns + depth) * element / samples
    common |= {"weight_bytes": float(math.prod(weight.shape) * element), "operator": operator}
    return Work(kind="matmul", bytes=moved, rows=rows / samples, columns=columns, depth=depth, **common)


def _expert_matrices(table: OperatorTable, entry: Operator) -> TensorSpec | None:
    """The parameter that holds one matrix an expert, if the product reads one."""
    roots = [table.memory[value] for value in entry.inputs]
    return next((table.specs[root] for root in roots if root in table.parameters and len(table.specs[root].shape) == 3), None)


def _expert_shape(entry: Operator, matrices: TensorSpec) -> tuple[int, int]:
    """Columns and depth of one expert's product."""
    sides, out = matrices.shape[1:], entry.outputs[0].shape
    columns = next((size for size in (out[-1], out[-2]) if size in sides), sides[0])
    return columns, math.prod(sides) // columns
