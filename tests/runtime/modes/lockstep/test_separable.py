"""Optimizers are tried before a plan gives them parts of what they would see in one process."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from atoll.errors import JobError
from atoll.runtime.checkpoint.training_state import restore_training, training_state
from atoll.runtime.checkpoint.values import from_plain, to_plain
from atoll.runtime.executor import LossScale
from atoll.runtime.modes.lockstep.sharding import check_elementwise, check_separable


class Scaled(torch.optim.Optimizer):
    """Divides by a norm: of all its parameters, of large matrices or of vectors."""

    def __init__(self, parameters: Iterable[nn.Parameter], over: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.over = over

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        everything = torch.stack([p.grad.norm() for p in parameters]).norm()
        with torch.no_grad():
            for p in parameters:
                whole = (self.over == "vectors" and p.dim() == 1) or (self.over == "matrices" and p.dim() == 2 and min(p.shape) >= 16)
                p -= 0.1 * p.grad / (everything if self.over == "all" else p.grad.norm() if whole else 1.0)


def test_usual_optimizers_pass() -> None:
    for build in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        check_elementwise(build)
        check_separable(build)


@pytest.mark.parametrize("over", ["matrices", "vectors"])
def test_what_looks_at_whole_parameters_is_refused(over: str) -> None:
    with pytest.raises(JobError, match="looks at whole parameters"):
        check_elementwise(partial(Scaled, over=over))


def test_what_looks_at_all_parameters_together_is_refused_under_pipelines() -> None:
    build: Callable[..., torch.optim.Optimizer] = partial(Scaled, over="all")
    with pytest.raises(JobError, match="depends on the others"):
        check_separable(build)
    check_separable(partial(Scaled, over="vectors"))


def test_milestones_of_a_schedule_survive_a_checkpoint() -> None:
    def schedule() -> MultiStepLR:
        return MultiStepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), [3, 6], gamma=0.1)

    through, resumed = schedule(), schedule()
    for _ in range(4):
        through.optimizer.step()
        through.step()
    resumed.optimizer.load_state_dict(through.optimizer.state_dict())
    saved = from_plain(to_plain(training_state(through, LossScale(False), [0.0] * 4), "state"), "state")
    restore_training(saved, 4, resumed, LossScale(False))
    for _ in range(4):
        for one in (through, resumed):
            one.optimizer.step()
            one.step()
    assert through.get_last_lr() == resumed.get_last_lr() == [pytest.approx(0.01)]
