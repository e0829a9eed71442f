"""Owned: a rank's part of one parameter, as the optimizer, norms and checkpoints see it: a plain tensor, sharded or not."""

from dataclasses import dataclass

from torch import nn

from atoll.runtime.checkpoint import Held
from atoll.runtime.lockstep.optimizing import local
from atoll.runtime.stage.holding import Holding

__all__ = ["Owned"]


@dataclass(frozen=True, eq=False)
class Owned:
    """What a rank owns of a parameter. Under sharding (FSDP) `leaf` is the rank's shard of `source`, in the same memory."""

    name: str
    holding: Holding
    source: nn.Parameter  # what backward leaves its gradient in
    leaf: nn.Parameter  # what the optimizer updates
    flat: tuple[int, int] | None = None  # the shard's elements of what the lanes hold together

    @property
    def sharded(self) -> bool:
        """Whether lanes hold shards of it."""
        return self.flat is not None

    def forget_gradient(self) -> None:
        """Before a step's first backward."""
        self.source.grad = self.leaf.grad = None

    def hand_gradient_over(self) -> None:
        """Give the optimizer what backward and synchronisation left."""
        if self.leaf is not self.source:
            self.leaf.grad = local(self.source.grad) if self.source.grad is not None else None

    @property
    def held(self) -> Held:
        """For a checkpoint."""
        return Held(self.holding, self.leaf.detach(), self.flat, self.leaf)
