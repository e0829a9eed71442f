"""Exchanges between devices that compute parts of one product, differentiable, over a process group (Gloo or NCCL).

Two kinds of devices divide tensors. `TensorRanks` see the same samples: what enters a divided region is the same on all of them, partial
results are summed. `Lanes` have their own samples: what enters is gathered from all lanes, sums return to the lane that owns the sample.
The rest of the runtime's code for divided tensors does not know which of the two it serves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["Lanes", "Ranks", "Samples", "TensorRanks"]

Samples = tuple[int, int] | None  # the dimension that runs over samples, and its length for one sample; None: the same for all samples


class Ranks:
    """Devices that divide tensors between them."""

    gathers: bool  # whether each device has its own samples

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def enter(self, x: Tensor, samples: Samples) -> Tensor:
        """A value that a device's part is computed from, for all samples; its gradient is a sum over devices."""
        raise NotImplementedError

    def leave(self, x: Tensor, samples: Samples) -> Tensor:
        """The sum of the devices' partial results, for the device's own samples."""
        raise NotImplementedError

    def own(self, x: Tensor, samples: Samples) -> Tensor:
        """Of a value for all samples, the device's own; no gradient."""
        return x

    def spread(self, x: Tensor, samples: Samples) -> Tensor:
        """A value for all samples, of which each device has its own; no gradient."""
        return x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, samples: Samples) -> Tensor:
        """A product that sums over a divided dimension: the bias is added once, after the sum over devices."""
        return self._with_bias(functional.linear(x, weight), bias, samples)

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, samples: Samples) -> Tensor:
        """As `linear`, of a weight that is not transposed."""
        return self._with_bias(x @ weight, bias, samples)

    def _with_bias(self, part: Tensor, bias: Tensor | None, samples: Samples) -> Tensor:
        result = self.leave(part, samples)
        return result if bias is None else result + bias.to(result.dtype)  # under autocast the product is narrower than the bias

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over devices, in place; no gradient."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over devices, in place; no gradient."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x


class TensorRanks(Ranks):
    """Devices of one lane: all of them see the lane's samples."""

    gathers = False

    def enter(self, x: Tensor, samples: Samples) -> Tensor:
        return _SumGradients.apply(x, self) if x.requires_grad else x  # type: ignore[no-untyped-call]

    def leave(self, x: Tensor, samples: Samples) -> Tensor:
        return _SumParts.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class Lanes(Ranks):
    """Lanes of a replica that divide a layer. `samples` says how many of the micro-batch each lane has: set it before every forward."""

    gathers = True

    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        super().__init__(group)
        self.index = index
        self.samples: tuple[int, ...] = ()

    def total(self, per_sample: int) -> int:
        """A size that grows with the samples, for those of all lanes."""
        return per_sample * sum(self.samples)

    def enter(self, x: Tensor, samples: Samples) -> Tensor:
        """The gradient of what is the same for all samples is summed with the lanes' other gradients, not here."""
        if samples is None:
            return x
        return _Gather.apply(x, self, samples[0], self._lengths(samples))  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, x: Tensor, samples: Samples) -> Tensor:
        assert samples is not None, "only values that belong to samples leave a layer that lanes divide"
        return _Scatter.apply(x, self, samples[0], self._lengths(samples))  # type: ignore[no-any-return, no-untyped-call]

    def own(self, x: Tensor, samples: Samples) -> Tensor:
        assert samples is not None
        lengths = self._lengths(samples)
        return x.narrow(samples[0], sum(lengths[: self.index]), lengths[self.index])

    def spread(self, x: Tensor, samples: Samples) -> Tensor:
        assert samples is not None
        return self.gather(x, samples[0], self._lengths(samples))

    def _lengths(self, samples: tuple[int, int]) -> tuple[int, ...]:
        return tuple(samples[1] * count for count in self.samples)

    def gather(self, x: Tensor, dim: int, lengths: tuple[int, ...]) -> Tensor:
        """Every lane's piece, one after another along `dim`; pieces may differ in length."""
        rows = x.movedim(dim, 0).contiguous()
        whole = rows.new_empty((sum(lengths), *rows.shape[1:]))
        if len(set(lengths)) == 1:
            dist.all_gather_single(whole, rows, group=self.group)
        else:  # Gloo gathers only equal pieces; this sends as much
            copies = torch.cat([rows] * len(lengths))
            dist.all_to_all_single(whole, copies, list(lengths), [lengths[self.index]] * len(lengths), group=self.group)
        return whole.movedim(0, dim)

    def scatter(self, x: Tensor, dim: int, lengths: tuple[int, ...]) -> Tensor:
        """The sum over lanes of their values for this lane's samples."""
        rows = x.movedim(dim, 0).contiguous()
        own = lengths[self.index]
        if len(set(lengths)) == 1:
            summed = rows.new_empty((own, *rows.shape[1:]))
            dist.reduce_scatter_single(summed, rows, group=self.group)
        else:
            parts = rows.new_empty((own * len(lengths), *rows.shape[1:]))
            dist.all_to_all_single(parts, rows, [own] * len(lengths), list(lengths), group=self.group)
            summed = parts.view(len(lengths), own, *parts.shape[1:]).sum(0)
        return summed.movedim(0, dim)


class _SumGradients(Function):
    """Identity; the gradients are summed over devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.add_up(gradient.clone(memory_format=torch.contiguous_format)), None


class _SumParts(Function):
    """The sum over devices; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.add_up(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    """All lanes' samples; the gradient of each returns to its lane."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lanes: Lanes, dim: int, lengths: tuple[int, ...]) -> Tensor:
        ctx.given = lanes, dim, lengths
        return lanes.gather(x, dim, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        lanes, dim, lengths = ctx.given
        return lanes.scatter(gradient, dim, lengths), None, None, None


class _Scatter(Function):
    """Sums for the lane's own samples; every lane needs the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lanes: Lanes, dim: int, lengths: tuple[int, ...]) -> Tensor:
        ctx.given = lanes, dim, lengths
        return lanes.scatter(x, dim, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        lanes, dim, lengths = ctx.given
        return lanes.gather(gradient, dim, lengths), None, None, None
