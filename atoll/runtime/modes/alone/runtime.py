"""Alone as a mode: the job in this process, on this machine's accelerator or CPU."""

from dataclasses import replace

import msgspec

from atoll.events import EventLog
from atoll.runtime.mode import ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, RunSummary, read_prediction
from atoll.runtime.run_directory import RunDirectory

__all__ = ["AloneRuntime"]

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

    def launch(self, run: RunContext) -> RunOutcome:
        """Trains in micro-batches as the plan has them; on Ctrl-C the step under way ends first."""
        from atoll.blame import showing_lines
        from atoll.job import local_device  # PyTorch takes seconds to load: mistakes are told before
        from atoll.runtime.modes.alone.trainer import train_alone
        from atoll.script import seen_arguments

        job, size = run.job, run.plan.micro_batch_size
        if size != (job.micro_batch_size or job.batch_size):
            job = replace(job, micro_batch_size=size)
        with (
            seen_arguments(run.settings.script, run.settings.arguments),
            showing_lines(),
            EventLog(run.directory.path, resume=True) as log,
        ):
            result = train_alone(
                job, device=local_device(), observers=[log, *run.observers, *job.callbacks], saved_in=(run.directory, run.settings)
            )
        interrupted = result.reason == "interrupted"
        return RunOutcome(_INTERRUPTED if interrupted else 0, resumable=interrupted)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """It listens nowhere."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """Events say all there is, but for the step that was predicted."""
        predicted = read_prediction(directory)
        return ModeReport(predicted_step_seconds=None if predicted is None else predicted.step_seconds)
