"""A training script for runs through the command line: it can stop by itself, and one of its ranks can die once.

Its own arguments: `stop STEP`, `reseeded`, or `die STEP FILE` (rank 1 kills itself after that step of the optimizer unless FILE exists).
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import atoll
from atoll.events import AnyEvent, StepFinished

STEPS = 8


class Mortal(torch.optim.AdamW):
    """AdamW that ends its process at a step, once."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if sys.argv[1:2] != ["die"] or os.environ.get("RANK") != "1":
            return
        last, mark = int(sys.argv[2]), Path(sys.argv[3])
        taken = max(int(state["step"]) for state in self.state.values())
        if taken == last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def stop(event: AnyEvent) -> None:
    if sys.argv[1:2] == ["stop"] and isinstance(event, StepFinished) and event.step == int(sys.argv[2]):
        raise atoll.StopTraining


def build() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)), nn.Linear(12, 5))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(12, generator=generator), torch.randint(0, 5, (), generator=generator)) for _ in range(40)]


job = atoll.Job(
    name="resumed",
    seed=int(sys.argv[1:2] == ["reseeded"]),
    model=build,
    loss=loss,
    data=data,
    optimizer=partial(Mortal, lr=1e-2, eps=1e-3),
    scheduler=partial(CosineAnnealingLR, T_max=STEPS),
    max_grad_norm=0.5,
    batch_size=8,
    steps=STEPS,
    callbacks=[stop],
)

if __name__ == "__main__":
    job.run()
