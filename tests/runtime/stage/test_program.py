"""Programs cut into stages, at every cut there is, compute what the model computes, forwards and backwards."""

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.graph.capture import Captured, capture_program
from atoll.graph.export import use_batched_experts
from atoll.runtime.stage.program import cut_stage, shared_parameters

from .stage_chain import Chain, job_of

sys.path.insert(0, str(Path(__file__).parents[2] / "graph"))

from captured_models import tiny


class Spread(nn.Module):
    """Values that skip stages, a buffer, a parameter used twice, a size that is computed, a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        first = x
        count = x.shape[0] * 2
        for index, layer in enumerate(self.layers):
            x = layer(x).relu()
            if index == 1:
                x = x * self.scale + first
            if index == 2:
                x = x.clone().add_(first / count)
        return self.head(x) + first


def squares(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = model(batch["x"])
    return y.square().sum(), torch.tensor(y.shape[0])


def vectors(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6)}


NAMES = ("spread", "gpt2", "llama", "t5", "bert", "whisper", "mixtral", "gemma2")


@cache
def captured_job(name: str) -> tuple[Any, Captured]:
    job = job_of(Spread, squares, vectors) if name == "spread" else tiny(name)
    return job, capture_program(job)


def eager(job: Any, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    result = job.loss(model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compared(name: str, *, recompute: bool) -> tuple[bool, dict[str, tuple[Tensor, Tensor]]]:
    """Whether the loss is the model's bit for bit, and own and true gradients of every parameter that has one."""
    job, captured = captured_job(name)
    torch.manual_seed(2)
    model = job.model().train()
    use_batched_experts(model)
    batch = job.example_batch(3)
    chain = Chain(captured, model, [0, *captured.graph.cuts, len(captured.graph.layers)], recompute=recompute)
    loss, gradients = eager(job, model, batch)
    same = torch.equal(chain.loss(batch), loss)
    own = {name: parameter.grad for name, parameter in chain.parameters.items() if parameter.grad is not None}
    assert own.keys() == gradients.keys()
    return same, {name: (own[name], gradients[name]) for name in own}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_stages_at_every_cut_are_the_model(name: str, recompute: bool) -> None:
    """The loss bit for bit; gradients of a value that several operators read may be added up in another order."""
    same, gradients = compared(name, recompute=recompute)
    assert same
    for own, true in gradients.values():
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6 * float(true.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_the_stages_that_read_it_and_nothing_is_sent_twice(name: str) -> None:
    _, captured = captured_job(name)
    cuts = [0, *captured.graph.cuts, len(captured.graph.layers)]
    stages = [cut_stage(captured, start, stop) for start, stop in pairwise(cuts)]
    homes: dict[str, set[int]] = {}
    for index, stage in enumerate(stages):
        for unit in stage.units:
            for parameter in unit.parameters.values():
                homes.setdefault(parameter, set()).add(index)
        names = [crossing.name for crossing in stage.sends]
        assert len(set(names)) == len(names)
    assert {name for name, where in homes.items() if len(where) > 1} <= shared_parameters(captured)
    assert set(homes) == set(captured.liveness.table.parameters.values())
    for before, after in pairwise(stages):
        assert before.sends == after.receives
    assert stages[0].receives == ()
    assert stages[-1].last
    assert not any(stage.last for stage in stages[:-1])


def test_what_parameters_a_stage_does_not_read_it_does_not_hold() -> None:
    _, captured = captured_job("gpt2")
    cut = captured.graph.cuts[1]
    stage = cut_stage(captured, 0, cut)
    held = {name for unit in stage.units for name in unit.parameters.values()}
    assert "transformer.wte.weight" in held
    assert "transformer.h.1.mlp.c_proj.weight" not in held
