"""Training alone against plain PyTorch loops written by hand: bit for bit where the arithmetic is the same."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from atoll.data import Shapes, SortedDigits
from atoll.errors import JobError, JobFailedError
from atoll.events import AnyEvent, Evaluated, NonFinite, RunFinished, RunStarted, StepFinished, StopTraining, read_events
from atoll.job import Job, RunResult
from atoll.randomness import mix, own_randomness
from atoll.runtime.supervise.supervisor import Supervisor


def classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(900, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(SortedDigits.vocabulary, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, SortedDigits.vocabulary))


def token_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    source, target = batch
    losses = cross_entropy(model(source).flatten(0, 1), target.flatten(), ignore_index=SortedDigits.padding, reduction="sum")
    return losses, (target != SortedDigits.padding).sum()


JOB = Job(
    model=classifier,
    loss=mean_loss,
    data=Shapes(count=50),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    batch_size=16,
    steps=10,
    micro_batch_size=4,
    max_grad_norm=0.5,
    scheduler=partial(StepLR, step_size=3, gamma=0.5),
    seed=11,
)
TOKENS = Job(
    model=token_model,
    loss=token_loss,
    data=SortedDigits(count=40),
    optimizer=partial(torch.optim.SGD, lr=0.5),
    batch_size=12,
    steps=6,
)


def run(job: Job) -> tuple[RunResult, list[AnyEvent]]:
    events: list[AnyEvent] = []
    return replace(job, callbacks=[*job.callbacks, events.append]).run(progress=False, device="cpu"), events


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def plain_loop() -> tuple[nn.Module, list[float], list[float]]:
    """What one would write without Atoll."""
    with own_randomness(mix(JOB.seed, 0)):
        model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    data, losses, norms = Shapes(count=50), [], []
    for step in range(10):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(4):
            positions = range(16 * step + 4 * micro_batch, 16 * step + 4 * micro_batch + 4)
            chosen = [data[JOB.samples.index(position)] for position in positions]
            loss = cross_entropy(model(torch.stack([image for image, _ in chosen])), torch.stack([label for _, label in chosen])) / 4
            loss.backward()
            total += loss.detach()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        losses.append(float(total))
    return model, losses, norms


def test_equals_a_plain_pytorch_loop_bit_for_bit() -> None:
    model, losses, norms = plain_loop()
    result, events = run(JOB)
    steps = [event for event in events if isinstance(event, StepFinished)]
    assert list(result.losses) == losses
    assert same_weights(result.model, model)
    assert [step.gradient_norm for step in steps] == norms
    assert [step.learning_rate for step in steps] == [0.01] * 3 + [0.005] * 3 + [0.0025] * 3 + [0.00125]


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    with_dropout = replace(JOB, model=lambda: nn.Sequential(nn.Dropout(0.3), classifier()))
    first, again, other = run(with_dropout)[0], run(with_dropout)[0], run(replace(with_dropout, seed=12))[0]
    assert first.losses == again.losses
    assert same_weights(first.model, again.model)
    assert first.losses != other.losses


def test_the_callers_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(replace(JOB, steps=2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("size", [1, 5, 8])
def test_accumulation_does_not_change_the_gradient_of_a_mean(size: int) -> None:
    job = replace(JOB, model=lambda: classifier().double(), loss=lambda m, b: mean_loss(m, (b[0].double(), b[1])))
    whole, parts = run(replace(job, micro_batch_size=None))[0], run(replace(job, micro_batch_size=size))[0]
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)  # summed in float32
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [None, 1, 5, 6])
def test_a_weighted_loss_is_the_total_over_the_weight_of_the_whole_batch(size: int | None) -> None:
    job = replace(TOKENS, model=lambda: token_model().double(), micro_batch_size=size)
    result, events = run(job)
    model, losses, weights = job.build_model(), [], []
    for step in range(6):  # in one shot, with PyTorch's own mean over tokens
        source, target = job.samples.batch(step)
        loss = cross_entropy(model(source).flatten(0, 1), target.flatten(), ignore_index=SortedDigits.padding)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
        losses.append(loss.item())
        weights.append(float((target != SortedDigits.padding).sum()))
    assert result.losses == pytest.approx(losses, rel=1e-6)
    assert [event.weight for event in events if isinstance(event, StepFinished)] == weights
    for a, b in zip(model.parameters(), result.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("job", [JOB, replace(TOKENS, micro_batch_size=3)], ids=["mean", "weighted"])
def test_half_precision_learns_the_same_thing_less_exactly(precision: Any, job: Job) -> None:
    exact, rough = run(job)[0], run(replace(job, precision=precision))
    applied = [event.applied for event in rough[1] if isinstance(event, StepFinished)]
    assert rough[0].losses[0] == pytest.approx(exact.losses[0], rel=0.02)
    assert rough[0].losses != exact.losses
    assert all(applied) or precision == "fp16"
    assert all(parameter.dtype == torch.float32 for parameter in rough[0].model.parameters())


def test_fp16_overflow_skips_the_step_and_says_so() -> None:
    huge = replace(TOKENS, precision="fp16", loss=lambda m, b: token_loss(m, b)[0] * 1e4, steps=2, max_grad_norm=1.0)
    huge = replace(huge, scheduler=partial(StepLR, step_size=1))
    result, events = run(huge)
    steps = [event for event in events if isinstance(event, StepFinished)]
    assert not steps[0].applied
    assert steps[0].gradient_norm is None
    assert steps[1].learning_rate == steps[0].learning_rate
    assert same_weights(result.model, huge.build_model()) == (not steps[1].applied)


def test_a_built_module_is_trained_in_place() -> None:
    model = classifier()
    before = [parameter.clone() for parameter in model.parameters()]
    result, _ = run(replace(JOB, model=model, steps=1))
    assert result.model is model
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_evaluation_is_exact_rare_and_changes_nothing() -> None:
    def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return (model(batch[0]).argmax(-1) == batch[1]).sum().float(), len(batch[1])

    held_out = Shapes(count=23, first=1000)
    job = replace(JOB, eval_data=lambda: held_out, eval_every=4, metrics={"accuracy": accuracy})
    result, events = run(job)
    assert [event.step for event in result.evaluations] == [4, 8, 10]
    assert [event for event in events if isinstance(event, Evaluated)] == list(result.evaluations)
    assert result.losses == run(JOB)[0].losses
    images, labels = (torch.stack(column) for column in zip(*(held_out[i] for i in range(23)), strict=True))
    with torch.no_grad():
        logits = result.model.eval()(images)
    assert result.evaluations[-1].loss == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.evaluations[-1].metrics["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert run(replace(job, metrics={}, eval_loss=accuracy))[0].evaluations[-1].loss == result.evaluations[-1].metrics["accuracy"]


def pad(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1)


def padded_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows.clamp(min=0)).transpose(1, 2), rows, ignore_index=-1)


@pytest.mark.parametrize(("lengths", "dynamic"), [([9, 9, 5, 4, 7, 3], {}), ([9] * 20 + [4] * 6 + [9] * 4, {"": 1})])
def test_evaluation_data_whose_first_samples_are_equally_long(lengths: list[int], dynamic: dict[str, int]) -> None:
    rows = [torch.arange(length) % 5 + length % 3 for length in lengths]
    start = Job(model=token_model, loss=padded_loss, data=rows, optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=4, steps=2)
    result = replace(start, collate_fn=pad, eval_data=rows, dynamic=dynamic).run(progress=False)
    with torch.no_grad():
        expected = padded_loss(result.model.eval(), pad(rows)).item()
    assert result.evaluations[-1].loss == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_that_is_not_finite_or_weighs_nothing(tmp_path: Path) -> None:
    job = replace(JOB, steps=1, eval_data=Shapes(count=4), eval_loss=lambda m, b: mean_loss(m, b) / 0)
    assert job.run(out=tmp_path, progress=False).evaluations[0].loss is None
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")].count("evaluated") == 1
    with pytest.raises(JobError, match=r"of evaluation accuracy add up to 0\.0"):
        run(replace(job, metrics={"accuracy": lambda m, b: (mean_loss(m, b), 0)}))


def test_events_tell_the_whole_story_on_disk_too(tmp_path: Path) -> None:
    seen: list[AnyEvent] = []
    result = replace(JOB, steps=3, callbacks=[seen.append], name="story").run(out=tmp_path / "run", progress=False)
    assert list(read_events(tmp_path / "run" / "events.jsonl")) == seen
    assert [event.kind for event in seen] == ["run_started", *["step_finished"] * 3, "checkpoint_saved", "run_finished"]
    started, *steps, _, finished = seen
    assert isinstance(started, RunStarted)
    assert started.name == "story"
    assert started.parameters == sum(parameter.numel() for parameter in result.model.parameters())
    assert [step.loss for step in steps if isinstance(step, StepFinished)] == list(result.losses)
    assert isinstance(finished, RunFinished)
    assert (finished.reason, finished.steps, finished.samples) == ("done", 3, 48)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_weights_before_it() -> None:
    def spoil(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return mean_loss(model, batch) * (float("nan") if len(events) > 2 else 1.0)  # from the third step on, after a start and two steps

    events: list[AnyEvent] = []
    model = JOB.build_model()
    with pytest.raises(JobError, match="step 3: the loss is nan; the weights are still those after step 2"):
        replace(JOB, model=model, loss=spoil, callbacks=[events.append]).run(progress=False)
    assert isinstance(events[-2], NonFinite)
    assert (events[-2].step, events[-2].what, events[-2].value) == (3, "loss", "nan")
    assert isinstance(events[-1], RunFinished)
    assert events[-1].reason == "failed"
    assert same_weights(model, run(replace(JOB, steps=2))[0].model)


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    def spoil(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return mean_loss(model, batch) + (next(model.parameters()) * 0).abs().sqrt().sum()  # gradient of √ at 0: infinite · 0

    with pytest.raises(JobError, match="step 1: the gradient is nan"):
        run(replace(JOB, loss=spoil))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_what_launchers_send_end_it_after_the_step(number: signal.Signals) -> None:
    def press(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result, events = run(replace(JOB, callbacks=[press]))
    assert result.reason == "interrupted"
    assert len(result.losses) in (2, 3)
    assert isinstance(events[-1], RunFinished)
    assert events[-1].reason == "interrupted"
    assert signal.getsignal(number) is before


def test_ctrl_c_during_the_last_step_leaves_nothing_to_go_on_with() -> None:
    def press(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == JOB.total_steps:
            signal.raise_signal(signal.SIGINT)

    result, events = run(replace(JOB, callbacks=[press]))
    assert isinstance(events[-1], RunFinished)
    assert (result.reason, events[-1].reason, len(result.losses)) == ("done", "done", JOB.total_steps)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under `nohup`: the run goes on when the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result, _ = run(replace(JOB, callbacks=[lambda event: signal.raise_signal(signal.SIGHUP)]))
        assert result.reason == "done"
        with Supervisor().obeying_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    def press(event: AnyEvent) -> None:
        if isinstance(event, StepFinished):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(replace(JOB, callbacks=[press]))


def test_a_callback_can_stop_the_run_and_others_still_hear_of_the_step() -> None:
    def enough(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            raise StopTraining

    result, events = run(replace(JOB, callbacks=[enough]))
    assert result.reason == "stopped"
    assert [event.step for event in events if isinstance(event, StepFinished)] == [1, 2]


def test_a_callback_that_fails_fails_the_run_with_its_own_error(tmp_path: Path) -> None:
    def broken(event: AnyEvent) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(
        JobFailedError, match=r"(?s)step 0: .*broken, told of run_started, failed: ZeroDivisionError: mine\n.*in broken: raise Zero"
    ):
        replace(JOB, callbacks=[broken]).run(out=tmp_path, progress=False)
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")] == ["run_started", "run_finished"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": lambda m, b: m(b[0])}, r"loss: it must return one number, it returned shape \[4, 4\]"),
        ({"loss": lambda m, b: 3.0}, r"loss: it must return a tensor or \(total, weight\), it returned float 3\.0"),
        ({"loss": lambda m, b: mean_loss(m, b).detach()}, "no gradient flows"),
        ({"loss": lambda m, b: (mean_loss(m, b), 0)}, r"of step 1 add up to 0\.0"),
        ({"loss": lambda m, b: (mean_loss(m, b), "many")}, "the weight in .* must be a number, it is str 'many'"),
        ({"loss": lambda m, b: (mean_loss(m, b), torch.ones(2))}, r"must be one number, its shape is \[2\]"),
        ({"model": lambda: 3}, "model: the callable must return a torch.nn.Module, it returned int 3"),
        ({"model": nn.ReLU}, "it has no trainable parameter"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS computes the loss itself, .* such as torch.optim.AdamW"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=-1)}, "Job: optimizer: making it failed: ValueError: Invalid learning rate: -1"),
        ({"scheduler": lambda o: OneCycleLR(o, 1.0, total_steps=5)}, "OneCycleLR ends after 5 steps and the job has 10; make them equal"),
        ({"scheduler": lambda o: OneCycleLR(o, 1.0)}, "Job: scheduler: making it failed: ValueError"),
        ({"scheduler": ReduceLROnPlateau}, "ReduceLROnPlateau is told the loss of evaluations; give eval_data"),
        ({"data": lambda: [][0]}, "Job: data: building it failed: IndexError"),
        ({"model": lambda: nn.Linear("a", 1)}, "Job: model: building it failed: TypeError"),
        ({"loss": lambda m, b: mean_loss(m, b) * 1j}, "loss: it must return a floating-point number, it returned torch.complex64"),
        ({"optimizer": list}, "optimizer: the callable must return a torch.optim.Optimizer, it returned list"),
        ({"scheduler": id}, "scheduler: the callable must return a learning-rate scheduler, it returned int"),
        ({"data": lambda: 3}, "data: the callable must return data with __len__ and __getitem__ or with __iter__, it returned int 3"),
        ({"data": []}, "data: it is empty"),
    ],
)
def test_what_callables_return_wrongly_is_explained(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        run(replace(JOB, **change))


def test_a_schedule_as_long_as_the_job_is_long_enough() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, 0.1, total_steps=10)

    assert run(replace(JOB, scheduler=one_cycle))[0].reason == "done"


def test_a_device_that_is_not_there_is_explained() -> None:
    with pytest.raises(JobError, match="device 'gpu' is not one PyTorch knows"):
        JOB.run(device="gpu", progress=False)
    if not torch.cuda.is_available():
        with pytest.raises(JobError, match="device 'cuda' cannot be used here"):
            JOB.run(device="cuda", progress=False)


def test_a_schedule_may_be_any_pytorch_schedule() -> None:
    warm_up = replace(JOB, scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)))
    rates = [event.learning_rate for event in run(warm_up)[1] if isinstance(event, StepFinished)]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008] + [0.01] * 6)
