"""Plans that keep their own rules but not the program's: refused with the reason, before anything runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import PlanError
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.parallelize import check_lane_sizes
from atoll.runtime.stage.sizes import Sizes
from tests.runtime.stage.stage_chain import job_of

from .equality_cases import plan_of


class Summing(nn.Module):
    """Every block adds to a number that is passed on beside the rows: a loss on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = x.new_zeros(())
        for block in self.blocks:
            x = block(x).tanh()
            side = side + x.square().mean()
        return x, side


class FourRows(Summing):
    """A model that knows how many samples it gets."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, side = super().forward(x)
        return y.view(4, 6), side


def both(model: Any, batch: dict[str, Tensor]) -> Tensor:
    y, side = model(batch["x"])
    return y.square().mean() + side


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6)}


def check(captured: Captured, text: str) -> None:
    check_lane_sizes(Layout(plan_of(captured.graph, text, 8)), captured, Sizes(captured))


@pytest.fixture(scope="module")
def summing() -> Captured:
    return capture_program(job_of(Summing, both, rows))


def test_a_number_beside_the_rows_cannot_go_to_other_lanes(summing: Captured) -> None:
    with pytest.raises(PlanError, match=r"stages 0 and 1 divide micro-batches differently, but the value .* of shape \[\].*same lanes"):
        check(summing, "4 | (a b)=4,4 | c=8")


@pytest.mark.parametrize("plan", ["4 | (a b)=4,4 | (c d)=4,4", "4 | a=8 | b=4 c=4", "4 | (a b)=4,4", "2 | a=8 | b=8"])
def test_lanes_that_line_up_pass_it_on(summing: Captured, plan: str) -> None:
    check(summing, plan)


def test_a_model_of_a_fixed_number_of_samples_gets_just_these() -> None:
    captured = capture_program(job_of(FourRows, both, rows))
    check(captured, "4 | a=8 | b=8")
    with pytest.raises(PlanError, match=r"a device gets 2 samples of micro-batch 0, but job could be captured for 4 samples only"):
        check(captured, "2 | a=8 | b=8")
