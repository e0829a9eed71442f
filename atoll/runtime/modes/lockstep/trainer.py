"""The training loop of a lockstep run: every rank runs it, rank 0 tells what happens."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from atoll.blame import users_code
from atoll.callbacks import Callback, Snapshot, logged, with_run
from atoll.control.clipping import clip_coefficient
from atoll.data import Dataset
from atoll.errors import JobError, JobFailedError
from atoll.events import (
    AnyEvent,
    CodecChosen,
    Compiled,
    Evaluated,
    NonFinite,
    Note,
    RunFinished,
    RunStarted,
    StepFinished,
    StopTraining,
    Warned,
)
from atoll.job import Job
from atoll.plan.modes.lockstep import LOCKSTEP
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.gathering import gather_snapshot
from atoll.runtime.checkpoint.loading import Loaded
from atoll.runtime.checkpoint.training_state import restore_training
from atoll.runtime.evaluation import evaluates_after
from atoll.runtime.executor import Update
from atoll.runtime.modes.lockstep.evaluation import Evaluation
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.rank import RankTurn, RankWork
from atoll.runtime.modes.lockstep.recorder import counted
from atoll.runtime.modes.lockstep.requests import Requests
from atoll.runtime.modes.lockstep.sharding import squared_norm
from atoll.runtime.nonfinite import checked_weight, not_finite
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.training import Reason
from atoll.runtime.turns import SeveralSchedules, schedule_of

__all__ = ["Trainer"]

_AGREEING = Doing("agreeing on loss and gradient", "others")
_OPTIMIZING = Doing("making the optimizer's step", "user")


class _Totals(NamedTuple):
    """What all ranks saw of a step, added up."""

    loss: float
    weight: float
    squares: float  # of the gradient, before it is divided by anything
    interrupt: bool  # a signal asked somebody to stop after this step
    stopping: bool  # the loop around the steps asked for it
    data_seconds: float  # waited for data, the mean of the ranks that read any
    loading_seconds: float  # that loading it took, likewise
    compiled: bool  # a rank has something to tell of compiling


class _Handle:
    """The run as callbacks on rank 0 see it."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        """Steps made."""
        return len(self._trainer.losses)

    def snapshot(self) -> Snapshot:
        """Weights and optimizer of all ranks."""
        return self._trainer.requests.snapshot()

    def log(self, **numbers: float) -> None:
        """As an event."""
        if self._trainer.tell(logged(self._trainer.moment(), self.step, numbers)):
            raise StopTraining

    def keep(self, name: str = "best") -> None:
        """Save this step and keep it."""
        self._trainer.requests.keep(name)


class Trainer:
    """A lockstep run as one rank sees it. Whatever ends it, the weights are those after a whole step."""

    def __init__(self, job: Job, work: RankWork, device: torch.device, observers: Sequence[Callback] = ()) -> None:
        self.job, self.work, self.device = job, work, device
        self.saved_in: Path | None = None  # where checkpoints are
        self.unevaluated = False  # the evaluation that is due after the last step was not made
        self.save_first: Callable[[], None] | None = None  # before the first evaluation, which may fail; None: there is nowhere to save
        self.save_kept: Callable[[str], None] | None = None  # saves this step under a name; None: there is nowhere to save
        self.requests = Requests(self.gather, self._keep)
        self.after_update: Callable[[StepFinished], Reason | None] = lambda event: None  # on every rank; may say why no step follows
        self.with_others: Callable[[torch.Tensor], torch.Tensor] = lambda totals: totals  # the totals of this world with those of others
        self.observe(observers)
        self.began, self.seconds_before = time.perf_counter(), 0.0
        self._trainable = {turn.name: turn.trainable for turn in work.turns}
        self.trainable = [owned for owned in work.owned if owned.leaf.requires_grad]
        self.updater = work.executor.updater
        self.losses: list[float] = []
        self.evaluations: list[Evaluated] = []
        self.resumed: Loaded | None = None
        self.reason: Reason | None = None  # why no step follows
        self.stopping = False  # the loop around the steps asks all ranks to end it after the next one

    def observe(self, observers: Sequence[Callback]) -> None:
        """Who is told of events on this rank."""
        self.observers = [with_run(observer, _Handle(self)) for observer in observers]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """What there is to save of optimizers: nothing, where this rank trains nothing of the model."""
        return [turn.optimizer for turn in self.work.turns] if self.trainable else []

    def gather(self) -> Snapshot | None:
        """Weights and optimizer, whole, on rank 0. All ranks take part."""
        self.work.doing("putting the model together on rank 0", len(self.losses))
        return gather_snapshot(len(self.losses), self.work.executor.shards(), self.optimizers, self.work.identity.tied, dist.group.WORLD)

    def _keep(self, name: str) -> None:
        if self.save_kept is None:
            raise JobError("run.keep: there is nowhere to save; give a directory with out")
        self.save_kept(name)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what the rank owns; of a stand-in without numbers where it trains nothing."""
        assert self.updater.optimizer is not None
        return self.updater.optimizer

    @property
    def scheduler(self) -> LRScheduler | SeveralSchedules | None:
        """The job's, or several of them."""
        return schedule_of({turn.name: turn.executor.updater.scheduler for turn in self.work.turns})

    @property
    def last_step(self) -> int:
        """The last step that was applied; 0 before the first."""
        return len(self.losses)

    def resume(self, step: int, extra: dict[str, Any]) -> None:
        """Continue after `step` steps: weights and optimizer are loaded, this is the rest."""
        self.losses = restore_training(extra, step, self.scheduler, self.updater.scale)
        self.unevaluated = bool(extra.get("unevaluated", False))
        schedule = self.updater.scheduler
        if schedule is not None and not self.trainable:  # nothing of its optimizer was loaded
            for group, rate in zip(self.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def elapsed(self) -> float:
        """Seconds since this process began to train."""
        return time.perf_counter() - self.began

    def moment(self) -> float:
        """When it is in the run's own time, which goes on where the processes before this one ended."""
        return self.seconds_before + self.elapsed()

    def train(self) -> None:
        """All steps that are left."""
        self.begin()
        while self.reason is None:
            self.advance()

    def begin(self) -> None:
        """Tell that the run has begun, or goes on."""
        self.reason = "done" if self.last_step >= self.job.total_steps else None
        self.tell(self._started())
        for remark in self.job.remarks(self.last_step):
            self.tell(Note(at_seconds=self.moment(), message=remark))
        if self.resumed is not None:
            self.tell(self.resumed.event(self.moment()))
        for note in self.work.notes if self.resumed is None else ():
            self.tell(Note(at_seconds=self.moment(), message=note))
        for link, codec in self.work.layout.plan.codecs.items():
            if codec != "none":
                reason = "the plan names it; losses are near those of one process, not equal to float tolerance"
                self.tell(CodecChosen(at_seconds=self.moment(), link=link, codec=codec, before="", reason=reason))
        if self.unevaluated and self._evaluate_when_due(self.last_step):
            self.reason = self.reason or "stopped"

    def advance(self, stop_asked: bool = False, after_step: Callable[[int], None] = lambda step: None) -> None:
        """The next step, and the last if any rank was asked to stop by a signal, or is `stopping`. `after_step` may save."""
        step = self.last_step + 1
        with counted(self.work.runner.recorder, step, is_last=step == self.job.total_steps):
            event, totals = self.step(step, stop_asked)
        ended = self.after_update(event)
        stopped = self._tell_together(event) or totals.stopping
        stopped = self._evaluate_when_due(step) or stopped
        if self.work.compiler is not None and (totals.compiled or step in (1, self.job.total_steps)):
            self._tell_of_compiling(self.work.compiler)
        after_step(step)
        if stopped or totals.interrupt:
            self.reason = "stopped" if stopped else "interrupted"
        elif ended is not None:
            self.reason = ended
        elif step >= self.job.total_steps:
            self.reason = "done"

    def step(self, step: int, stop_asked: bool = False) -> tuple[StepFinished, _Totals]:
        """One step of the optimizer on one global batch. Nothing is applied unless loss and gradient are finite on every rank."""
        began = time.perf_counter()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        taken = [self._take(step, turn, stop_asked) for turn in self.work.turns]
        totals, losses, norms = taken[0][0], [loss for _, (loss, _, _) in taken], [norm for _, (_, norm, _) in taken if norm is not None]
        self.work.buffers.agree()
        loss = sum(losses)
        self.losses.append(loss)
        self.work.runner.recorder.end(step, time.perf_counter() - began)
        event = StepFinished(
            at_seconds=self.moment(),
            step=step,
            loss=loss,
            samples=self.job.batch_size,
            weight=totals.weight,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            gradient_norm=math.hypot(*norms) if norms else None,
            memory_bytes=peak_memory_bytes(self.device),
            applied=taken[0][1][2],
            data_seconds=totals.data_seconds,
            loading_seconds=totals.loading_seconds,
            losses={turn.name: value for turn, value in zip(self.work.turns, losses, strict=True) if turn.name},
        )
        return event, totals

    def _take(self, step: int, turn: RankTurn, stop_asked: bool) -> tuple[_Totals, tuple[float, float | None, bool]]:
        """One loss of the step, its gradient, and the step of its optimizer: what ranks found together, and what `_apply` says."""
        trainable, recorder = self._trainable[turn.name], turn.runner.recorder
        for owned in trainable:
            owned.forget_gradient()
        with turn.entered():
            sums = turn.runner.run(step, first=turn is self.work.turns[0])
        for owned in trainable:
            owned.hand_gradient_over()
        agreeing = recorder.now()
        self.work.doing(_AGREEING, step)
        totals = self._add_up(turn, float(sums.total), float(sums.weight), stop_asked)
        recorder.add("A", -1, -1, agreeing)
        return totals, self._apply(step, turn, totals)

    def _add_up(self, turn: RankTurn, total: float, weight: float, stop_asked: bool) -> _Totals:
        """One small exchange a step: nobody may apply a gradient before all know that it is whole and finite."""
        wanted = self.job.max_grad_norm is not None or self.updater.scale.enabled
        squares = squared_norm(turn.counted) if wanted else 0.0
        feed = self.work.feed
        compiled = self.work.compiler is not None and self.work.compiler.pending
        own = [total, weight, squares, float(stop_asked), float(self.stopping), float(compiled), float(feed.reads), *feed.take_times()]
        vector = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(vector)
        loss, weight, squares, interrupt, stopping, compiling, reading, waited, loading = self.with_others(vector).tolist()
        reading = max(1.0, reading)
        return _Totals(loss, weight, squares, interrupt > 0, stopping > 0, waited / reading, loading / reading, compiling > 0)

    def _tell_of_compiling(self, compiler: Compiler) -> None:
        """What compiling took on every rank, and what there is to know of it. All ranks take part."""
        own = compiler.take(f"rank {self.work.rank}")
        for events in CheckpointRanks(dist.group.WORLD).gather(own, list[Compiled | Warned]):
            for event in events:
                self.tell(msgspec.structs.replace(event, at_seconds=self.moment()))

    def _apply(self, step: int, turn: RankTurn, totals: _Totals) -> tuple[float, float | None, bool]:
        """Divide, clip and apply; returns the loss, the gradient's norm if it was wanted, and whether anything was applied."""
        divisor = totals.weight if turn.executor.deferred else 1.0
        if turn.executor.deferred:
            checked_weight(f"step {step}", divisor)
        loss = totals.loss / divisor
        if not math.isfinite(loss):
            self._not_finite(step, "loss", loss)
        scale = self.updater.scale
        factor = 1.0 / (divisor * scale.value)
        norm = math.sqrt(totals.squares) * factor if totals.squares >= 0 else math.nan
        overflowed = scale.enabled and not math.isfinite(norm)
        if self.job.max_grad_norm is not None and not math.isfinite(norm) and not overflowed:
            self._not_finite(step, "gradient", norm)
        began = self.work.runner.recorder.now()
        self.work.doing(_OPTIMIZING, step)
        applied = turn.executor.apply(Update(step, factor * clip_coefficient(norm, self.job.max_grad_norm), overflowed))
        self.work.runner.recorder.add("O", -1, -1, began)
        return loss, norm if applied and self.job.max_grad_norm is not None else None, applied

    def _not_finite(self, step: int, what: Literal["loss", "gradient"], value: float) -> None:
        with suppress(StopTraining):
            self.tell(NonFinite(at_seconds=self.moment(), step=step, what=what, value=str(value)))
        self.work.doing(_AGREEING, step)  # which is what the others are told, not that a callback heard of it
        raise not_finite(step, what, value, self.saved_in)

    def tell(self, event: AnyEvent) -> bool:
        """Tell this rank's observers; whether one of them asked to stop."""
        stop = False
        for observer in self.observers:
            name = getattr(observer, "__name__", type(observer).__name__)
            self.work.doing(Doing(f"running the callback {name}, told of {event.kind}", "user"), len(self.losses))
            with users_code(f"step {len(self.losses)}: a callback, told of {event.kind},", JobFailedError):
                try:
                    observer(event)
                except StopTraining:
                    stop = True
        return stop

    def _tell_together(self, event: AnyEvent) -> bool:
        """Tell the observers, and all ranks what they asked for; without callbacks nobody can ask."""
        if not self.work.callbacks:
            return self.tell(event)
        if self.work.requests:
            self.requests.begin()
        stop = self.tell(event)
        if self.work.requests:
            self.work.doing(Doing("doing what callbacks ask for", "others"), len(self.losses))
            self.requests.end()
        flag = torch.tensor([float(stop)])
        self.work.doing(_AGREEING, len(self.losses))
        dist.all_reduce(flag)
        return bool(flag.item() > 0)

    def _evaluate_when_due(self, step: int) -> bool:
        """Evaluate after the last step and every so many; whether an observer asked to stop."""
        evaluation = self.work.evaluation
        self.unevaluated = evaluation is not None and evaluates_after(self.job, step, self.job.total_steps)
        if evaluation is None or not self.unevaluated:
            return False
        return self.evaluate(evaluation, None)

    def evaluate(self, evaluation: Evaluation, dataset: Dataset | None) -> bool:
        """Evaluate on the job's own data, as it planned, or other; whether an observer asked to stop."""
        averages = self.updater.averages() if self.job.eval_ema else {}
        if self.save_first is not None and not self.evaluations:
            self.save_first()
        self.evaluations.append(evaluation.run(self.last_step, self.moment, dataset, averages))
        if dataset is None:
            for turn in self.work.turns:
                turn.executor.updater.evaluated(self.last_step, self.evaluations[-1].loss)
            self.unevaluated = False
        return self._tell_together(self.evaluations[-1])

    def _started(self) -> RunStarted:
        return RunStarted(
            at_seconds=self.moment(),
            name=self.job.name,
            mode=LOCKSTEP.name,
            steps=self.job.total_steps,
            batch_size=self.job.batch_size,
            samples=self.job.samples.length,
            parameters=self.work.trainable_parameters,
            devices=self.work.layout.devices,
            precision=self.job.precision,
            seed=self.job.seed,
            unix_seconds=time.time(),
            frozen_parameters=self.work.frozen_parameters,
            num_workers=self.job.num_workers,
        )

    def finish(self, reason: "Reason | Literal['failed']", message: str = "") -> None:
        """Tell how the run ended."""
        self.tell(
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
