"""Alone: the job on one device of this machine — the reference every distributed mode is compared with.

The loop is what one would write by hand: gradients accumulated over micro-batches, clipped, applied, the schedule advanced. What surrounds
it — events, evaluation, a polite Ctrl-C — never changes a number.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from atoll.blame import in_words, users_code
from atoll.callbacks import Callback, Snapshot, callback_states, logged, restore_callbacks, with_run
from atoll.cluster.memory import keep_freed_memory
from atoll.collaboration import Collaboration
from atoll.data import Batch, Dataset, to_device
from atoll.errors import JobError, JobFailedError
from atoll.events import (
    AnyEvent,
    CheckpointBegun,
    Evaluated,
    NonFinite,
    Note,
    RunFinished,
    RunStarted,
    StepFinished,
    StopTraining,
    Warned,
)
from atoll.graph.loss_check import check_eagerly
from atoll.job import Job, LossValue, RunResult, read_loss
from atoll.model_identity import identify, tied_names
from atoll.plan.modes.alone import ALONE
from atoll.randomness import mix, own_randomness, seed_everything
from atoll.runtime.batch_loader import BatchLoader, LoadedBatch
from atoll.runtime.checkpoint.checkpointer import Checkpointer, SavePolicy
from atoll.runtime.checkpoint.gathering import gather_snapshot
from atoll.runtime.checkpoint.loading import Loaded
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.checkpoint.safetensors_file import dtype_name
from atoll.runtime.checkpoint.trained import held_tensors
from atoll.runtime.checkpoint.training_state import restore_data, restore_training, training_state
from atoll.runtime.checkpoint.values import data_state
from atoll.runtime.evaluation import ModelEvaluator, evaluates_after
from atoll.runtime.executor import Accumulated, LossScale, Update, Updater, WorkItem, loss_share, scaled
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.nonfinite import checked_weight, not_finite
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.signals import signals_to_stop
from atoll.runtime.stage.compilation import CompiledDraws, compile_errors, compiler_for
from atoll.runtime.stage.rng import DrawKey, EagerDraws
from atoll.runtime.training import Reason, train
from atoll.runtime.turns import optimizer_names, schedule_of, training_only
from atoll.runtime.whole_program import OwnCounts, PieceCounts, WholeProgram, divided_program

__all__ = ["AloneTrainer", "TakenTurn", "train_alone", "training_alone"]


def train_alone(
    job: Job,
    *,
    device: torch.device,
    observers: Sequence[Callback],
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
    observers: Sequence[Callback],
    saved_in: tuple[RunDirectory, RunSettings] | None = None,
    make: "Callable[..., AloneTrainer] | None" = None,
) -> Iterator["AloneTrainer"]:
    """The job on one device, ready for its first step; leaving the block ends the run. `make` is in place of the usual trainer's class.

    Whatever ends it — the last step, Ctrl-C, `StopTraining`, a loss that is not finite — the weights are those after a whole step.
    With `saved_in`, a run's directory that this process holds, it goes on from the checkpoint there, if there is one, and saves into it:
    at the end, on Ctrl-C, and every so often. Losses and weights are those of a run that was never stopped, bit for bit.
    """
    if device.type == "cpu":
        keep_freed_memory()
    with _polite_interrupt() as interrupt:
        trainer = (make or _trainer_class(job))(job, device, observers, saved_in, interrupt)
        try:
            trainer.begin()
            yield trainer
            trainer.save_last()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # the second Ctrl-C ends at once
                trainer.save_failed()
            with suppress(Exception):  # an observer that failed may fail again; the first error is the one to show
                trainer.finish(*(("interrupted", "") if isinstance(error, KeyboardInterrupt) else ("failed", in_words(error))))
            raise
        finally:
            trainer.close()
        trainer.finish(trainer.reason or "stopped", "")


def _trainer_class(job: Job) -> "type[AloneTrainer]":
    if not isinstance(job, Collaboration):
        return AloneTrainer
    from atoll.runtime.modes.alone.collaboration import CollaborationTrainer  # it is one of these

    return CollaborationTrainer


class _Handle:
    """The run as callbacks see it."""

    def __init__(self, trainer: "AloneTrainer") -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        """Steps made."""
        return len(self._trainer.losses)

    def snapshot(self) -> Snapshot:
        """Copies of weights and optimizer."""
        return self._trainer.snapshot()

    def log(self, **numbers: float) -> None:
        """As an event."""
        self._trainer.emit(logged(self._trainer.moment(), self.step, numbers))

    def keep(self, name: str = "best") -> None:
        """Save this step and keep it."""
        self._trainer.keep(name)


class AloneTrainer:
    """A run under way: model, optimizer and what has been seen so far."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        observers: Sequence[Callback],
        saved_in: tuple[RunDirectory, RunSettings] | None,
        interrupt: threading.Event,
    ) -> None:
        self.job, self.device, self._interrupt = job, device, interrupt
        self.observers = [with_run(observer, _Handle(self)) for observer in observers]
        self._stopping = False  # somebody asked for it
        self.began, self.seconds_before = time.perf_counter(), 0.0
        self.mode = ALONE.name  # or of the run whose process this is
        self.steps = job.total_steps
        self.data_length = job.samples.length
        self.loader = BatchLoader(job.samples, job.num_workers)
        self.batches: Iterator[LoadedBatch] | None = None
        self.kept: list[Batch] = []  # the step's micro-batches, where it has several turns
        self.data_state: dict[str, Any] | None = None  # of a stream, after the last step
        self.data_seconds = self.loading_seconds = 0.0  # of the step: waiting for data, and what loading it took whoever did
        self.model = _on_device(job, device)
        self.turns = _make_turns(job, self.model)
        self.optimizers = [turn.optimizer for turn in self.turns]
        self.optimizer = self.optimizers[0]
        self.parameters: list[nn.Parameter] = [parameter for turn in self.turns for parameter in turn.updater.parameters]
        self.scheduler = schedule_of({turn.name: turn.updater.scheduler for turn in self.turns})
        self.scale = self.turns[0].updater.scale
        self.updater = self.turns[0].updater  # of jobs with one loss
        self.compiler = compiler_for(job, device)
        self.loss_functions: list[Callable[..., Any]] = [turn.job.loss for turn in self.turns]
        if self.compiler is not None:
            self.loss_functions = [self.compiler.function(loss) for loss in self.loss_functions]
        self.key = DrawKey(job.seed)
        self.gradients = Accumulated(job.batch_size)
        self.counts: PieceCounts | OwnCounts | None = None  # what micro-batches weigh, where it is not their samples
        self.pieces: WholeProgram | None = None  # what computes micro-batches whose losses have several terms
        self.weights: StepWeights | None = None
        self.evaluator: ModelEvaluator | None = None
        self.random = True  # until a forward has shown that it draws no random numbers
        self._reason: Reason | None = None
        self._whole = True  # model and optimizer are those after a whole step
        self._unevaluated = False  # the evaluation that is due after it was not made
        self.losses: list[float] = []
        self.evaluations: list[Evaluated] = []
        self.resumed: Loaded | None = None
        self.saving: tuple[Checkpointer, SavePolicy] | None = None
        if saved_in is not None:
            directory, settings = saved_in
            self.mode = settings.mode
            self.seconds_before = directory.last_moment()
            checkpoints = _checkpointer(directory, settings, job, self.model, self.optimizers)
            self._resume(self.load_checkpoint(checkpoints))
            self.saving = checkpoints, SavePolicy(settings.checkpoint_every, step=len(self.losses), moment=self.moment())

    def load_checkpoint(self, checkpoints: Checkpointer) -> Loaded | None:
        """What the run goes on from; None where it begins."""
        return checkpoints.load(held_tensors(self.model), optimizers=self.optimizers)

    def _resume(self, loaded: Loaded | None) -> None:
        """Go on where the run's checkpoint is, if it has one."""
        self.resumed = loaded
        if loaded is not None:
            self.losses = restore_training(loaded.extra, loaded.step, self.scheduler, self.scale)
            self._unevaluated = bool(loaded.extra.get("unevaluated", False))
            self.random = bool(loaded.extra.get("draws", True))
            restore_callbacks(self.job.callbacks, loaded.extra.get("callbacks", {}))
            restore_data(loaded.extra, self.job.samples)

    def close(self) -> None:
        """End the processes that load data."""
        self.loader.close()
        if self.evaluator is not None:
            self.evaluator.close()
        if self.compiler is not None:
            self.compiler.close()

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
            for remark in self.job.remarks(len(self.losses)):
                self.emit(Note(at_seconds=self.moment(), message=remark))
            if self.resumed is not None:
                self.emit(self.resumed.event(self.moment()))
            note = self.job.weights_note(self.model) if self.resumed is None else None
            if note is not None:
                self.emit(Note(at_seconds=self.moment(), message=note))
            if self._unevaluated:
                self._evaluate_when_due(len(self.losses))
            self._find_pieces()
            if self.compiler is not None and self.random and len(self.turns) == 1 and self.reason is None:
                self.random = self._tried()[1]  # before it is compiled: not when the first step has shown it

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
            for told in self.compiler.take() if self.compiler is not None else ():
                self.emit(msgspec.structs.replace(told, at_seconds=self.moment()))
            self._save_when_due(step)
            if step < self.steps and (self._interrupt.is_set() or self._stopping):  # else it is done
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
            trained=lambda: (self.model, self.optimizer),
        )

    def bring_model(self) -> None:
        """It is here."""

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

    def save_failed(self) -> None:
        """After an error that came between steps (evaluation, callbacks, loading data, a loop around the steps) none of them is lost."""
        if self.saving is None:
            return
        checkpoints, step = self.saving[0], len(self.losses)
        with suppress(Exception):  # the first error is the one to show
            checkpoints.wait()  # of a save that is under way
            if self._whole and step and not checkpoints.tried(step):
                self._save(*self.saving, final=True)
        with suppress(Exception):
            self._tell_of_saves(*self.saving)

    def _save(self, checkpoints: Checkpointer, policy: SavePolicy, *, final: bool = False, keep: str | None = None) -> None:
        step = len(self.losses)
        extra = training_state(self.scheduler, self.scale, self.losses)
        extra |= {"draws": self.random, "data": data_state(self.data_state), "callbacks": callback_states(self.job.callbacks)}
        extra |= {"unevaluated": self._unevaluated}
        policy.begun(step)
        checkpoints.save(step, held_tensors(self.model), optimizers=self.optimizers, extra=extra, final=final, keep=keep)

    def keep(self, name: str) -> None:
        """Save now, under a name that keeps it."""
        if self.saving is None:
            raise JobError("run.keep: there is nowhere to save; give a directory with out")
        self._save(*self.saving, keep=name)

    def snapshot(self) -> Snapshot:
        """Copies of weights and optimizer."""
        found = gather_snapshot(len(self.losses), held_tensors(self.model), self.optimizers, tied_names(self.model), None)
        assert found is not None  # on rank 0
        return found

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
            frozen_parameters=sum(parameter.numel() for parameter in self.model.parameters() if not parameter.requires_grad),
            num_workers=self.job.num_workers,
            in_place=isinstance(self.job.model, nn.Module),
        )

    def _step(self, step: int) -> StepFinished:
        """One step of the optimizer on one global batch. Nothing is applied unless loss and gradient are finite."""
        began = time.perf_counter()
        self.data_seconds = self.loading_seconds = 0.0
        self.kept = []
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        made = self.take_turns(step)
        self._whole = True
        losses = {turn.name: one.loss for turn, one in zip(self.turns, made, strict=True) if one.loss is not None}
        loss, norms = sum(losses.values()), [one.norm for one in made if one.norm is not None]
        self.losses.append(loss)
        return StepFinished(
            at_seconds=self.moment(),
            step=step,
            loss=loss,
            samples=self.job.batch_size,
            weight=made[0].weight,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            gradient_norm=math.hypot(*norms) if norms else None,
            memory_bytes=peak_memory_bytes(self.device),
            applied=made[0].applied,
            data_seconds=self.data_seconds,
            loading_seconds=self.loading_seconds,
            losses={name: value for name, value in losses.items() if name},
        )

    def take_turns(self, step: int) -> "list[TakenTurn]":
        """All that the step's turns do, one after another."""
        return [self._take(step, turn) for turn in self.turns]

    def _take(self, step: int, turn: "_Turn") -> "TakenTurn":
        """One loss, its gradient and the step of its optimizer."""
        self.key.step, self.key.turn = step, turn.number
        turn.optimizer.zero_grad()
        with turn.training():
            loss, weight = self._accumulate_gradient(step, turn)
        overflowed = turn.updater.unscale()
        norm = self._clip(step, turn, overflowed)
        return TakenTurn(loss, weight, norm, turn.updater.apply(Update(step, overflowed=overflowed)))

    def _accumulate_gradient(self, step: int, turn: "_Turn") -> tuple[float, float]:
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
            value = self._loss_of(step, turn, number, start, self._micro_batch(step, number))
            deferred = value.weight is not None and len(parts) > 1
            share = loss_share(value, stop - start, self.gradients) if deferred or value.weight is None else value.value / value.weight
            with users_code(f"step {step}: backward", JobFailedError), compile_errors():
                scaled(share, self.gradients.scaled_by(self.scale)).backward()  # type: ignore[no-untyped-call]
            total += share.detach()
            weight += (stop - start) if value.weight is None else value.weight
        return self._divided(step, turn, float(total), float(weight), deferred)

    def _divided(self, step: int, turn: "_Turn", total: float, weight: float, deferred: bool) -> tuple[float, float]:
        divisor = checked_weight(f"step {step}", weight)
        if deferred:  # the weight of a batch is known only after its last micro-batch
            torch._foreach_div_([p.grad for p in turn.updater.parameters if p.grad is not None], divisor)
        loss = total / (divisor if deferred else 1.0)
        if not math.isfinite(loss):
            self._not_finite(step, "loss", loss)
        return loss, divisor

    def _find_pieces(self) -> None:
        """Micro-batches add up to the batch's loss as the user's code has it: by their samples, or else as the captured program tells."""
        if len(self.job.micro_batches) == 1 or self.steps <= len(self.losses):
            return
        if len(self.turns) > 1:
            self._check_turns()
            return
        if self._tried()[0].weight is not None:
            return
        found = divided_program(self.job, self.model)
        for note in found.notes:
            self.emit(Warned(message=note))
        self.counts = found.counts or found.own_counts
        if found.program is not None:
            self.pieces = WholeProgram(self.job, found.program, self.model, self.device, self.updater, self.compiler)
            self.weights = StepWeights(self.pieces.sizes, self.job.micro_batches, self._batch)

    def _check_turns(self) -> None:
        """Several losses are not captured: that micro-batches add up is found out by their own code. DividedLossError where they do not."""
        notes = [check_eagerly(turn.job, self.model, by_samples=True).note for turn in self.turns]
        self.model.train()
        for note in filter(None, dict.fromkeys(notes)):
            self.emit(Warned(message=note))

    def _tried(self) -> tuple[LossValue, bool]:
        """What the loss is of the next micro-batch, and whether it draws random numbers; the model stays as it was."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        batch = to_device(self._batch(len(self.losses) + 1, *self.job.micro_batches[0]), self.device)
        draws = EagerDraws(self.key, self.model)
        with self.job.autocast(self.device), users_code(f"step {len(self.losses) + 1}: the loss", JobFailedError), draws:
            value = read_loss(self.job.loss(self.model, batch))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(before[name])
        return value, draws.count > 0

    def _accumulate_pieces(self, pieces: WholeProgram, step: int) -> tuple[float, float]:
        assert self.weights is not None
        total, weight = torch.zeros((), device=self.device), 0.0
        for number, (start, stop) in enumerate(self.job.micro_batches):
            batch, weights = to_device((self._next_batch(step), self.weights.of(step)), self.device)
            seed_everything(mix(self.job.seed, 5, step, number), devices=self.device.type != "cpu")
            with users_code(f"step {step}: the loss", JobFailedError):
                found = pieces.train(WorkItem(0, step, number, start, stop - start), batch, weights)
            total, weight = total + found.total, weight + float(found.weight)
        return self._divided(step, self.turns[0], float(total), weight, pieces.deferred)

    def _accumulate_counted(self, counts: PieceCounts | OwnCounts, step: int) -> tuple[float, float]:
        """A micro-batch in which nothing counts has no loss, and adds nothing."""
        batches = [self._next_batch(step) for _ in self.job.micro_batches]
        with users_code(f"step {step}: the batch", JobFailedError):
            shares, weight = counts.shares(batches)
        total = torch.zeros((), device=self.device)
        for number, (share, (start, _)) in enumerate(zip(shares, self.job.micro_batches, strict=True)):
            value = self._loss_of(step, self.turns[0], number, start, batches[number])
            if share:
                loss = value.value * share
                with users_code(f"step {step}: backward", JobFailedError), compile_errors():
                    scaled(loss, self.gradients.scaled_by(self.scale)).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return self._divided(step, self.turns[0], float(total), weight, deferred=False)

    def _batch(self, step: int, start: int, stop: int) -> Batch:
        with users_code(f"step {step}: loading the batch", JobFailedError):
            return self.loader.load(self.job.samples.part(step - 1, start, stop, last=False)).batch

    def _loss_of(self, step: int, turn: "_Turn", number: int, start: int, loaded: Batch) -> LossValue:
        batch, self.key.first_sample = to_device(loaded, self.device), start
        seed_everything(mix(self.job.seed, 5, step, number, *self.key.of_turn), devices=self.device.type != "cpu")
        with self.job.autocast(self.device), users_code(f"step {step}: {turn.words}", JobFailedError), self._draws():
            value = read_loss(self.loss_functions[turn.number](self.model, batch))
        if not value.value.requires_grad:
            raise JobError("Job: loss: no gradient flows from it to the model; is it computed under no_grad, or detached?")
        return value

    def _micro_batch(self, step: int, number: int) -> Batch:
        """The step's micro-batch of this number; it is loaded once, and kept where several turns want it."""
        if len(self.turns) == 1:
            return self._next_batch(step)
        if number == len(self.kept):
            self.kept.append(self._next_batch(step))
        return self.kept[number]

    def _next_batch(self, step: int) -> Batch:
        """The next micro-batch. The first that is asked for is a step's first, wherever the run goes on."""
        if self.batches is None:
            samples, parts = self.job.samples, self.job.micro_batches
            rows = ((s - 1, part) for s in range(step, self.steps + 1) for part in parts)
            self.batches = self.loader.batches(samples.part(s, *part, last=part == parts[-1]) for s, part in rows)
        began = time.perf_counter()
        with users_code(f"step {step}: loading the batch", JobFailedError):
            loaded = next(self.batches)
        self._whole = False  # what follows computes
        self.data_state = loaded.state
        self.data_seconds += time.perf_counter() - began
        self.loading_seconds += loaded.seconds
        return loaded.batch

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Random calls of the forward are seeded one by one, as distributed modes do; a model that makes none at first is left alone."""
        if not self.random:
            yield
            return
        if self.compiler is not None:
            with CompiledDraws(self.key, self.model, self.compiler):
                yield
            return
        with EagerDraws(self.key, self.model) as draws:
            yield
        self.random = draws.count > 0 or len(self.turns) > 1

    def _clip(self, step: int, turn: "_Turn", overflowed: bool) -> float | None:
        """By PyTorch's own function, as anyone would. In fp16 overflow is ordinary: the step is skipped."""
        if turn.job.max_grad_norm is None or overflowed:
            return None
        norm = float(nn.utils.clip_grad_norm_(turn.updater.parameters, turn.job.max_grad_norm))
        if not math.isfinite(norm) and not self.scale.enabled:
            self._not_finite(step, "gradient", norm)
        return norm if math.isfinite(norm) else None

    def _not_finite(self, step: int, what: Literal["loss", "gradient"], value: float) -> None:
        self.emit(NonFinite(at_seconds=self.moment(), step=step, what=what, value=str(value)))
        checkpoints = None
        if self.saving is not None:
            self.saving[0].wait()
            checkpoints = self.saving[0].directory
        raise not_finite(step, what, value, checkpoints)

    def _evaluate_when_due(self, step: int) -> None:
        dataset = self.job.eval_dataset
        self._unevaluated = dataset is not None and evaluates_after(self.job, step, self.steps)
        if dataset is not None and self._unevaluated:
            self._evaluate(dataset, planned=True)

    def _evaluate(self, dataset: Dataset, *, planned: bool = False) -> None:
        """A schedule that waits for a plateau hears of evaluations that the job planned."""
        found = self._evaluated(dataset)
        if planned:
            for turn in self.turns:
                turn.updater.evaluated(len(self.losses), found.loss)
            self._unevaluated = False
        self.evaluations.append(msgspec.structs.replace(found, at_seconds=self.moment()))
        self.emit(self.evaluations[-1])

    def _evaluated(self, dataset: Dataset) -> Evaluated:
        if self.evaluator is None or self.evaluator.dataset is not dataset:
            if self.evaluator is not None:
                self.evaluator.close()
            self.evaluator = ModelEvaluator(self.job, self.model, self.device, dataset, self.compiler)
        with self._averaged_weights() if self.job.eval_ema else nullcontext():
            return self.evaluator.run(len(self.losses))

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """The model has its averages meanwhile, which change places with the weights."""
        averages = self.updater.averages()
        weights = {parameter: parameter.data for parameter in averages}
        for parameter, average in averages.items():
            parameter.data = average
        try:
            yield
        finally:
            for parameter, weight in weights.items():
                parameter.data = weight


@dataclass(frozen=True)
class _Turn:
    """One of a step's losses with its optimizer; most jobs have one."""

    name: str
    number: int
    job: Job  # of this loss alone
    optimizer: torch.optim.Optimizer
    updater: Updater
    training: Callable[[], AbstractContextManager[None]]  # around its forwards and backwards

    @property
    def words(self) -> str:
        return f"the loss of {self.name!r}" if self.name else "the loss"


class TakenTurn(NamedTuple):
    """What a turn found and did."""

    loss: float | None  # None: of a collaboration's part that others train
    weight: float
    norm: float | None
    applied: bool


def _make_turns(job: Job, model: nn.Module) -> list[_Turn]:
    trained, turns, scale = dict(model.named_parameters()), list[_Turn](), LossScale(job.precision == "fp16")
    names = job.trained_in(model)
    everything = {name: trained[name] for row in names.values() for name in row}
    for number, (name, optimizer) in enumerate(job.build_optimizers(model).items()):
        part = job.turns[name]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        updater = Updater(parameters, optimizer, part.build_scheduler(optimizer), scale, steps=job.total_steps, ema_decay=job.ema_decay)
        around = partial(training_only, names[name], everything) if name else nullcontext
        turns.append(_Turn(name, number, part, optimizer, updater, around))
    return turns


def _checkpointer(
    directory: RunDirectory, settings: RunSettings, job: Job, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Checkpointer:
    for held in held_tensors(model):
        dtype_name(held.tensor.dtype, f"{held.name!r}")  # what cannot be saved is refused before it is trained
    names = optimizer_names(optimizers)
    identity = RunIdentity.of(identify(model), job=job.name, optimizer=names, seed=job.seed, batch_size=job.batch_size)
    return Checkpointer(directory.checkpoints, identity=identity, keep_last=settings.keep_last, rebuilt=job.rebuilt(model))


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
    """The first Ctrl-C, SIGTERM or hangup sets the event, so that the step under way can end; the second acts as usual."""
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread can listen for signals
        return

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def remember(number: int, frame: object) -> None:
        interrupt.set()
        put_back()

    before = {number: signal.signal(number, remember) for number in signals_to_stop()}
    try:
        yield interrupt
    finally:
        put_back()
