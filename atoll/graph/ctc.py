"""CTC loss as one opaque operator: the shapes inside PyTorch's own depend on data, so it cannot be captured as it is."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["ctc_loss"]


@cache
def _operator() -> Any:
    """Registered when it is first needed: `atoll::ctc_loss`, whose backward is that of PyTorch's loss."""

    @torch.library.custom_op("atoll::ctc_loss", mutates_args=())
    def operator(
        log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, reduction: str, zero_infinity: bool
    ) -> Tensor:
        return torch.nn.functional.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)

    @operator.register_fake
    def _(
        log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: Any, reduction: str, zero_infinity: Any
    ) -> Tensor:
        return log_probs.new_empty((log_probs.shape[1],) if reduction == "none" else ())

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4:]

    operator.register_autograd(_backward, setup_context=setup)
    return operator


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, *rest = ctx.saved_tensors
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        loss = torch.nn.functional.ctc_loss(leaf, *rest, *ctx.options)
    (result,) = torch.autograd.grad(loss, leaf, gradient)
    return result, None, None, None, None, None, None


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` in a form that can be captured."""
    result: Tensor = _operator()(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    return result
