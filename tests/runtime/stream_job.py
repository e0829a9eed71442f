"""A training script whose data is a stream that says where it is, loaded by a worker. Its own arguments: the steps, and where to."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import atoll

BATCH, STEPS, LENGTH = 8, 12, 21
given = [int(argument) for argument in sys.argv[1:2] if argument.isdigit()]  # a test that imports this has arguments of its own


class Stream(IterableDataset[Tensor]):
    """Rows with noise drawn from the global generator, shuffled anew in every epoch."""

    def __init__(self) -> None:
        self.epoch, self.done = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for index in random.Random(self.epoch).sample(range(LENGTH), LENGTH)[self.done :]:
            self.done += 1
            yield torch.tensor([index / LENGTH, index % 4, self.epoch]) + 0.1 * torch.rand(3)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


job = atoll.Job(
    name="stream",
    model=build,
    loss=loss,
    data=Stream,
    eval_data=Stream,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.02, eps=1e-3),
    batch_size=BATCH,
    steps=given[0] if given else STEPS,
    num_workers=1,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    job.run(**{sys.argv[2]: sys.argv[3]}, progress=False)  # type: ignore[arg-type]
