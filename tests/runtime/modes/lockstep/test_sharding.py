"""The end of a step: norms, and which optimizers may see parts of parameters."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import JobError
from atoll.graph.capture import capture_program
from atoll.runtime.modes.lockstep.sharding import (
    Counted,
    backward_reads,
    build_on_parts,
    check_elementwise,
    squared_norm,
)
from atoll.runtime.stage.module import StageBuilder
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.state import InitialState

from ...stage.stage_chain import job_of


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


class Words(nn.Module):
    """Looks rows up, in one layer and no more of them, in another scaled by one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scaled, self.head = nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x) + self.scaled(x) * self.scaled.weight[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_reads_no_parameters_where_rows_are_only_looked_up(recompute: bool) -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()  # type: ignore[no-any-return]

    captured = capture_program(job_of(Words, loss, lambda samples: {"x": torch.randint(7, (samples, 5))}))
    program = cut_stage(captured, 0, len(captured.graph.layers))
    builder = StageBuilder(InitialState(captured, Words()), device=torch.device("cpu"), key=DrawKey(0))
    module = builder.stage(program, [recompute] * len(program.units))
    reads = {name: backward_reads(unit) for unit in module.all_units() for name in unit.parameter_names.values()}
    assert reads == {"words.weight": recompute, "scaled.weight": True, "head.weight": True, "head.bias": True}
