"""A small job for sites that train together: a loss with a token-like weight, so that unequal sites must be weighed exactly.

The first argument is the optimizer, the second how many steps to make or a file: then no rank reads a sample of step s before the
number in it allows that. A third one is what the last two samples of every batch are multiplied by: their site sends large updates.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import atoll

STEPS, BATCH = 12, 10
CLIPPED = 0.1  # with the optimizer `clipped`
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.05), "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3)}
OPTIMIZERS["clipped"] = OPTIMIZERS["sgd"]
given = [argument for argument in sys.argv[1:] if argument in OPTIMIZERS]  # a test that imports this has arguments of its own
second = sys.argv[2] if given and len(sys.argv) > 2 else str(STEPS)
allowed = None if second.isdecimal() else Path(second)
wild = float(sys.argv[3]) if given and len(sys.argv) > 3 else 1.0
optimizer = OPTIMIZERS[given[0] if given else "sgd"]


class Data:
    def __init__(self) -> None:
        self.first: dict[int, int] = {}  # the steps that begin with a sample
        self.wild: set[int] = set()

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        while allowed is not None and "RANK" in os.environ and self.first.get(index, 0) > int(allowed.read_text() or 0):
            time.sleep(0.02)
        generator, factor = torch.Generator().manual_seed(index), wild if index in self.wild else 1.0
        inputs, wanted = torch.randn(6, generator=generator), torch.randn(3, generator=generator)
        return inputs, wanted * factor, torch.rand((), generator=generator) + 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, wanted, weights = batch
    return (weights[:, None] * (model(inputs) - wanted) ** 2).sum(), weights.sum()


data = Data()
steps = int(second) if second.isdecimal() else STEPS
clipped = CLIPPED if given[:1] == ["clipped"] else None
job = atoll.Job(
    model=Model, loss=loss, data=data, optimizer=optimizer, steps=steps, batch_size=BATCH, max_grad_norm=clipped, name="island job"
)
data.first = {job.samples.index(step * BATCH + place): step + 1 for step in range(STEPS) for place in range(BATCH)}
data.wild = {job.samples.index(step * BATCH + place) for step in range(STEPS) for place in (BATCH - 2, BATCH - 1)}
