"""A training script whose steps are its own argument: every mode makes some of them, and the next goes on.

Its layers share a weight across the model's ends, one parameter is frozen, one buffer is read by nobody. Its loss is a mean over labels
that are not ignored, of which pieces of a batch have unequal numbers: it is no mean over samples.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import atoll

BATCH, STEPS = 8, 25
given = [int(argument) for argument in sys.argv[1:2] if argument.isdigit()]  # a test that imports this has arguments of its own


class Data:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(0, 6, (), generator=generator)
        return torch.randn(6, generator=generator), label if index % 3 else torch.tensor(-100)


class Model(nn.Module):
    unread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.bias = nn.Parameter(torch.zeros(6))
        self.blocks[2][0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        self.register_buffer("unread", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return linear(x, self.first.weight.t(), self.bias)


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def warm(step: int) -> float:
    return min(1.0, (step + 1) / 8) * 0.97**step


job = atoll.Job(
    name="walk",
    model=Model,
    loss=loss,
    data=Data(),
    optimizer=partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
    scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=warm),
    max_grad_norm=1.0,
    batch_size=BATCH,
    steps=given[0] if given else STEPS,
)

if __name__ == "__main__":
    job.run()
