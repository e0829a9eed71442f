"""A worker's arithmetic under the real protocol: what a swarm trains equals plain PyTorch, whoever computed what."""

import asyncio
import math
import threading
from contextlib import closing
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import Job
from atoll.control.messages import Committed, Run
from atoll.errors import AtollError, JobError
from atoll.events import AnyEvent, Compiled, StepFinished
from atoll.graph.capture import capture_program
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute, _norm_squared, programs_of, tied_parameters
from atoll.runtime.modes.swarm.member_process import check_divisible
from atoll.runtime.modes.swarm.staleness import check_rebindable
from atoll.runtime.stage.compilation import Compiler

from .one_process import OneProcess

STEPS, BATCH = 6, 12
BOUNDS = [0, 2, 3, 5]


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randint(0, 5, (), generator=generator)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": Model,
        "loss": loss,
        "data": Data(),
        "optimizer": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
        "batch_size": BATCH,
        "steps": STEPS,
    }
    return Job(**{**settings, **changes})


def plain(job: Job, staleness: int = 0, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """By hand, in plain PyTorch; the job is asked only for what the user gave it, and for the order of the data."""
    model = job.build_model("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    losses, history = [], []
    for step in range(steps):
        history.append(deepcopy(model))
        seen = history[max(0, step - staleness)]
        value: Any = job.loss(seen, job.samples.batch(step))
        seen.zero_grad()
        value.backward()
        for parameter, other in zip(model.parameters(), seen.parameters(), strict=True):
            parameter.grad = None if other.grad is None else other.grad.clone()
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, model.state_dict()


class Spoilt(Data):
    """One sample of the fourth step is not a number."""

    spoilt = -1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs * float("nan") if index == self.spoilt else inputs, label


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loss_that_is_not_a_number_ends_the_run_with_the_weights_before_it(staleness: int) -> None:
    data = Spoilt()
    it = job(data=data)
    data.spoilt = next(index for index in range(len(data)) if _in_batch(it, data, index, 3))
    expected = plain(job(), staleness, steps=3)[1]
    swarm = OneProcess(it, BOUNDS, 4, 4, staleness=staleness, skips_overflows=False)
    asyncio.run(swarm.run())
    assert swarm.coordinator is not None
    refused = swarm.coordinator.refused
    assert refused is not None
    assert (refused.step, refused.what, refused.value, swarm.coordinator.version) == (4, "loss", "nan", 3)
    assert all(math.isfinite(record.loss) for record in swarm.journal.records if isinstance(record, Committed))
    stored = [swarm.checkpoints.stored[0, 3, stage] for stage in range(3)]
    assert len(stored) == 3
    for worker in swarm.workers.values():
        if worker.version == 3:
            for name, parameter in worker.state.module.parameters_by_name().items():
                torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def _in_batch(it: Job, data: Spoilt, index: int, step: int) -> bool:
    data.spoilt = index
    return bool(torch.isnan(it.samples.batch(step)[0]).any()) and not any(torch.isnan(it.samples.batch(s)[0]).any() for s in range(step))


def swarm_losses(swarm: OneProcess) -> list[float]:
    commits = {record.version: record for record in swarm.journal.records if type(record).__name__ == "Committed"}
    return [commits[version].loss / commits[version].weight for version in range(STEPS)]  # type: ignore[union-attr]


def check(swarm: OneProcess, expected: tuple[list[float], dict[str, Tensor]], untrained: tuple[str, ...] = ("unused",)) -> None:
    torch.testing.assert_close(torch.tensor(swarm_losses(swarm)), torch.tensor(expected[0]), rtol=1e-5, atol=1e-7)
    seen = set()
    for worker in swarm.workers.values():
        if worker.version == STEPS:
            for name, parameter in worker.state.module.parameters_by_name().items():
                torch.testing.assert_close(parameter.detach(), expected[1][name], rtol=1e-5, atol=1e-6)
                seen.add(name)
    assert seen == {name for name in expected[1] if not name.startswith(untrained)}


@pytest.mark.parametrize(("workers", "chunks", "clip"), [(3, 1, None), (5, 4, 0.05)])
def test_a_swarm_equals_plain_pytorch(workers: int, chunks: int, clip: float | None) -> None:
    it = job(max_grad_norm=clip)
    swarm = OneProcess(it, [0, 1, 3, 5], workers, 4, chunks=chunks, max_norm=clip)
    asyncio.run(swarm.run())
    check(swarm, plain(it))


def test_compiled_stages_train_the_same() -> None:
    """Four samples and then five are in a micro-batch; weights and statistics are not those that compiling left."""
    it = job(batch_size=9)
    with closing(Compiler({"backend": "eager"})) as compiler:
        swarm = OneProcess(it, [0, 2, 5], 2, 5, compiler=compiler)
        asyncio.run(swarm.run())
        (told,) = compiler.take("w")
    check(swarm, plain(it))
    assert isinstance(told, Compiled)


@pytest.mark.parametrize(("staleness", "recompute"), [(0, ()), (1, ()), (1, (True, True))])
def test_killed_and_joining_workers_change_nothing(staleness: int, recompute: tuple[bool, ...]) -> None:
    it = job()
    swarm = OneProcess(it, [0, 2, 5], 4, 3, recompute=recompute, chunks=3, checkpoint_every=2, lost_seconds=2.0, staleness=staleness)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            victim = next(name for name, worker in swarm.workers.items() if worker.stage == 0)
            asyncio.get_running_loop().create_task(swarm.kill(victim))
            swarm.add_worker("late")

    asyncio.run(swarm.run(disturb))
    check(swarm, plain(it, staleness))


def several_losses(model: nn.Module, batch: Any) -> Tensor:
    """Means over different samples, and a sum."""
    logits, labels = model(batch[0]), batch[1]
    first = nn.functional.cross_entropy(logits, labels.masked_fill(labels == 0, -100))
    second = nn.functional.cross_entropy(-logits, labels.masked_fill(labels > 2, -100))
    return first + 0.3 * second + 0.01 * logits.pow(2).sum()


def test_every_term_of_a_loss_has_its_own_weight_in_the_batch() -> None:
    it = job(loss=several_losses)
    swarm = OneProcess(it, [0, 1, 3, 5], 4, 3, staleness=1)
    asyncio.run(swarm.run())
    check(swarm, plain(it, staleness=1))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_with_staleness_gradients_are_those_of_the_weights_one_step_before(clip: float | None) -> None:
    it = job(max_grad_norm=clip)
    swarm = OneProcess(it, [0, 1, 3, 5], 5, 4, chunks=4, max_norm=clip, staleness=1)
    overlapped: set[int] = set()

    def look(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and swarm.coordinator is not None and type(swarm.coordinator.phase) is Run:
            overlapped.add(event.step)

    asyncio.run(swarm.run(look))
    check(swarm, plain(it, staleness=1))
    assert overlapped, "no step was begun before the one before it was summed"
    assert swarm_losses(swarm) != pytest.approx(plain(it)[0], rel=1e-4)


class Hoarder(torch.optim.SGD):
    """Keeps its parameters where only it knows."""

    def __init__(self, params: Any, lr: float) -> None:
        self.mine = list(params)
        super().__init__(self.mine, lr)


class Wrapper(torch.optim.Optimizer):
    """Another optimizer does the work, with the same groups."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.AdamW(params, lr)
        super().__init__(self.inner.param_groups, {})


class Nested(Hoarder):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.mine = [[[parameter]] for parameter in self.mine]


@pytest.mark.parametrize("kind", [Wrapper, Nested])
def test_parameters_are_found_wherever_an_optimizer_keeps_them(kind: Any) -> None:
    with pytest.raises(JobError, match=f"{kind.__name__} keeps its parameters in `(inner|mine)`"):
        check_rebindable(kind([nn.Parameter(torch.zeros(1))], 0.1))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_common_optimizers_are_not_refused(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    check_rebindable(optimizer)


def test_a_loss_scale_is_both_where_there_was_no_staleness_before() -> None:
    it = job(precision="fp16")
    common: Any = {"chunks": 1, "micro_batches": [(0, BATCH)], "generators": threading.Lock()}
    captured = capture_program(it)
    without, with_staleness = (StageCompute(DividedJob(it, captured, (0, 5), staleness=staleness, **common)) for staleness in (0, 1))

    async def carried_over() -> list[float]:
        state = await without.initial(0)
        state.executor.scale.value = 1024.0
        found = await with_staleness.restore(0, without.snapshot(state))
        return [found.executor.scale.value, with_staleness.delayed(found).executor.scale.value]

    assert asyncio.run(carried_over()) == [1024.0, 1024.0]
    without.close()
    with_staleness.close()


@pytest.mark.parametrize("expected", [(), (1,), (0, 1), (1, 0)])
def test_a_state_is_what_was_sent_whatever_was_expected(expected: tuple[int, ...]) -> None:
    it = job()
    captured = capture_program(it)
    common: Any = {"chunks": 3, "micro_batches": [(0, BATCH)], "generators": threading.Lock()}
    donor, joiner = (StageCompute(DividedJob(it, captured, (0, 2, 5), **common)) for _ in range(2))

    async def fetched() -> tuple[Tensor, Tensor]:
        state = await donor.initial(1)
        with torch.no_grad():
            for parameter in state.parameters:
                parameter += 1.0
        for stage in expected:
            joiner.expect(stage)
        found = await joiner.assemble(1, [donor.read_chunk(state, chunk) for chunk in range(3)])
        return donor.snapshot(state), joiner.snapshot(found)

    assert torch.equal(*asyncio.run(fetched()))
    donor.close()
    joiner.close()


def test_an_optimizer_that_would_be_left_behind_is_refused() -> None:
    swarm = OneProcess(job(optimizer=partial(Hoarder, lr=0.1)), [0, 2, 5], 2, 3, staleness=1)
    with pytest.raises(JobError, match="Hoarder keeps its parameters in `mine`"):
        asyncio.run(swarm.run())


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3e-20, 0.0])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 50_000])
def test_the_norm_is_that_in_double_precision_whatever_the_size_of_its_values(size: int, scale: float) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale
    expected = float((values.double() ** 2).sum())
    assert _norm_squared(values) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_of_what_is_not_finite_is_not(value: float) -> None:
    values = torch.ones(10_000)
    values[5000] = value
    assert not math.isfinite(_norm_squared(values))


class Tied(nn.Module):
    """The first and the last layer use one parameter; so do two in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 6)
        self.last.weight = nn.Parameter(torch.randn(6, 16) / 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].bias = self.blocks[0][0].bias  # type: ignore[index, union-attr, assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.last.weight + self.first.bias
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("staleness", "clip"), [(0, 0.05), (1, None)])
def test_parameters_that_several_stages_use_are_trained_by_all_of_them(staleness: int, clip: float | None) -> None:
    it = job(model=Tied, max_grad_norm=clip)
    captured = capture_program(it)
    layers = len(captured.graph.layers)
    tied = tied_parameters(programs_of(captured, BOUNDS))
    assert (BOUNDS[-1], tied) == (layers, {(0, 2): {"last.weight", "blocks.0.0.bias"}})
    swarm = OneProcess(it, BOUNDS, 5, 4, chunks=3, max_norm=clip, staleness=staleness, tied=tuple(tied))
    asyncio.run(swarm.run())
    check(swarm, plain(it, staleness), untrained=("first.weight", "blocks.2.0.bias"))


def steep_loss(model: nn.Module, batch: Any) -> Tensor:
    return 8 * loss(model, batch)


def test_fp16_scales_losses_and_skips_overflows_as_one_process_does() -> None:
    """The first scales are too large for this loss: steps are skipped until one fits."""
    it = job(loss=steep_loss, precision="fp16", max_grad_norm=1.0)
    model = it.build_model("cpu")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3), torch.amp.GradScaler("cpu")
    losses, skipped = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch, value = it.samples.batch(step), torch.zeros(())
        for start in range(0, BATCH, 4):
            with torch.autocast("cpu", torch.float16):
                share = steep_loss(model, [each[start : start + 4] for each in batch]) * 4 / BATCH
            scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            value += share.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(value))
        skipped.append(scaler.get_scale() < before)
    assert any(skipped)
    assert not all(skipped)
    swarm = OneProcess(it, [0, 1, 3, 5], 4, 4, chunks=2, max_norm=1.0)
    asyncio.run(swarm.run())
    assert [record.skipped for record in swarm.journal.records if type(record).__name__ == "Committed"] == skipped  # type: ignore[union-attr]
    torch.testing.assert_close(torch.tensor(swarm_losses(swarm)), torch.tensor(losses), rtol=1e-2, atol=1e-2)


class Normalised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def test_a_layer_that_changes_buffers_while_computing_is_refused() -> None:
    captured = capture_program(job(model=Normalised))
    with pytest.raises(AtollError, match=r"the buffer 'norm\.\w+' is changed by computing"):
        check_divisible(captured, (0, len(captured.graph.layers)))
