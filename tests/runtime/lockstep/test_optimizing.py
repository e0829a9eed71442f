"""The end of a step: norms, clipping, loss scaling, and which optimizers may see parts of parameters."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.errors import JobError
from atoll.runtime.lockstep.optimizing import (
    Counted,
    build_on_parts,
    check_elementwise,
    clip_factor,
    scale_gradients,
    squared_norm,
)
from atoll.runtime.stage.loss_scale import LossScale


class Lion(torch.optim.Optimizer):
    """Signs of a moving average: an optimizer that is not PyTorch's own."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * (0.9 * average + 0.1 * parameter.grad).sign())
                average.lerp_(parameter.grad, 0.01)


ELEMENTWISE = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Lion": Lion,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_of_single_numbers_may_see_parts(name: str) -> None:
    check_elementwise(ELEMENTWISE[name])


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, partial(torch.optim.Muon, lr=0.1)])
def test_optimizers_of_whole_matrices_may_not(optimizer: Any) -> None:
    with pytest.raises(JobError, match=r"optimizer: it looks at whole parameters, but this plan divides parameters"):
        check_elementwise(optimizer)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**16))
def test_norms_of_parts_add_up_to_the_norm_of_the_whole(rows: int, holders: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(3, rows + 1, generator=generator)
    cut = int(torch.randint(0, rows + 2, (), generator=generator))
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    untouched = Counted(nn.Parameter(torch.zeros(2)), 1)
    each = squared_norm([Counted(parameter, holders, 1, 0, cut), Counted(parameter, holders, 1, cut, rows + 1), untouched])
    assert each * holders == pytest.approx(float(gradient.double().square().sum()), rel=1e-5)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_clipping_is_pytorchs(norm: float, most: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    ours = norm * clip_factor(norm, most)
    torch.nn.utils.clip_grad_norm_([parameter], most)
    assert ours == pytest.approx(float(parameter.grad), rel=1e-6)


def test_without_a_bound_or_a_norm_nothing_is_clipped() -> None:
    assert clip_factor(5.0, None) == 1.0
    assert clip_factor(math.inf, 1.0) == 1.0


def test_gradients_are_scaled_where_there_are_any() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([2.0, 4.0])
    scale_gradients([one, other], 0.5)
    assert one.grad.tolist() == [1.0, 2.0]
    assert other.grad is None


@given(st.lists(st.booleans(), max_size=60))
def test_the_loss_scale_moves_as_gradscalers_does(overflows: list[bool]) -> None:
    own, scaler = LossScale(True), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflowed in overflows:
        scaler.scale(parameter.sum())
        parameter.grad = torch.tensor([math.inf if overflowed else 0.0])
        scaler.step(optimizer)
        scaler.update()
        own.update(overflowed)
        assert own.value == scaler.get_scale()


def test_the_loss_scale_doubles_after_many_good_steps_and_survives_a_checkpoint() -> None:
    scale = LossScale(True)
    for _ in range(1999):
        scale.update(False)
    again = LossScale(True)
    again.restore(scale.state())
    assert again.value == 65536.0
    again.update(False)
    assert again.value == 2 * 65536.0
    without = LossScale(False)
    without.update(True)
    assert without.value == 1.0


def by_size(parameters: Any, kind: Any = torch.optim.SGD, **given: Any) -> torch.optim.Optimizer:
    large = [p for p in parameters if p.numel() > 20]
    small = [p for p in parameters if p.numel() <= 20]
    return kind([{"params": group, "lr": rate} for group, rate in ((large, 0.1), (small, 0.5)) if group], **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "build", [by_size, partial(by_size, kind=torch.optim.Adagrad), partial(by_size, kind=torch.optim.AdamW, fused=True)]
)
def test_parts_are_grouped_as_their_wholes(build: Any) -> None:
    parts = [nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(5, 5))]
    optimizer = build_on_parts(build, parts, [(4, 6), (18,), (5, 5)])
    rates = {id(part): group["lr"] for group in optimizer.param_groups for part in group["params"]}
    assert [rates[id(part)] for part in parts] == [0.1, 0.5, 0.1]
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer.step()
    assert all(part.min() < 1 for part in parts)
