"""Embedding and cross-entropy over a vocabulary of which each device holds some rows.

A row's maximum, its sum of exponentials and its target's logit are exchanged, never the logits. Everything after that is the arithmetic of
`torch.nn.functional.cross_entropy`, the same on every device (of lanes: for their own samples).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.runtime.stage.collectives import Ranks, Samples

__all__ = ["VocabularyPart"]


@dataclass(frozen=True)
class VocabularyPart:
    """Rows `start` to `stop` of a vocabulary of `size`, held by this device; other devices hold the others."""

    ranks: Ranks
    start: int
    stop: int
    size: int
    dim: int  # of logits that runs over the vocabulary
    samples: Samples  # of a row of logits' results: indices, targets, losses

    def embedding(self, weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
        """`torch.nn.functional.embedding`; the indices are those of all samples."""
        held, local = self._locate(indices)
        self._refuse_unknown(indices, torch.zeros_like(held))
        padding = padding_idx - self.start if self.start <= padding_idx < self.stop else None
        rows = functional.embedding(local, weight, padding)
        return self.ranks.leave(rows.masked_fill(~held.unsqueeze(-1), 0), self.samples)

    def log_softmax(self, logits: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """`torch.nn.functional.log_softmax` over the vocabulary."""
        return _LogSoftmax.apply(_in_autocast_precision(logits, dtype), self)  # type: ignore[no-any-return, no-untyped-call]

    def nll_loss(
        self, logarithms: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
    ) -> Tensor:
        """`torch.nn.functional.nll_loss`; the targets are those of all samples."""
        held, local = self._locate(target)
        picked = _in_autocast_precision(logarithms).gather(self.dim, local.unsqueeze(self.dim)).squeeze(self.dim)
        losses = -self.ranks.leave(picked.masked_fill(~held, 0), self.samples)
        rows = self._weights(target, weight, ignore_index, losses.dtype)
        return _reduce(rows.weigh(losses), rows, reduction)

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """`torch.nn.functional.cross_entropy` with class numbers as targets, those of all samples."""
        logits = _in_autocast_precision(logits)
        held, local = self._locate(target)
        classes = weight[self.start : self.stop].to(logits.dtype) if weight is not None and label_smoothing else None
        logarithm, chosen, weighed = _Statistics.apply(logits, local, held, classes, bool(label_smoothing), self)  # type: ignore[no-untyped-call]
        rows = self._weights(target, weight, ignore_index, logits.dtype)
        loss = _reduce(rows.weigh(logarithm - chosen), rows, reduction)
        if not label_smoothing:
            return loss
        everything = self.size if weight is None else weight.to(logits.dtype).sum()
        smooth = _reduce(torch.where(rows.counted, logarithm * everything - weighed, 0), rows, reduction)
        return (1 - label_smoothing) * loss + label_smoothing / self.size * smooth

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which of them this device holds, and where."""
        held = (indices >= self.start) & (indices < self.stop)
        return held, torch.where(held, indices - self.start, 0)

    def _refuse_unknown(self, indices: Tensor, ignored: Tensor) -> None:
        """Numbers outside the vocabulary are errors, as in one process; only CPUs ask, others would have to wait for the answer."""
        if indices.device.type == "cpu" and bool((((indices < 0) | (indices >= self.size)) & ~ignored).any()):
            raise IndexError(f"index out of range: a number outside 0 to {self.size - 1} in a vocabulary of {self.size}")

    def _weights(self, target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> "_Rows":
        """The weight of each of the device's own rows; 0 for those that are ignored."""
        target = self.ranks.own(target, self.samples)
        counted = target != ignore_index
        self._refuse_unknown(target, ~counted)
        if weight is None:
            return _Rows(counted, counted.to(dtype))
        chosen = weight.to(dtype)[torch.where(counted, target, 0)]
        return _Rows(counted, torch.where(counted, chosen, 0))


@dataclass(frozen=True)
class _Rows:
    counted: Tensor
    weights: Tensor

    def weigh(self, losses: Tensor) -> Tensor:
        """Losses of rows by their weights; what is ignored is 0 even where its loss is not a number."""
        return torch.where(self.counted, losses, 0) * self.weights


def _reduce(losses: Tensor, rows: _Rows, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return losses.sum() / rows.weights.sum() if reduction == 1 else losses.sum()


def _in_autocast_precision(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Under autocast losses are computed in fp32, as PyTorch does."""
    if dtype is None and torch.is_autocast_enabled(x.device.type) and x.dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    return x if dtype is None else x.to(dtype)


def _largest(logits: Tensor, part: VocabularyPart) -> Tensor:
    """Of every row, over all devices. The dimension is kept."""
    return part.ranks.largest(logits.amax(part.dim, keepdim=True).contiguous())


class _Statistics(Function):
    """Of every row: logarithm of the sum of exponentials, the target's logit, and the sum of logits weighed by class (for smoothing)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: Tensor, held: Tensor, classes: Tensor | None, smooth: bool, part: VocabularyPart
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim, ranks = part.dim, part.ranks
        largest = _largest(logits, part)
        chosen = logits.gather(dim, local.unsqueeze(dim)).squeeze(dim).masked_fill(~held, 0)
        found = [(logits - largest).exp_().sum(dim), chosen]
        if smooth:
            found.append((logits if classes is None else logits * _along(classes, logits, dim)).sum(dim))
        summed = ranks.add_up(torch.stack(found))
        logarithm = summed[0].log() + largest.squeeze(dim)
        ctx.save_for_backward(logits, logarithm, local, held, classes)
        ctx.part, ctx.smooth = part, smooth
        results = [logarithm, summed[1], summed[2] if smooth else logarithm]
        return tuple(ranks.own(value, part.samples).clone() for value in results)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, logarithm, local, held, classes = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        dim = part.dim
        of_sum, of_chosen, *of_weighed = [part.ranks.spread(one, part.samples) for one in gradients[: 3 if ctx.smooth else 2]]
        result = (logits - logarithm.unsqueeze(dim)).exp_().mul_(of_sum.unsqueeze(dim))
        result.scatter_add_(dim, local.unsqueeze(dim), of_chosen.masked_fill(~held, 0).unsqueeze(dim))
        for gradient in of_weighed:
            result += gradient.unsqueeze(dim) * (1 if classes is None else _along(classes, logits, dim))
        return result, None, None, None, None, None


def _along(classes: Tensor, logits: Tensor, dim: int) -> Tensor:
    """A value a class, in the shape of logits."""
    return classes.view([-1 if d == dim else 1 for d in range(logits.dim())])


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart) -> Tensor:
        shifted = logits - _largest(logits, part)
        sums = part.ranks.add_up(shifted.exp().sum(part.dim, keepdim=True).contiguous())
        result = shifted - sums.log()
        ctx.save_for_backward(result)
        ctx.part = part
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        total = part.ranks.add_up(gradient.sum(part.dim, keepdim=True).contiguous())
        return gradient - result.exp() * total, None
