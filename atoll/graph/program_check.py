"""Whether the captured program computes what the model's own code does, random numbers included: both are run with real weights."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError
from atoll.graph.loss_check import CheckedJob, given_values
from atoll.graph.spec_augment import draw_mask, replaced_masks
from atoll.job import read_loss
from atoll.randomness import own_randomness

__all__ = ["check_program"]

_TOLERANCES = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2, "bf16-true": 3e-2}  # of the loss
_SAME = 1e-6  # of the same code, run again


def check_program(
    job: CheckedJob,
    program: ExportedProgram,
    model: nn.Module,
    batch: Any,
    other: Any,
    autocast: Callable[[], AbstractContextManager[None]],
) -> None:
    """CaptureError where the program's loss is not the model's, both in training mode and from the same seed of PyTorch's generator, or the
    model's own code computes another one when it is called again after the `other` batch, or counts its calls.

    Python's and NumPy's generators start elsewhere for the program, which draws from neither. A run that ends in an error is let pass:
    what the program takes for granted it checks itself, whenever it runs.
    """
    values = {key: value.clone() for key, value in given_values(program, model).items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad(), autocast():
        try:
            expected, before = (_own_loss(job, model, batch, buffers) for _ in range(2))  # the first may set up what the others use
            numbers = _numbers(model)
            with suppress(Exception):  # it may not be of the size that the code wants
                _own_loss(job, model, other, buffers)
            again = _own_loss(job, model, batch, buffers)
            counts = [name for name, value in _numbers(model).items() if numbers.get(name, value) != value]
            with own_randomness(0, devices=False):
                computed = _mean(_run(program, values, batch))
        except Exception:
            return
    if math.isfinite(before) and abs(again - before) > _SAME * max(1.0, abs(before)):
        raise CaptureError(
            f"job {job.name!r} cannot be captured: its own code computes a loss of {before:.6g} and, called again with the same weights, "
            f"batch and seed, {again:.6g}. Something that is no buffer changes from call to call (a count or a tensor it keeps, the time, "
            "a file); keep it in a buffer, or change it in a callback"
        )
    if counts:
        raise CaptureError(
            f"job {job.name!r} cannot be captured: every call of its code changes {counts[0]!r}, a number of the model's that the captured "
            "program would keep as it is; keep it in a buffer, or change it in a callback"
        )
    if math.isfinite(expected) and abs(computed - expected) > _TOLERANCES[job.precision] * max(1.0, abs(expected)):
        raise CaptureError(
            f"job {job.name!r} cannot be captured: the captured program's loss is {computed:.6g} where the model's own code computes "
            f"{expected:.6g} for the same batch and seed. Something in its forward is decided outside of PyTorch (a random number of its "
            "own, the time, a file, a count it keeps), or changes a tensor in a way that capture does not see; compute it with tensors"
        )


def _numbers(model: nn.Module) -> dict[str, int | float]:
    """What modules keep as attributes that are plain numbers."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float) and value == value
    }


def _own_loss(job: CheckedJob, model: nn.Module, batch: Any, buffers: dict[str, Tensor]) -> float:
    """Of the model's own code; its buffers are as before afterwards."""
    try:
        with own_randomness(0, devices=False), replaced_masks(model, draw_mask):
            return _mean(job.loss(model.train(), pytree.tree_map(_copied, batch)))
    finally:
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _mean(value: Any) -> float:
    total, weight = read_loss(value)
    return float(total) / (1.0 if weight is None else float(weight))


def _run(program: ExportedProgram, values: dict[str, Tensor], batch: Any) -> Any:
    """What the program returns to its caller, as the loss returned it; changed buffers are left out."""
    leaves = iter(pytree.tree_leaves(batch))
    given = [_copied(values[n.name] if n.name in values else next(leaves)) for n in program.graph.nodes if n.op == "placeholder"]
    results = program.graph_module(*given)
    specs = program.graph_signature.output_specs
    own = [value for spec, value in zip(specs, results, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    return pytree.tree_unflatten(own, program.call_spec.out_spec)
