"""A small job for swarm processes: regression with a token-like weight, so that sums and weights both matter."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import atoll

STEPS, BATCH = 120, 12
optimizer = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


class Data:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
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


job = atoll.Job(model=Model, loss=loss, data=Data(), optimizer=optimizer, batch_size=BATCH, steps=STEPS, name="swarm job")
