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
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from atoll.blame import users_code
from atoll.cluster.memory import keep_freed_memory
from atoll.data import Batch, Dataset, to_device
from atoll.errors import CheckpointError, JobError, JobFailedError
from atoll.events import (
    AnyEvent,
    CheckpointBegun,
    Evaluated,
    NonFinite,
    Observer,
    RunFinished,
    RunStarted,
    StepFinished,
    StopTraining,
    Warned,
)
from atoll.job import Job, LossValue, RunResult, read_loss
from atoll.plan.modes.alone import ALONE
from atoll.randomness import mix, own_randomness, seed_everything
from atoll.runtime.checkpoint.checkpointer import Checkpointer, SavePolicy
from atoll.runtime.checkpoint.loading import Loaded
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.checkpoint.safetensors_file import dtype_name
from atoll.runtime.checkpoint.training_state import restore_training, training_state
from atoll.runtime.evaluation import ModelEvaluator, evaluates_after
from atoll.runtime.executor import Accumulated, LossScale, Update, Updater, WorkItem, loss_share, scaled
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.nonfinite import checked_weight, not_finite
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.stage.rng import DrawKey, EagerDraws
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.state import model_config, tied_names
from atoll.runtime.training import Reason, train
from atoll.runtime.whole_program import PieceCounts, WholeProgram, divided_program

__all__ = ["AloneTrainer", "train_alone", "training_alone"]


def train_alone(
    job: Job,
    *,
    device: torch.device,
    observers: Sequence[Observer],
    saved_in: tuple[RunDirectory, RunSettings] | None = None,
) -> RunResult:
    """Train the job on one device and tell the observers what happens."""
    with own_randomness(mix(job.seed, 4)), training_alone(job, device=device, observers=observers, saved_in=saved_in) as trainer:
        train(trainer)
    return trainer.result()


@contextmanager
def training_alone(
    job: Job,
    *,
    device: torch.device,
    observers: Sequence[Observer],
    saved_in: tuple[RunDirectory, RunSettings] | None = None,
) -> Iterator["AloneTrainer"]:
    """The job on one device, ready for its first step; leaving the block ends the run.

    Whatever ends it — the last step, Ctrl-C, `StopTraining`, a loss that is not finite — the weights are those after a whole step.
    With `saved_in`, a run's directory that this process holds, it goes on from the checkpoint there, if there is one, and saves into it:
    at the end, on Ctrl-C, and every so often. Losses and weights are those of a run that was never stopped, bit for bit.
    """
    if device.type == "cpu":
        keep_freed_memory()
    with _polite_interrupt() as interrupt:
        trainer = AloneTrainer(job, device, observers, saved_in, interrupt)
        try:
            trainer.begin()
            yield trainer
            trainer.save_last()
        except BaseException as error:
            with suppress(Exception):  # an observer that failed may fail again; the first error is the one to show
                trainer.finish("failed", f"{type(error).__name__}: {error}")
            raise
        trainer.finish(trainer.reason or "stopped", "")


class AloneTrainer:
    """A run under way: model, optimizer and what has been seen so far."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        observers: Sequence[Observer],
        saved_in: tuple[RunDirectory, RunSettings] | None,
        interrupt: threading.Event,
    ) -> None:
        self.job, self.device, self.observers, self._interrupt = job, device, observers, interrupt
        self._stopping = False  # somebody asked for it
        self.began, self.seconds_before = time.perf_counter(), 0.0
        self.mode = ALONE.name  # or of the run whose process this is
        self.steps = job.total_steps
        self.data_length = job.samples.length
        self.model = _on_device(job, device)
        self.optimizer = job.build_optimizer(self.model.parameters())
        self.parameters: list[nn.Parameter] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scheduler = job.build_scheduler(self.optimizer)
        scale = LossScale(job.precision == "fp16")
        self.updater = Updater(self.parameters, self.optimizer, self.scheduler, scale, steps=self.steps)
        self.gradients = Accumulated(job.batch_size)
        self.counts: PieceCounts | None = None  # what micro-batches weigh, where it is not their samples
        self.pieces: WholeProgram | None = None  # what computes micro-batches whose losses have several terms
        self.weights: StepWeights | None = None
        self.evaluator: ModelEvaluator | None = None
        self.random = True  # until a forward has shown that it draws no random numbers
        self._reason: Reason | None = None
        self.losses: list[float] = []
        self.evaluations: list[Evaluated] = []
        self.resumed: Loaded | None = None
        self.saving: tuple[Checkpointer, SavePolicy] | None = None
        if saved_in is not None:
            directory, settings = saved_in
            self.mode = settings.mode
            self.seconds_before = directory.last_moment()
            checkpoints = _checkpointer(directory, settings, job, self.model, self.optimizer)
            self._resume(checkpoints.load(_held_tensors(self.model), optimizers=[self.optimizer]))
            self.saving = checkpoints, SavePolicy(settings.checkpoint_every, step=len(self.losses), moment=self.moment())

    def _resume(self, loaded: Loaded | None) -> None:
        """Go on where the run's checkpoint is, if it has one."""
        self.resumed = loaded
        if loaded is not None:
            self.losses = restore_training(loaded.extra, loaded.step, self.scheduler, self.updater.scale)
            self.random = bool(loaded.extra.get("draws", True))

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def moment(self) -> float:
        """In the run's own time, which goes on where the process before this one ended."""
        return self.seconds_before + self.elapsed()

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

    def begin(self) -> None:
        """Tell that the run has begun, or goes on."""
        with self._stoppable():
            self.emit(self._started())
            if self.resumed is not None:
                self.emit(self.resumed.event(self.moment()))
            self._find_pieces()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """An observer that wants to stop ends what is done for the step at once."""
        try:
            yield
        except StopTraining:
            self._reason = "stopped"

    @property
    def reason(self) -> Reason | None:
        """Why no step follows; None while one does."""
        return self._reason or ("done" if len(self.losses) >= self.steps else None)

    def step(self) -> None:
        """The next step, and the evaluation and the save after it if they are due."""
        step = len(self.losses) + 1
        with self._stoppable():
            self.emit(self._step(step))
            self._evaluate_when_due(step)
            self._save_when_due(step)
            if self._interrupt.is_set() or self._stopping:
                self._reason = "interrupted" if self._interrupt.is_set() else "stopped"

    def stop(self) -> None:
        """Let no other step follow the next one."""
        self._stopping = True

    def together(self, call: str) -> None:
        """There is nobody to disagree."""

    def evaluate(self, dataset: Dataset) -> Evaluated:
        """Loss and metrics of the weights as they are."""
        with self._stoppable():
            self._evaluate(dataset)
        return self.evaluations[-1]

    def save(self) -> None:
        """A checkpoint of the last step; a thread writes it."""
        if self.saving is not None and self.losses:
            with self._stoppable():
                self._begin_save(*self.saving)
                self._tell_of_saves(*self.saving)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, copied to the CPU."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}

    def result(self) -> RunResult:
        """What the run leaves behind, once it has ended."""
        return RunResult(
            reason=self.reason or "stopped",
            losses=tuple(self.losses),
            evaluations=tuple(self.evaluations),
            seconds=self.elapsed(),
            model=self.model,
            optimizer=self.optimizer,
        )

    def finish(self, reason: Reason | Literal["failed"], message: str) -> None:
        """Tell how the run ended."""
        with suppress(StopTraining):  # there is nothing left to stop
            self.emit(
                RunFinished(
                    at_seconds=self.moment(),
                    reason=reason,
                    steps=len(self.losses),
                    samples=len(self.losses) * self.job.batch_size,
                    seconds=self.elapsed(),
                    loss=self.losses[-1] if self.losses else None,
                    message=message,
                )
            )

    def _save_when_due(self, step: int) -> None:
        if self.saving is None:
            return
        if step != self.steps and self.saving[1].due(step, self.moment()):
            self._begin_save(*self.saving)
        self._tell_of_saves(*self.saving)

    def _begin_save(self, checkpoints: Checkpointer, policy: SavePolicy) -> None:
        self.emit(CheckpointBegun(at_seconds=self.moment(), step=len(self.losses)))
        self._save(checkpoints, policy)

    def save_last(self) -> None:
        """The checkpoint to go on from; when it cannot be saved, the run has failed."""
        if self.saving is None or not self.losses:
            return
        try:
            self._save(*self.saving, final=True)
        finally:
            with suppress(StopTraining):
                self._tell_of_saves(*self.saving)

    def _save(self, checkpoints: Checkpointer, policy: SavePolicy, *, final: bool = False) -> None:
        step = len(self.losses)
        extra = training_state(self.scheduler, self.updater.scale, self.losses) | {"draws": self.random}
        policy.begun(step)
        checkpoints.save(step, _held_tensors(self.model), optimizers=[self.optimizer], extra=extra, final=final)

    def _tell_of_saves(self, checkpoints: Checkpointer, policy: SavePolicy) -> None:
        outcomes = checkpoints.finished()
        for outcome in outcomes:
            policy.ended(outcome.seconds)
        for outcome in outcomes:
            self.emit(outcome.event(self.moment()))
            chosen = policy.decision(len(self.losses), self.moment()) if len(self.losses) < self.steps else None
            if chosen is not None:
                self.emit(chosen)

    def _started(self) -> RunStarted:
        return RunStarted(
            at_seconds=self.moment(),
            name=self.job.name,
            mode=self.mode,
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
        overflowed = self.updater.unscale()
        gradient_norm = self._clip(step, overflowed)
        applied = self.updater.apply(Update(step, overflowed=overflowed))
        self.losses.append(loss)
        return StepFinished(
            at_seconds=self.moment(),
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
        if self.pieces is not None:
            return self._accumulate_pieces(self.pieces, step)
        if self.counts is not None:
            return self._accumulate_counted(self.counts, step)
        total = torch.zeros((), device=self.device)
        weight = torch.zeros((), device=self.device, dtype=torch.float64)
        deferred = False
        for number, (start, stop) in enumerate(parts):
            value = self._forward(step, number, start, stop)
            deferred = value.weight is not None and len(parts) > 1
            share = loss_share(value, stop - start, self.gradients) if deferred or value.weight is None else value.value / value.weight
            with users_code(f"step {step}: backward", JobFailedError):
                scaled(share, self.gradients.scaled_by(self.updater.scale)).backward()  # type: ignore[no-untyped-call]
            total += share.detach()
            weight += (stop - start) if value.weight is None else value.weight
        return self._divided(step, float(total), float(weight), deferred)

    def _divided(self, step: int, total: float, weight: float, deferred: bool) -> tuple[float, float]:
        divisor = checked_weight(f"step {step}", weight)
        if deferred:  # the weight of a batch is known only after its last micro-batch
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
        loss = total / (divisor if deferred else 1.0)
        if not math.isfinite(loss):
            self._not_finite(step, "loss", loss)
        return loss, divisor

    def _find_pieces(self) -> None:
        """Micro-batches add up to the batch's loss as the user's code has it: by their samples, or else as the captured program tells."""
        if len(self.job.micro_batches) == 1 or self.steps <= len(self.losses) or self._returns_weight():
            return
        found = divided_program(self.job, self.model)
        for note in found.notes:
            self.emit(Warned(message=note))
        self.counts = found.counts
        if found.program is not None:
            self.pieces = WholeProgram(self.job, found.program, self.model, self.device, self.updater)
            self.weights = StepWeights(self.pieces.sizes, self.job.micro_batches, self._batch)

    @torch.no_grad()
    def _returns_weight(self) -> bool:
        """Whether the loss is `(total, weight)`; the model stays as it was."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        batch = to_device(self._batch(len(self.losses) + 1, *self.job.micro_batches[0]), self.device)
        with self.job.autocast(self.device), users_code(f"step {len(self.losses) + 1}: the loss", JobFailedError):
            value = read_loss(self.job.loss(self.model, batch))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(before[name])
        return value.weight is not None

    def _accumulate_pieces(self, pieces: WholeProgram, step: int) -> tuple[float, float]:
        assert self.weights is not None
        total, weight = torch.zeros((), device=self.device), 0.0
        for number, (start, stop) in enumerate(self.job.micro_batches):
            batch, weights = to_device((self._batch(step, start, stop), self.weights.of(step)), self.device)
            seed_everything(mix(self.job.seed, 5, step, number), devices=self.device.type != "cpu")
            with users_code(f"step {step}: the loss", JobFailedError):
                found = pieces.train(WorkItem(0, step, number, start, stop - start), batch, weights)
            total, weight = total + found.total, weight + float(found.weight)
        return self._divided(step, float(total), weight, pieces.deferred)

    def _accumulate_counted(self, counts: PieceCounts, step: int) -> tuple[float, float]:
        """A micro-batch in which nothing counts has no loss, and adds nothing."""
        batches = [self._batch(step, start, stop) for start, stop in self.job.micro_batches]
        with users_code(f"step {step}: the batch", JobFailedError):
            shares, weight = counts.shares(batches)
        total = torch.zeros((), device=self.device)
        for number, (share, (start, _)) in enumerate(zip(shares, self.job.micro_batches, strict=True)):
            value = self._loss_of(step, number, start, batches[number])
            if share:
                loss = value.value * share
                with users_code(f"step {step}: backward", JobFailedError):
                    scaled(loss, self.gradients.scaled_by(self.updater.scale)).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return self._divided(step, float(total), weight, deferred=False)

    def _batch(self, step: int, start: int, stop: int) -> Batch:
        with users_code(f"step {step}: loading the batch", JobFailedError):
            return self.job.samples.batch(step - 1, start, stop)

    def _forward(self, step: int, number: int, start: int, stop: int) -> LossValue:
        return self._loss_of(step, number, start, self._batch(step, start, stop))

    def _loss_of(self, step: int, number: int, start: int, loaded: Batch) -> LossValue:
        batch = to_device(loaded, self.device)
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
        with EagerDraws(key, self.model) as draws:
            yield
        self.random = draws.count > 0

    def _clip(self, step: int, overflowed: bool) -> float | None:
        """By PyTorch's own function, as anyone would. In fp16 overflow is ordinary: the step is skipped."""
        if self.job.max_grad_norm is None or overflowed:
            return None
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.job.max_grad_norm))
        if not math.isfinite(norm) and not self.updater.scale.enabled:
            self._not_finite(step, "gradient", norm)
        return norm if math.isfinite(norm) else None

    def _not_finite(self, step: int, what: Literal["loss", "gradient"], value: float) -> None:
        self.emit(NonFinite(at_seconds=self.moment(), step=step, what=what, value=str(value)))
        raise not_finite(step, what, value)

    def _evaluate_when_due(self, step: int) -> None:
        dataset = self.job.eval_dataset
        if dataset is not None and evaluates_after(self.job, step, self.steps):
            self._evaluate(dataset)

    def _evaluate(self, dataset: Dataset) -> None:
        if self.evaluator is None or self.evaluator.dataset is not dataset:
            self.evaluator = ModelEvaluator(self.job, self.model, self.device, dataset)
        found = self.evaluator.run(len(self.losses))
        self.evaluations.append(msgspec.structs.replace(found, at_seconds=self.moment()))
        self.emit(self.evaluations[-1])


def _checkpointer(
    directory: RunDirectory, settings: RunSettings, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpointer:
    for held in _held_tensors(model):
        dtype_name(held.tensor.dtype, f"{held.name!r}")  # what cannot be saved is refused before it is trained
    identity = RunIdentity(
        job=job.name,
        optimizer=type(optimizer).__name__,
        seed=job.seed,
        batch_size=job.batch_size,
        tied=tied_names(model),
        model_config=model_config(model),
    )
    return Checkpointer(directory.checkpoints, identity=identity, keep_last=settings.keep_last)


def _held_tensors(model: nn.Module) -> list[LocalShard]:
    """Parameters and persistent buffers, each under its first name; the optimizer knows parameters as these very objects.

    Asked anew for every save: a model may put another tensor in a buffer's place.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers(remove_duplicate=False))
    names = [name for name in model.state_dict() if name not in parameters and name not in tied_names(model)]
    for name in names:
        if name not in buffers:
            raise CheckpointError(f"{name!r}: state that is neither a parameter nor a buffer cannot be saved; register it as a buffer")
    found = parameters | {name: buffers[name] for name in names}
    return [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in found.items()]


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
