"""`torch.compile` of stages: the numbers of the uncompiled run, random ones included, and what cannot be is told in a sentence."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll import Job
from atoll.errors import JobError
from atoll.events import AnyEvent, Compiled, Warned
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.executor import Accumulated
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.rng import DrawKey
from tests.runtime.stage.stage_chain import Chain, job_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")]
SIZES = (3, 5)


class Model(nn.Module):
    """Draws in three ways: dropout, on a transposed tensor too, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.norm(self.first(x)).transpose(0, 1), 0.3, self.training).transpose(0, 1)
        heads = x.view(-1, 2, 2, 2)
        x = x + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4 if self.training else 0.0).reshape(-1, 8)
        return self.last(functional.dropout(x, 0.2, self.training))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_program(job_of(Model, loss, lambda samples: torch.randn(samples, 4)))


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    with closing(Compiler({"backend": "aot_eager"})) as compiler:
        yield compiler


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_stage_computes_what_it_did(captured: Captured, compiler: Compiler, recompute: bool) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        bounds = [0, len(captured.graph.layers)]
        chain = Chain(captured, Model(), bounds, recompute=recompute, gradients=Accumulated(8), key=DrawKey(2**64 - 3))
        if compiled:
            chain.modules[0].compile_with(compiler)
        generator = torch.Generator().manual_seed(1)
        totals = [chain.forward(number, torch.randn(size, 4, generator=generator), size) for number, size in enumerate(SIZES)]
        for number, size in enumerate(SIZES):
            chain.backward(number, size)
        gradients = [parameter.grad for parameter in chain.parameters.values()]
        found.append([*totals, *gradients, *chain.modules[0].buffers_by_name().values()])
    for plain, other in zip(*found, strict=True):
        assert isinstance(plain, Tensor)
        assert torch.allclose(plain, other, rtol=1e-6, atol=1e-7)
    (told,) = compiler.take("rank 3")
    assert isinstance(told, Compiled)
    assert told.seconds > 0
    assert told.source == "rank 3"
    assert told.graph_breaks > 0, "attention draws between compiled pieces"
    assert compiler.take() == []


def job(**given: Any) -> Job:
    data = [torch.randn(4, generator=torch.Generator().manual_seed(index)) for index in range(24)]
    settings: dict[str, Any] = {"model": Model, "loss": loss, "data": data, "batch_size": 8, "steps": 3, "eval_data": data[:5]}
    return Job(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), **settings | given)


def trained(it: Job) -> tuple[list[float], list[AnyEvent]]:
    """Losses of the steps, then of the evaluation at the end; and the events."""
    torch.compiler.reset()
    events: list[AnyEvent] = []
    result = dataclasses.replace(it, callbacks=[events.append]).run(progress=False)
    return [*result.losses, *(event.loss or 0.0 for event in result.evaluations)], events


def test_one_process_trains_the_same_compiled() -> None:
    losses, events = trained(job(compile={"backend": "aot_eager"}))
    assert losses == pytest.approx(trained(job())[0], rel=1e-5)
    assert sum(event.graphs for event in events if isinstance(event, Compiled)) > 2
    assert not any(isinstance(event, Warned) for event in events)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))


def test_the_inductor_draws_the_same_numbers() -> None:
    losses, events = trained(job(compile=True, model=small, eval_data=None))
    assert losses == pytest.approx(trained(job(model=small, eval_data=None))[0], rel=1e-5)
    assert [event.graph_breaks for event in events if isinstance(event, Compiled)] == [0], "dropout is compiled along"


def test_terms_of_a_loss_are_compiled_too() -> None:
    def two(model: nn.Module, batch: Tensor) -> Tensor:
        labels = torch.where(batch[:, 0] > 0, 0, -100)
        return functional.cross_entropy(model(batch), labels) + model.get_parameter("last.weight").square().sum()

    it = job(loss=two, micro_batch_size=4, model=lambda: nn.ModuleDict({"last": nn.Linear(4, 3)}))
    it = dataclasses.replace(it, loss=lambda model, batch: two(_Called(model), batch))
    losses, events = trained(dataclasses.replace(it, compile={"backend": "aot_eager"}))
    assert losses == pytest.approx(trained(it)[0], rel=1e-6)
    assert any(isinstance(event, Compiled) for event in events)


class _Called:
    def __init__(self, model: Any) -> None:
        self._model, self.get_parameter = model, model.get_parameter

    def __call__(self, x: Tensor) -> Any:
        return self._model["last"](x)


def test_what_differs_too_often_is_told_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    data = [torch.full((index + 2, 4), 0.5) for index in range(12)]
    given = {"data": data, "batch_size": 1, "steps": 12, "eval_data": None, "model": partial(nn.Linear, 4, 3)}
    it = job(collate_fn=lambda samples: samples[0], compile={"backend": "eager", "dynamic": False}, **given)
    losses, events = trained(it)
    assert losses == pytest.approx(trained(dataclasses.replace(it, compile=False))[0], rel=1e-6)
    (warned,) = [event for event in events if isinstance(event, Warned)]
    assert "was compiled 8 times" in warned.message
    assert "compile={'dynamic': True}" in warned.message
    assert "torch._dynamo hit" not in capfd.readouterr().err


def test_where_nothing_can_compile_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="there is no backend 'fast'"):
        job(compile={"backend": "fast"}).run(progress=False)
    with pytest.raises(JobError, match="compile: takes backend, mode, options, dynamic"):
        job(compile={"fullgraph": True})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JobError, match=r"needs a C\+\+ compiler, and there is no g\+\+ here; install one"):
        job(compile=True).run(progress=False)


class Parts(nn.Module):
    """Of what these make only two are differentiated afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.randn(4, 4) for name in ("carry", "gate", "teacher", "score", "copied", "region")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = {name: functional.dropout(x @ part, 0.3) for name, part in self.parts.items()}
        written = torch.zeros_like(x)
        written[:, 1:] = made["copied"][:, 1:]
        under = torch.zeros_like(x)
        most = under[:, 1:]
        with torch.autocast("cpu", enabled=False):
            most += made["region"][:, 1:]
        return made | {"copied": written, "region": under}


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, made: dict[str, Tensor]) -> Tensor:
        carried = made["carry"] * self.weight
        with torch.no_grad():
            score = made["score"].softmax(-1)
        return carried * (made["gate"] > 0) + made["teacher"].detach() + score + made["copied"] + made["region"]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_not_differentiated_has_no_gradient_and_so_no_weight_decay(compiled: bool, cut: bool, compiler: Compiler) -> None:
    given = capture_program(job_of(lambda: nn.Sequential(Parts(), Uses()), loss, lambda samples: torch.randn(samples, 4)))
    layers = len(given.graph.layers)
    chain = Chain(given, nn.Sequential(Parts(), Uses()), [0, layers - 1, layers] if cut else [0, layers], gradients=Accumulated(8))
    for module in chain.modules if compiled else []:
        module.compile_with(compiler)
    chain.forward(0, torch.randn(3, 4), 3)
    chain.backward(0, 3)
    without = {name.rpartition(".")[2] for name, parameter in chain.parameters.items() if parameter.grad is None}
    assert without == {"gate", "teacher", "score"}
