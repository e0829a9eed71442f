"""Draws of dropout: keyed by seed, step, samples and number, and the same for eager code and for the captured program."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from atoll.graph.capture import capture_program
from atoll.runtime.stage.module import StageBuilder
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import Draw, DrawKey, EagerDraws
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState

from .stage_chain import job_of

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=2, unique=True))
def test_different_draws_have_different_seeds(two: list[tuple[int, int, int, int]]) -> None:
    def seed_of(seed: int, step: int, first_sample: int, number: int) -> int:
        key = DrawKey(seed)
        key.step, key.first_sample = step, first_sample
        return key.of(number)

    assert seed_of(*two[0]) != seed_of(*two[1])


def test_a_draw_depends_on_its_key_alone() -> None:
    key = DrawKey(3)
    draw = Draw(key, CPU)
    draw(4)
    first = torch.rand(5)
    torch.rand(100)
    draw(4)
    assert torch.equal(torch.rand(5), first)
    key.step = 1
    draw(4)
    assert not torch.equal(torch.rand(5), first)


class Drawing(nn.Module):
    """All sorts of dropout, some of it off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.off, self.on = nn.Dropout(0.0), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.on(self.off(self.first(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = functional.dropout(x, 0.5, training=False)
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).flatten(2)
        x = functional.alpha_dropout(self.second(x), 0.1, training=True)
        noise = torch.rand_like(x) + torch.randn(x.shape)
        return functional.dropout1d(x + noise, 0.2)


class DrawingInRegions(nn.Module):
    """Draws inside `no_grad` and `autocast`, one inside the other, and in layers that draw for themselves, some of them off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.off, self.on = nn.LSTM(8, 8, 2), nn.LSTM(8, 8, 1), nn.Dropout(0.2)
        self.last = nn.GRU(8, 8, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.on(self.off(self.first(x)[0])[0])
        with torch.no_grad():
            kept = torch.empty_like(x).bernoulli_(0.9)
            with torch.autocast("cpu", enabled=False):
                kept = self.on(kept) * torch.rand_like(x)
        with torch.autocast("cpu", enabled=False):
            x = self.on(x * kept)
        return self.on(self.last(x)[0])


class Rebuilding(nn.Module):
    """Its first forward builds a module around parameters that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.on, self.rebuilt = nn.Linear(8, 8), nn.Dropout(0.2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.on(x)
        if not self.rebuilt:
            again = nn.Linear(8, 8)
            again.weight, again.bias = self.first.weight, self.first.bias
            self.first, self.rebuilt = again, True
        return self.on(self.first(x))


def sum_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def inputs(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 4, 8)}


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # export speaks of torch's own recurrent layers
@pytest.mark.parametrize(
    "build", [Drawing, DrawingInRegions, Rebuilding, partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.2, batch_first=True)]
)
def test_eager_code_and_the_captured_program_draw_the_same(build: Callable[[], nn.Module]) -> None:
    job = job_of(build, sum_of, inputs)
    captured = capture_program(job)
    torch.manual_seed(0)
    model, batch, key = build().train(), job.example_batch(4), DrawKey(9)
    program = cut_stage(captured, 0, len(captured.graph.layers))
    module = StageBuilder(InitialState(captured, model), device=CPU, key=key).stage(program)
    losses = []
    for key.step, key.first_sample in ((1, 0), (1, 3), (2, 0)):
        with EagerDraws(key, model):
            eager = job.loss(model, batch)
        (own,) = module(dict(Sizes(captured).leaves(batch)))
        assert torch.equal(own, eager)
        losses.append(float(own.detach()))
    assert len(set(losses)) == 3
