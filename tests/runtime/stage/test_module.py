"""Stage modules: what they hold, and that running a unit again changes nothing but its activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.graph.capture import Captured, capture_program
from atoll.model_identity import tied_names
from atoll.runtime.stage.module import StageBuilder
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState, unread_state

from .stage_chain import Chain, job_of


class Normed(nn.Module):
    """Running statistics, a tied head, a parameter and a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.layers[0][0].weight  # type: ignore[index]
        self.idle = nn.Parameter(torch.ones(2))
        self.register_buffer("mark", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def vectors(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6)}


JOB = job_of(Normed, squares, vectors)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_program(JOB)


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_move_once_a_forward(captured: Captured, recompute: bool) -> None:
    model = Normed()
    chain = Chain(captured, model, [0, *captured.graph.cuts, len(captured.graph.layers)], recompute=recompute)
    batch = JOB.example_batch(4)
    for _ in range(2):
        squares(model, batch).backward()
        chain.loss(batch)
    own = {name: buffer for module in chain.modules for name, buffer in module.buffers_by_name().items()}
    expected = dict(model.named_buffers())
    assert own.keys() == expected.keys() - {"mark"}
    for name, buffer in own.items():
        assert torch.equal(buffer, expected[name]), name


def test_a_parameter_of_two_stages_is_one_object(captured: Captured) -> None:
    chain = Chain(captured, Normed(), [0, *captured.graph.cuts, len(captured.graph.layers)])
    uses = [
        module.parameters_by_name()["layers.0.0.weight"] for module in chain.modules if "layers.0.0.weight" in module.parameters_by_name()
    ]
    assert len(uses) == 2
    assert uses[0] is uses[1]


def test_a_stage_copies_the_part_that_it_holds(captured: Captured) -> None:
    model = Normed()
    holding = ShardSpec(name="head.bias", shape=(6,), dim=0, parts=((1, 3),))
    builder = StageBuilder(InitialState(captured, model), device=CPU, key=DrawKey(0))
    stage = builder.stage(cut_stage(captured, 0, len(captured.graph.layers)), holdings={"head.bias": holding})
    held = stage.parameters_by_name()["head.bias"]
    assert torch.equal(held, model.head.bias[1:3])
    assert held.data_ptr() != model.head.bias[1:].data_ptr()
    assert builder.holdings["head.weight" if "head.weight" in builder.holdings else "layers.0.0.weight"].dim is None


def test_values_are_dropped_after_their_last_use(captured: Captured) -> None:
    values = dict(Sizes(captured).leaves(JOB.example_batch(4)))
    Chain(captured, Normed(), [0, len(captured.graph.layers)]).modules[0](values)
    assert len(values) <= 2, "the loss and what the last unit read"


def test_what_nothing_reads_is_known_by_name(captured: Captured) -> None:
    model = Normed()
    assert set(unread_state(captured, model)) == {"idle", "mark"}
    assert tied_names(model) == {"head.weight": "layers.0.0.weight"}


class Signs(torch.autograd.Function):
    """A backward of its own, which no tracing of the forward would find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Signs.apply
        return self.last(apply(self.first(x), 0.5))


def test_functions_with_a_backward_of_their_own_keep_it() -> None:
    job, model = job_of(Binary, squares, vectors), Binary()
    captured = capture_program(job)
    chain = Chain(captured, model, [0, *captured.graph.cuts, len(captured.graph.layers)])
    squares(model, job.example_batch(4)).backward()
    chain.loss(job.example_batch(4))
    for name, parameter in model.named_parameters():
        assert torch.allclose(chain.parameters[name].grad, parameter.grad), name
