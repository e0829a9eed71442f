"""Alone as a mode: the job in this process, on this machine's accelerator or CPU."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.callbacks import Callback
from atoll.events import EventLog
from atoll.plan.modes.alone import ALONE
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, RunSummary, read_prediction
from atoll.runtime.run_directory import RunDirectory, RunSettings, run_lock

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job
    from atoll.script import RunOpener

__all__ = ["AloneRuntime", "opened_run"]

_INTERRUPTED = 130


class AloneRuntime:
    """One process, one device, no cut."""

    def check_options(self, options: msgspec.Struct) -> None:
        """There are none."""

    def check(self, run: RunContext) -> None:
        """Whatever plan its rules allow can be run."""

    def resume(self, run: RunContext) -> ResumePoint | None:
        """The newest checkpoint, whoever wrote it."""
        return newest_checkpoint(run.directory)

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """It starts no processes."""
        return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Trains in micro-batches as the plan has them; on Ctrl-C the step under way ends first."""
        from atoll.job import Job, local_device  # PyTorch takes seconds to load: mistakes are told before
        from atoll.runtime.modes.alone.trainer import AloneTrainer, training_alone
        from atoll.script import execute

        size, settings, opened = run.plan.micro_batch_size, run.settings, list[AloneTrainer]()
        with EventLog(run.directory.path, resume=True) as log:

            @contextmanager
            def opener(job: Job, own_loop: bool) -> Iterator[AloneTrainer]:
                if size != (job.micro_batch_size or job.batch_size):
                    job = replace(job, micro_batch_size=size)
                observers: list[Callback] = [log, *run.observers, *job.callbacks]
                with training_alone(job, device=local_device(), observers=observers, saved_in=(run.directory, settings)) as trainer:
                    opened.append(trainer)
                    yield trainer

            try:
                if settings.own_loop:
                    execute(settings.script, settings.arguments, opener)
                else:
                    self._train(run, opener)
            except KeyboardInterrupt:  # the second Ctrl-C, or one before the first step
                return RunOutcome(_INTERRUPTED, resumable=newest_checkpoint(run.directory) is not None)
        interrupted = bool(opened) and opened[-1].reason == "interrupted"
        return RunOutcome(_INTERRUPTED if interrupted else 0, resumable=interrupted)

    @staticmethod
    def _train(run: RunContext, opener: "RunOpener") -> None:
        from atoll.blame import showing_lines
        from atoll.randomness import mix, own_randomness
        from atoll.runtime.training import train
        from atoll.script import seen_arguments

        with seen_arguments(run.settings.script, run.settings.arguments), showing_lines(), ExitStack() as stack:
            stack.enter_context(own_randomness(mix(run.job.seed, 4)))
            train(stack.enter_context(opener(run.job, False)))

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """It listens nowhere."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """Events say all there is, but for the step that was predicted."""
        predicted = read_prediction(directory)
        return ModeReport(predicted_step_seconds=None if predicted is None else predicted.step_seconds)


@contextmanager
def opened_run(path: Path, *, resume: bool, checkpoint_every: int | None) -> Iterator[tuple[RunDirectory, RunSettings]]:
    """A new run's directory, or that of a run to go on with, held by this process until it leaves."""
    directory = RunDirectory(path)
    settings = RunSettings(
        script=str(Path(sys.argv[0]).resolve()), arguments=tuple(sys.argv[1:]), mode=ALONE.name, checkpoint_every=checkpoint_every
    )
    if resume:
        before = directory.settings()  # an error where there is no run to go on with
        every = checkpoint_every if checkpoint_every is not None else before.checkpoint_every
        settings = msgspec.structs.replace(settings, checkpoint_every=every, keep_last=before.keep_last)
    else:
        directory.check_new()
    with run_lock(path):
        if resume:
            directory.write_settings(settings)
        else:
            directory.create(settings)
        yield directory, settings
