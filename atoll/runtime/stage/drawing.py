"""Random numbers of a run: every draw of dropout is a function of the job's seed, the step, the samples and which draw of the model it is.

So a micro-batch gives the same numbers on whatever rank, in whatever order and however often it is computed.
"""

import torch
from torch import nn

from atoll.randomness import mix

__all__ = ["Draw", "DrawKey"]


class DrawKey:
    """What the draws under way depend on: set before each micro-batch, and again before it is computed once more in backward."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.first_sample = 0  # of the samples under way, in the global batch

    def of(self, number: int) -> int:
        """The seed of the model's draw `number`."""
        return mix(self.seed, 5, self.step, self.first_sample, number)


class Draw(nn.Module):
    """Stands before a random operator in a unit's graph and seeds its generator."""

    def __init__(self, key: DrawKey, device: torch.device) -> None:
        super().__init__()
        self._key, self._on_cpu = key, device.type == "cpu"

    def forward(self, number: int) -> None:
        """Seed the generator of the operator that follows."""
        if self._on_cpu:
            torch.default_generator.manual_seed(self._key.of(number))  # `torch.manual_seed` looks at every kind of device first
        else:
            torch.manual_seed(self._key.of(number))
