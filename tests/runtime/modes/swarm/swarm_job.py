"""A small job for swarm processes: regression with a token-like weight, so that sums and weights both matter.

With an argument, a file, no step is fed before the number in the file allows it: a test decides what happens before which step.
With `evaluate` after it, the last weights are evaluated.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import atoll

STEPS, BATCH = 16, 12
optimizer = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


class Data:
    def __init__(self, allowed: Path | None) -> None:
        self.allowed = allowed
        self.first: dict[int, int] = {}  # the steps that begin with a sample

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        while self.allowed is not None and self.first.get(index, 0) > int(self.allowed.read_text() or 0):
            time.sleep(0.02)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator), torch.rand((), generator=generator) + 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, wanted, weights = batch
    return (weights[:, None] * (model(inputs) - wanted) ** 2).sum(), weights.sum()


given = [Path(argument) for argument in sys.argv[1:2] if argument.endswith("allowed")]  # a test that imports this has arguments of its own
data = Data(given[0] if given else None)
evaluation = Data(None) if sys.argv[2:3] == ["evaluate"] else None
job = atoll.Job(
    model=Model, loss=loss, data=data, optimizer=optimizer, steps=STEPS, batch_size=BATCH, eval_data=evaluation, name="swarm job"
)
data.first = {job.samples.index(step * BATCH): step + 1 for step in range(STEPS)}
