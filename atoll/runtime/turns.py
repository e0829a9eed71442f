"""Turns of a step: a job with several losses (a GAN) computes each in turn, and trains one submodule with it. Other jobs have one turn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["SeveralSchedules", "optimizer_names", "schedule_of", "training_only"]


@contextmanager
def training_only(own: Sequence[str], trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, gradients flow to these of the trained parameters and to no others; through the others they do."""
    others = [parameter for name, parameter in trained.items() if name not in set(own)]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


class SeveralSchedules:
    """The schedules of several turns, as a checkpoint keeps them."""

    def __init__(self, schedules: Mapping[str, LRScheduler | None]) -> None:
        self._schedules = {name: one for name, one in schedules.items() if one is not None}

    def state_dict(self) -> dict[str, Any]:
        """By the turns' names, without functions: the script makes them again."""
        return {name: {k: v for k, v in one.state_dict().items() if not callable(v)} for name, one in self._schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        for name, one in self._schedules.items():
            if name in state:
                one.load_state_dict(state[name])


def schedule_of(schedules: Mapping[str, LRScheduler | None]) -> "LRScheduler | SeveralSchedules | None":
    """Of all turns, for a checkpoint."""
    if list(schedules) == [""]:
        return schedules[""]
    return SeveralSchedules(schedules)


def optimizer_names(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """What a checkpoint calls the optimizer, or several of them."""
    return "+".join(type(optimizer).__name__ for optimizer in optimizers)
