"""Error feedback: what an encoding left out is added to the next tensor, so that over time everything arrives.

Sums of gradients then converge to the sums of what was computed, however coarse the codec (Seide et al., "1-bit stochastic gradient
descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019).
"""

import torch

from atoll.errors import CodecError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """What one tensor still owes one peer. The sender holds one for each (peer, tensor) and gives it to every `encode` of them.

    An encode that raises leaves it as it was. NaN and Inf are never owed: where they were sent they arrived, and that debt is forgotten.
    """

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None  # in fp32, or fp64 for fp64 tensors
        self.basis: torch.Tensor | None = None  # where low-rank starts its next search
        self.relative_error = 0.0  # of the last encoding: root mean square of what stayed here over that of what was to be sent

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with what was left out before, in the residual's precision: a new tensor."""
        work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if self.residual is None:
            return tensor.to(work, copy=True)
        if self.residual.shape != tensor.shape or self.residual.dtype != work:
            raise CodecError(
                f"error feedback of a tensor {list(self.residual.shape)} was given one {list(tensor.shape)} of {tensor.dtype}; "
                "keep one ErrorFeedback for each peer and tensor"
            )
        return self.residual + tensor

    def keep(self, total: torch.Tensor, arrived: torch.Tensor) -> None:
        """What of the total did not arrive is owed from now on. Takes `arrived` over, never `total`: an encoding may share its memory."""
        out = arrived if arrived.dtype == total.dtype else None
        self.residual = _forget_non_finite(torch.sub(total, arrived, out=out))
        norm = torch.linalg.vector_norm(total)
        self.relative_error = float(torch.linalg.vector_norm(self.residual) / norm) if norm else 0.0

    def undelivered(self, arrived: torch.Tensor) -> None:
        """An encoding that was made never reached the peer: what it decodes to is owed again."""
        if self.residual is not None:
            self.residual.add_(_forget_non_finite(arrived.to(self.residual.dtype, copy=True)))

    def reset(self) -> None:
        """Nothing is owed: the peer got the whole state some other way."""
        self.residual = self.basis = None
        self.relative_error = 0.0


def _forget_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
