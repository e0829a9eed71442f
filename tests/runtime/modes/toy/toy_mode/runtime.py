"""The toy at work: a process that trains the job, as `atoll run` starts it, and writes down how polite it was."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from toy_mode import ToyOptions

from atoll.errors import JobError
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured
from atoll.job import Job
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, ReportSection, ReportTable, RunSummary
from atoll.runtime.run_directory import RunDirectory

__all__ = ["ToyRuntime"]

_WRITTEN = "toy.json"


class _Written(msgspec.Struct):
    niceness: int
    own_process: bool


class ToyRuntime:
    """Everything Atoll asks of a mode."""

    def check_options(self, options: msgspec.Struct) -> None:
        """A number that means nothing here."""
        if _own(options).niceness == 13:
            raise JobError("--niceness 13: brings bad luck; give another")

    def check(self, run: RunContext) -> None:
        """A job that the toy does not like."""
        if run.job.precision != "fp32":
            raise JobError("the toy knows fp32 only")

    def resume(self, run: RunContext) -> ResumePoint | None:
        """From the checkpoint that every mode writes."""
        return newest_checkpoint(run.directory)

    def hand_over(self, job: Job, captured: Captured | Uncaptured) -> CapturedJob:
        """Its process is not forked."""
        return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Starts the process and waits for it."""
        placement = run.place([run.plan.stages[0].devices[0].rpartition("/")[0]], True)
        run.say(f"starting a polite process {placement.where}")
        command = [sys.executable, "-m", "toy_mode.runtime", str(run.directory.path), str(_own(run.options).niceness), str(os.getpid())]
        return RunOutcome(subprocess.run(command, check=False).returncode)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """It listens nowhere."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """How polite it was."""
        if not (directory.path / _WRITTEN).exists():
            return ModeReport(missing=("toy.json: the toy has not written it",))
        found = directory.read_as(_WRITTEN, _Written)
        table = ReportTable(title="Politeness", columns=("", "niceness"), rows=(("its process", str(found.niceness)),))
        section = ReportSection(facts={"toy": found}, title="Toy", lines=("it was polite",), tables=(table,), brief=True)
        return ModeReport(sections=(section,))


def _own(options: msgspec.Struct) -> ToyOptions:
    assert isinstance(options, ToyOptions)
    return options


def _main(path: Path, niceness: int, parent: int) -> int:
    from atoll.events import EventLog
    from atoll.job import local_device
    from atoll.runtime.modes.alone.trainer import train_alone
    from atoll.script import load_job

    directory = RunDirectory(path)
    settings = directory.settings()
    job = load_job(settings.script, settings.arguments)
    reached = os.nice(niceness)
    with EventLog(path, resume=True) as log:
        train_alone(job, device=local_device(), observers=[log], saved_in=(directory, settings))
    directory.write(_WRITTEN, msgspec.json.encode(_Written(reached, os.getpid() != parent)))
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
