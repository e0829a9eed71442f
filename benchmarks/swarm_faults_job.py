"""What `swarm_faults.py` and `swarm_group.py` train. Every sample has a weight of its own: one lost or counted twice shows in a step's.

Arguments: steps, width, samples of a micro-batch. It stands alone, since machines that join are sent this file only.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import atoll

STEPS, WIDTH, MICRO_BATCH = (int(word) for word in (*sys.argv[1:4], *("100", "256", "2")[len(sys.argv[1:4]) :]))
BATCH, TOKENS, FEATURES, BLOCKS = 64, 8, 32, 4
optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-6)


class Sequences:
    """Random features and what is to be made of them, by the sample's number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(TOKENS, FEATURES, generator=generator)
        weight = 0.5 + torch.rand((), generator=generator, dtype=torch.float64)
        return inputs, inputs.sin().cumsum(0), weight.float()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, wanted, weights = batch
    errors = ((model(inputs) - wanted) ** 2).mean((1, 2))
    return (weights * errors).sum(), weights.sum()


job = atoll.Job(
    name="swarm faults",
    model=Model,
    loss=loss,
    data=Sequences(),
    optimizer=optimizer,
    batch_size=BATCH,
    micro_batch_size=MICRO_BATCH,
    steps=STEPS,
)
