"""Alone: the job on one device of this machine — the reference every distributed mode is compared with.

The loop is what one would write by hand: gradients accumulated over micro-batches, clipped, applied, the schedule advanced. What surrounds
it — events, evaluation, a polite Ctrl-C — never changes a number.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from atoll.blame import users_code
from atoll.cluster.memory import keep_freed_memory
from atoll.data import Dataset, to_device
from atoll.errors import JobError, JobFailedError
from atoll.events import AnyEvent, Evaluated, NonFinite, Observer, RunFinished, RunStarted, StepFinished, StopTraining
from atoll.job import Job, LossFunction, LossValue, RunResult, read_loss
from atoll.randomness import mix, own_randomness, seed_everything
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.refusing import checked_weight, not_finite
from atoll.runtime.stage.drawing import DrawKey, EagerDraws

__all__ = ["evaluate", "train_alone"]

_Reason = Literal["done", "stopped", "interrupted"]


def train_alone(job: Job, *, device: torch.device, observers: Sequence[Observer]) -> RunResult:
    """Train the job on one device and tell the observers what happens.

    Whatever ends the run — the last step, Ctrl-C, `StopTraining`, a loss that is not finite — the weights are those after a whole step.
    """
    if device.type == "cpu":
        keep_freed_memory()
    with own_randomness(mix(job.seed, 4)), _polite_interrupt() as interrupt:
        trainer = _Trainer(job, device, observers)
        try:
            reason = trainer.train(interrupt)
        except BaseException as error:
            with suppress(Exception):  # an observer that failed may fail again; the first error is the one to show
                trainer.finish("failed", f"{type(error).__name__}: {error}")
            raise
        trainer.finish(reason, "")
    return RunResult(
        reason=reason,
        losses=tuple(trainer.losses),
        evaluations=tuple(trainer.evaluations),
        seconds=trainer.elapsed(),
        model=trainer.model,
        optimizer=trainer.optimizer,
    )


class _Trainer:
    """A run under way: model, optimizer and what has been seen so far."""

    def __init__(self, job: Job, device: torch.device, observers: Sequence[Observer]) -> None:
        self.job, self.device, self.observers = job, device, observers
        self.began = time.perf_counter()
        self.steps = job.total_steps
        self.data_length = job.samples.length
        self.model = _on_device(job, device)
        self.optimizer = job.build_optimizer(self.model.parameters())
        self.parameters: list[nn.Parameter] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scheduler = job.build_scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
        self.random = True  # until a forward has shown that it draws no random numbers
        self.losses: list[float] = []
        self.evaluations: list[Evaluated] = []

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def emit(self, event: AnyEvent) -> None:
        """Tell every observer, even after one of them asked to stop."""
        stop: StopTraining | None = None
        for observer in self.observers:
            with users_code(f"step {len(self.losses)}: {_name_of(observer)}, told of {event.kind},", JobFailedError):
                try:
                    observer(event)
                except StopTraining as request:
                    stop = request
        if stop is not None:
            raise stop

    def train(self, interrupt: threading.Event) -> _Reason:
        """All steps, and the evaluations between them."""
        try:
            self.emit(self._started())
            for step in range(1, self.steps + 1):
                self.emit(self._step(step))
                self._evaluate_when_due(step)
                if interrupt.is_set():
                    return "interrupted"
        except StopTraining:
            return "stopped"
        return "done"

    def finish(self, reason: _Reason | Literal["failed"], message: str) -> None:
        with suppress(StopTraining):  # there is nothing left to stop
            self.emit(
                RunFinished(
                    at_seconds=self.elapsed(),
                    reason=reason,
                    steps=len(self.losses),
                    samples=len(self.losses) * self.job.batch_size,
                    seconds=self.elapsed(),
                    loss=self.losses[-1] if self.losses else None,
                    message=message,
                )
            )

    def _started(self) -> RunStarted:
        return RunStarted(
            at_seconds=self.elapsed(),
            name=self.job.name,
            mode="alone",
            steps=self.steps,
            batch_size=self.job.batch_size,
            samples=self.data_length,
            parameters=sum(parameter.numel() for parameter in self.parameters),
            devices=(str(self.device),),
            precision=self.job.precision,
            seed=self.job.seed,
            unix_seconds=time.time(),
        )

    def _step(self, step: int) -> StepFinished:
        """One step of the optimizer on one global batch. Nothing is applied unless loss and gradient are finite."""
        began = time.perf_counter()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad()
        loss, weight = self._accumulate_gradient(step)
        gradient_norm = self._clip(step)
        applied = self._apply()
        self.losses.append(loss)
        return StepFinished(
            at_seconds=self.elapsed(),
            step=step,
            loss=loss,
            samples=self.job.batch_size,
            weight=weight,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            memory_bytes=peak_memory_bytes(self.device),
            applied=applied,
        )

    def _accumulate_gradient(self, step: int) -> tuple[float, float]:
        """The gradient of the global batch's loss, left in `.grad`; returns the loss and what it was divided by."""
        parts = self.job.micro_batches
        total = torch.zeros((), device=self.device)
        weight = torch.zeros((), device=self.device, dtype=torch.float64)
        deferred = False
        for number, (start, stop) in enumerate(parts):
            value = self._forward(step, number, start, stop)
            share, deferred = _share(value, samples=stop - start, batch_size=self.job.batch_size, alone=len(parts) == 1)
            with users_code(f"step {step}: backward", JobFailedError):
                self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            total += share.detach()
            weight += (stop - start) if value.weight is None else value.weight
        divisor = checked_weight(f"step {step}", float(weight))
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if deferred:
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
        loss = float(total) / (divisor if deferred else 1.0)
        if not math.isfinite(loss):
            self._not_finite(step, "loss", loss)
        return loss, divisor

    def _forward(self, step: int, number: int, start: int, stop: int) -> LossValue:
        with users_code(f"step {step}: loading the batch", JobFailedError):
            batch = to_device(self.job.samples.batch(step - 1, start, stop), self.device)
        seed_everything(mix(self.job.seed, 5, step, number), devices=self.device.type != "cpu")
        with self.job.autocast(self.device), users_code(f"step {step}: the loss", JobFailedError), self._draws(step, start):
            value = read_loss(self.job.loss(self.model, batch))
        if not value.value.requires_grad:
            raise JobError("Job: loss: no gradient flows from it to the model; is it computed under no_grad, or detached?")
        return value

    @contextmanager
    def _draws(self, step: int, first_sample: int) -> Iterator[None]:
        """Random calls of the forward are seeded one by one, as distributed modes do; a model that makes none at first is left alone."""
        if not self.random:
            yield
            return
        key = DrawKey(self.job.seed)
        key.step, key.first_sample = step, first_sample
        with EagerDraws(key) as draws:
            yield
        self.random = draws.count > 0

    def _clip(self, step: int) -> float | None:
        if self.job.max_grad_norm is None:
            return None
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.job.max_grad_norm))
        if math.isfinite(norm):
            return norm
        if not self.scaler.is_enabled():  # in fp16 overflow is ordinary: the scaler skips the step
            self._not_finite(step, "gradient", norm)
        return None

    def _apply(self) -> bool:
        """Step the optimizer and the schedule; False when fp16 overflowed and neither moved."""
        step = len(self.losses) + 1
        scale = self.scaler.get_scale()
        with users_code(f"step {step}: the optimizer", JobFailedError):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        applied = self.scaler.get_scale() >= scale
        if applied and self.scheduler is not None:
            with users_code(f"step {step} of {self.steps}: the learning-rate schedule", JobFailedError):
                self.scheduler.step()
        return applied

    def _not_finite(self, step: int, what: Literal["loss", "gradient"], value: float) -> None:
        self.emit(NonFinite(at_seconds=self.elapsed(), step=step, what=what, value=str(value)))
        raise not_finite(step, what, value)

    def _evaluate_when_due(self, step: int) -> None:
        dataset, every = self.job.eval_dataset, self.job.eval_every
        if dataset is not None and (step == self.steps or (every is not None and step % every == 0)):
            self.evaluations.append(self._evaluate(step, dataset))
            self.emit(self.evaluations[-1])

    def _evaluate(self, step: int, dataset: Dataset) -> Evaluated:
        return msgspec.structs.replace(evaluate(self.job, self.model, self.device, step, dataset), at_seconds=self.elapsed())


@torch.no_grad()
def evaluate(job: Job, model: nn.Module, device: torch.device, step: int, dataset: Dataset) -> Evaluated:
    """The losses and metrics of a model after `step` steps. It is in training mode afterwards; `at_seconds` is the caller's to set."""
    began = time.perf_counter()
    functions: dict[str, LossFunction] = {"": job.eval_loss or job.loss, **job.metrics}
    sums = {name: [0.0, 0.0] for name in functions}
    size = job.micro_batch_size or job.batch_size
    with users_code(f"evaluation after step {step}: the length of eval_data", JobFailedError):
        length = len(dataset)
    model.eval()
    for start in range(0, length, size):
        indices = range(start, min(start + size, length))
        with users_code(f"evaluation after step {step}: loading samples {indices[0]} to {indices[-1]}", JobFailedError):
            batch = to_device(job.collate([dataset[i] for i in indices]), device)
        for name, function in functions.items():
            value, weight = _measured(job, model, device, step, name, function, batch)
            amount = len(indices) if weight is None else float(weight)
            sums[name][0] += float(value) * (amount if weight is None else 1.0)
            sums[name][1] += amount
    model.train()
    means = {name: _finite(total / checked_weight(f"evaluation {name}".strip(), amount)) for name, (total, amount) in sums.items()}
    loss = means.pop("")
    return Evaluated(at_seconds=0.0, step=step, loss=loss, metrics=means, samples=length, seconds=time.perf_counter() - began)


def _measured(job: Job, model: nn.Module, device: torch.device, step: int, name: str, function: LossFunction, batch: Any) -> LossValue:
    """What the evaluation loss (its name is empty) or a metric says of a batch; here a plain number will do."""
    known = f"metrics[{name!r}]" if name else "eval_loss" if job.eval_loss else "loss"
    with job.autocast(device), users_code(f"evaluation after step {step}: {known}", JobFailedError):
        result: object = function(model, batch)
    return read_loss(torch.tensor(float(result)) if isinstance(result, (int, float)) else result, known)


def _share(value: LossValue, *, samples: int, batch_size: int, alone: bool) -> tuple[Tensor, bool]:
    """What to differentiate for one micro-batch, and whether gradients are still to be divided by the batch's weight.

    A mean over samples knows its share of the global batch beforehand. The weight of a batch is known only after its last micro-batch, so
    totals are differentiated as they are and the sum of their gradients is divided once.
    """
    if value.weight is None:
        return (value.value if alone else value.value * (samples / batch_size)), False
    return (value.value / value.weight, False) if alone else (value.value, True)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _on_device(job: Job, device: torch.device) -> nn.Module:
    try:
        return job.build_model(device)
    except (RuntimeError, AssertionError) as error:
        if "out of memory" in str(error):
            raise JobError(f"run: the model does not fit on '{device}': {error}") from error
        raise JobError(f"run: device '{device}' cannot be used here: {error}") from error


def _name_of(observer: object) -> str:
    return str(getattr(observer, "__qualname__", None) or type(observer).__name__)


@contextmanager
def _polite_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that the step under way can end; the second interrupts as usual."""
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread can listen for signals
        return

    def remember(number: int, frame: object) -> None:
        interrupt.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
