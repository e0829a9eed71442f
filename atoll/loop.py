"""Your own loop: `atoll.step` owns one step of it, alone or among other processes. `Job.run` is a loop over the same Training.

```
with atoll.step(model, loss=loss, optimizer=optimizer, data=data, batch_size=32, steps=1000) as step:
    for batch in step.batches():
        loss = step(batch)
        if step.number % 100 == 0:
            print(step.number, loss, step.evaluate(held_out).loss)
```
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from atoll.blame import SentenceIfUncaught, in_words, showing_lines
from atoll.built_optimizer import UntouchedOptimizer, built_anew
from atoll.callbacks import Callback
from atoll.cluster import Cluster
from atoll.collaboration import check_not_divided
from atoll.data import Batch, Dataset
from atoll.errors import AtollError, JobError, JobFailedError
from atoll.events import Evaluated, EventLog
from atoll.job import Job, LossFunction, RunResult, local_device
from atoll.plan import Plan
from atoll.randomness import mix, own_randomness
from atoll.runtime.checkpoint.trained import load_trained
from atoll.runtime.modes.alone.runtime import opened_run
from atoll.runtime.modes.alone.trainer import training_alone
from atoll.runtime.modes.lockstep.role import Role, find_role
from atoll.runtime.training import STEP, Training, train
from atoll.script import run_opener, when_script_ends
from atoll.watch.progress import Progress

__all__ = ["ClusterSource", "GlobalBatch", "PlanSource", "RunArguments", "TrainingStep", "load_trained_model", "run_job", "step"]

PlanSource: TypeAlias = Plan | str | Path
ClusterSource: TypeAlias = Cluster | str | Path
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What `Job.run` and `atoll.step` are told about the run, beside the job."""

    out: str | Path | None = None
    device: torch.device | str | None = None
    progress: bool = True
    plan: PlanSource | None = None
    cluster: ClusterSource | None = None
    resume: str | Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise JobError(f"Job: checkpoint_every: must be a positive whole number, got {every!r}")
        if isinstance(self.resume, bool):
            raise JobError("Job: run: resume: give the directory of the run to go on with, such as resume='runs/first'")
        if self.resume is not None and self.out is not None and Path(self.out).resolve() != Path(self.resume).resolve():
            raise JobError(f"Job: run: out: a resumed run goes on in its own directory, {self.resume}; leave out out")

    @property
    def directory(self) -> Path | None:
        """Everything about the run is in it."""
        path = self.out if self.resume is None else self.resume
        return None if path is None else Path(path)


def load_trained_model(job: Job, run: Path, step: int | None) -> nn.Module:
    """The model with the weights of a run's checkpoint, on the CPU."""
    return load_trained(job, run, step)[0]


def run_job(job: Job, arguments: RunArguments) -> RunResult:
    """All of a job's steps: what `Job.run` does."""
    role = find_role(os.environ)
    with ExitStack() as stack:
        if role is None:
            stack.enter_context(own_randomness(mix(job.seed, 4)))
        training = stack.enter_context(_opened(job, arguments, role, own_loop=False))
        train(training)
        training.bring_model()
    return training.result()


def _opened(job: Job, arguments: RunArguments, role: Role | None, *, own_loop: bool) -> AbstractContextManager[Training]:
    """The job, ready for its first step: as the command that executes the script will have it; else alone, or among other processes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise JobError(
            "Job: num_workers: a process that loads data imports the script, which would train again there; "
            'put what trains under `if __name__ == "__main__":`'
        )
    opener = run_opener()
    if opener is not None:
        return opener(job, own_loop)
    return _opened_alone(job, arguments, own_loop) if role is None else _opened_among_others(job, arguments, role)


@contextmanager
def _opened_alone(job: Job, arguments: RunArguments, own_loop: bool) -> Iterator[Training]:
    if arguments.plan is not None or arguments.cluster is not None:
        raise JobError("Job: run: plan and cluster are for several processes: start them with torchrun, or use `atoll run`")
    if arguments.checkpoint_every is not None and arguments.directory is None:
        raise JobError("Job: run: checkpoint_every: there is nowhere to save; give a directory with out")
    with ExitStack() as stack:
        observers: list[Callback] = []
        saved_in = None
        if arguments.directory is not None:
            resume, every = arguments.resume is not None, arguments.checkpoint_every
            saved_in = stack.enter_context(opened_run(arguments.directory, resume=resume, checkpoint_every=every))
            observers.append(stack.enter_context(EventLog(arguments.directory, resume=True)))
        if arguments.progress:
            resumed = f"resume={str(arguments.directory)!r}"
            goes_on = f"atoll.step(…, {resumed})" if own_loop else f"job.run({resumed})"
            observers.append(stack.enter_context(Progress(goes_on=goes_on)))
        device = local_device(arguments.device)
        yield stack.enter_context(training_alone(job, device=device, observers=[*observers, *job.callbacks], saved_in=saved_in))


@contextmanager
def _opened_among_others(job: Job, arguments: RunArguments, role: Role) -> Iterator[Training]:
    from atoll.runtime.modes.lockstep.worker import training_among_others  # what one process alone need not load

    check_not_divided(job)
    with Progress(quiet=not arguments.progress) as shown:
        observers: list[Callback] = [shown] if arguments.progress and role.rank == 0 else []
        with training_among_others(
            job,
            role,
            out=arguments.directory,
            plan=arguments.plan,
            cluster=arguments.cluster,
            resume=arguments.resume is not None,
            checkpoint_every=arguments.checkpoint_every,
            observers=[*observers, *job.callbacks],
            own=shown,
            environ=os.environ,
        ) as training:
            yield training


class LoopJob(Job):
    """The job of a loop that may give `step.evaluate` data of its own, for its metrics too."""

    evaluates_other_data = True


@dataclass(frozen=True)
class GlobalBatch:
    """A step's batch, before any process has loaded its part of it: which step it is for, and which samples of the data make it up."""

    number: int
    """Of the step, counted from 1."""
    job: Job

    @property
    def indices(self) -> list[int]:
        """Of its samples, in the data."""
        first = (self.number - 1) * self.job.batch_size
        return [self.job.samples.index(position) for position in range(first, first + self.job.batch_size)]

    def load(self) -> Batch:
        """All its samples, collated, on the CPU: to look at. What the step computes does not come from here."""
        return self.job.samples.batch(self.number - 1)


def step(
    model: nn.Module | Callable[[], nn.Module],
    *,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    data: Any,
    out: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    plan: PlanSource | None = None,
    cluster: ClusterSource | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int | None = None,
    **arguments: Any,
) -> "TrainingStep":
    """One step of a loop of your own, under any lockstep plan: `Job`'s arguments and those of `Job.run`.

    `optimizer` may be built already, over `model.parameters()`; it is built anew, as every device needs it. Under `atoll run` the command
    says where the run is written and what runs where.
    """
    with SentenceIfUncaught(), showing_lines():
        own: dict[str, Any] = {"optimizer": optimizer}
        if isinstance(optimizer, torch.optim.Optimizer):
            if arguments.get("parameter_groups") is not None:
                raise JobError("atoll.step: parameter_groups: this optimizer is built and has groups already; leave out one of them")
            own = built_anew(optimizer, model).arguments()
        job = LoopJob(model=model, loss=loss, data=data, **{**arguments, **own})
        about = RunArguments(
            out=out, device=device, progress=progress, plan=plan, cluster=cluster, resume=resume, checkpoint_every=checkpoint_every
        )
        return TrainingStep(job, about, given=optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)


class TrainingStep:
    """Makes steps. Every process of a run makes the same calls in the same order, and gets the same numbers.

    Whatever ends the loop, the weights are those after a whole step, and saved if the run has a directory. Leave it as a context manager,
    by `close`, or with the script: until then `evaluate`, `save` and `state_dict` go on working after the last step.
    """

    def __init__(self, job: Job, arguments: RunArguments | None = None, *, given: torch.optim.Optimizer | None = None) -> None:
        self.job = job
        self._given = UntouchedOptimizer(given) if given is not None else None
        role = find_role(os.environ)
        self.rank = role.rank if role is not None else 0
        """Of this process: 0 is the one to print and to write files."""
        self._devices = role is None  # generators of accelerators are put back too where one process has them all
        with ExitStack() as stack, own_randomness(mix(job.seed, 4), devices=self._devices):
            self._training: Training = stack.enter_context(_opened(job, arguments or RunArguments(), role, own_loop=True))
            self._open: ExitStack | None = stack.pop_all()
        stale = job.model if self._training.model is None and isinstance(job.model, nn.Module) else None
        self._elsewhere = _TrainedElsewhere(stale)
        self._left = when_script_ends(self._end)

    @property
    def number(self) -> int:
        """Of the last step, counted from 1; 0 before the first. A resumed run goes on where it was."""
        return len(self._training.losses)

    @property
    def steps(self) -> int:
        """How many there will be in all."""
        return self.job.total_steps

    @property
    def losses(self) -> tuple[float, ...]:
        """Of all steps, those before the run was resumed included."""
        return tuple(self._training.losses)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps, over what this process has of the model. What is set in its groups must be set alike by every process."""
        return self._training.optimizer

    def batches(self) -> Iterator[GlobalBatch]:
        """A batch for every step that is left. It ends after the last one, after Ctrl-C, and when a callback or `stop` asked for it."""
        while self._training.reason is None:
            due = self.number + 1
            yield GlobalBatch(due, self.job)
            if self.number < due:
                with SentenceIfUncaught():
                    raise JobError(f"the loop went on to the next batch without step(batch) for batch {due}; every batch is one step")
        self._together("end the run", self._training.save_last)

    def __call__(self, batch: GlobalBatch) -> float:
        """Make the batch's step: forward, backward, clipping, optimizer, schedule. Returns the loss of the whole batch, before it.

        An evaluation or a save that is due after it, by `eval_every` and `checkpoint_every`, is made.
        """
        with SentenceIfUncaught():
            self._check_batch(batch)
        self._together(STEP, self._training.step)
        return self._training.losses[-1]

    def _check_batch(self, batch: GlobalBatch) -> None:
        if not isinstance(batch, GlobalBatch) or batch.job is not self.job:
            raise JobError(f"step(batch): give it what step.batches() yields, not {type(batch).__name__}; it knows which samples are meant")
        if batch.number != self.number + 1:
            raise JobError(f"step(batch): this is batch {batch.number}, and the next step is {self.number + 1}; each batch is one step")
        if self._given is not None:
            self._given.check()

    def stop(self) -> None:
        """Let the next step be the last, on all processes; one of them may ask for it, by a clock of its own."""
        self._training.stop()

    def evaluate(self, dataset: Dataset | None = None) -> Evaluated:
        """Loss and `metrics` of the weights as they are, on this data or the job's `eval_data`: `.loss`, `.metrics`."""
        data = dataset if dataset is not None else self.job.eval_dataset
        if data is None:
            with SentenceIfUncaught():
                raise JobError("step.evaluate: give it data to evaluate on, or eval_data to atoll.step")
        return self._together("evaluate", lambda: self._training.evaluate(data))

    def save(self) -> None:
        """Save a checkpoint now, beside those that are saved anyway; the run must have a directory."""
        self._together("save", self._training.save)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, copied to the CPU of the first process, whatever the plan; empty on the others."""
        return self._together("take the state_dict", self._training.state_dict)

    def _together(self, name: str, act: Callable[[], T]) -> T:
        """What all processes do together. What goes wrong inside ends the run."""
        with SentenceIfUncaught():
            if self._open is None:
                raise JobError(f"step: cannot {name}: the run has ended")
            try:
                with showing_lines(), own_randomness(devices=self._devices), self._elsewhere.lifted():
                    self._training.together(name)
                    return act()
            except BaseException as error:
                self._leave(error)
                raise

    def close(self) -> None:
        """End the run: the last checkpoint is saved, and all who listen are told how it ended."""
        if self._open is not None:
            self._together("end the run", lambda: None)
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        stack, self._open = self._open, None
        self._left()
        if stack is not None:
            stack.__exit__(type(error) if error is not None else None, error, error.__traceback__ if error is not None else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception) and not isinstance(error, AtollError):
            self._leave(JobFailedError(f"step {self.number}: the loop failed: {in_words(error)}"))
        else:
            self._leave(error)


class _TrainedElsewhere:
    """A module of the user's whose weights are trained in parts, elsewhere: what is asked of it would be answered with the first ones."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model, self._hooks = model, list[Any]()
        self._refuse()

    def _refuse(self) -> None:
        def refuse(*arguments: object) -> NoReturn:
            raise JobError(
                "the model's weights are trained in parts by several processes, and this copy still has the first ones; "
                "use step.evaluate(data), or step.state_dict() for the weights"
            )

        if self._model is not None:
            model: Any = self._model
            self._hooks = [model.register_forward_pre_hook(refuse), model.register_state_dict_pre_hook(refuse)]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For Atoll's own use of it."""
        for hook in self._hooks:
            hook.remove()
        try:
            yield
        finally:
            self._refuse()
