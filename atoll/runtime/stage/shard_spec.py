"""Shards: which part of a parameter a rank holds. All that divides parameters says it this way; so do checkpoints and norms."""

import math

import msgspec
import torch
from torch import Tensor

__all__ = ["ShardSpec"]


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of the parameter `name`, or the index ranges `parts` of its dimension `dim`, one after another.

    There are several ranges where projections are fused into one parameter (query, key and value): each is divided by itself.
    """

    name: str  # the user's
    shape: tuple[int, ...]  # of the whole parameter
    dim: int | None = None  # None: all of it
    parts: tuple[tuple[int, int], ...] = ()  # start, stop; ascending, none overlapping

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def elements(self) -> int:
        """How many numbers the rank holds."""
        return math.prod(self.local_shape)

    def take(self, whole: Tensor) -> Tensor:
        """The rank's part of a whole tensor: a view where it is one range, else a copy."""
        if self.dim is None:
            return whole
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write the rank's part into its place in a whole tensor."""
        if self.dim is None:
            whole.copy_(part)
            return
        offset = 0
        for start, stop in self.parts:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, offset, stop - start))
            offset += stop - start
