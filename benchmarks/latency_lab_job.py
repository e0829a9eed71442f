"""What `latency_lab.py` and `swarm_joining_lab.py` train: a stack of equal blocks, also in four parts for a pipeline written by hand.

Arguments: steps, samples of a step, samples of a micro-batch, width. It stands alone, since machines that join are sent this file only.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import atoll

DEFAULTS = ("4", "128", "2", "512")
STEPS, BATCH, MICRO_BATCH, WIDTH = (int(word) for word in (*sys.argv[1:5], *DEFAULTS[len(sys.argv[1:5]) :]))
TOKENS, FEATURES, BLOCKS, STAGES = 8, 32, 8, 4
optimizer = partial(torch.optim.AdamW, lr=1e-3)


class Sequences:
    """Random features and what is to be made of them, by the sample's number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sin().cumsum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def error(found: Tensor, wanted: Tensor) -> Tensor:
    return ((found - wanted) ** 2).mean()


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, wanted = batch
    return error(model(inputs), wanted)


def bounds(layers: int) -> tuple[int, ...]:
    """The stages' first layers and the end of the last: as many blocks in each, the first and last layer with their neighbours."""
    inner = [1 + BLOCKS * stage // STAGES for stage in range(1, STAGES)]
    return (0, *inner, layers)


def part(model: Model, stage: int) -> nn.Sequential:
    """The same stage as a module."""
    own = model.blocks[BLOCKS * stage // STAGES : BLOCKS * (stage + 1) // STAGES]
    return nn.Sequential(*([model.first] if stage == 0 else []), *own, *([model.last] if stage == STAGES - 1 else []))


job = atoll.Job(
    name="latency",
    model=Model,
    loss=loss,
    data=Sequences(),
    optimizer=optimizer,
    batch_size=BATCH,
    micro_batch_size=MICRO_BATCH,
    steps=STEPS,
)
