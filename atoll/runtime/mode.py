"""A mode at work: what it is given to run a job, what it must be able to do, and how it is found from its rules.

The modules that runtimes live in are imported to check options and to report, too: what needs PyTorch is imported when a job is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

import msgspec

from atoll.cluster import Cluster
from atoll.errors import PlanError
from atoll.events import Observer
from atoll.plan import Plan
from atoll.plan.modes import mode_rules
from atoll.runtime.report import ModeReport, RunSummary
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.supervise.placement import Placement

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job
    from atoll.runtime.evaluated_programs import EvaluatedPrograms

__all__ = ["CapturedJob", "ModeRuntime", "RunOutcome", "ResumePoint", "RunContext", "mode_runtime", "newest_checkpoint"]


@dataclass(frozen=True)
class CapturedJob:
    """A job that was captured once, for all processes of a run: so all have the same layers."""

    job: "Job"
    captured: "Captured | Uncaptured"  # of training, for pieces of a batch
    evaluated: "EvaluatedPrograms | None" = None  # of what lockstep evaluates; None: whoever needs it captures it


@dataclass(frozen=True)
class RunContext:
    """Everything a mode is given: nothing of it has been written before `check` has passed."""

    directory: RunDirectory
    settings: RunSettings
    plan: Plan
    options: msgspec.Struct  # of the class that the mode's rules name
    job: "Job"
    captured: "Captured | Uncaptured | None"  # None for a mode that needs no devices where none were given
    cluster: Cluster | None  # the plan's, where it is known
    resumed: bool
    max_restarts: int
    say: Callable[[str], None]  # a line for people
    place: Callable[[Sequence[str], bool], Placement]  # of processes on these hosts; True: they must see the run's directory
    resume_point: "ResumePoint | None" = None  # what `resume` said, for `launch`
    observers: Sequence[Observer] = ()  # that show what happens, for modes that emit events in this process


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    exit_code: int = 0
    resumable: bool = False  # it was interrupted, and left something to go on from


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    step: int  # steps made before
    sentence: str = ""  # for people, where the run's events do not say it


class ModeRuntime(Protocol):
    """What a mode can do; one object for all runs."""

    def check_options(self, options: msgspec.Struct) -> None:
        """JobError for values that mean nothing. Asked before the model is captured, which takes long."""

    def check(self, run: RunContext) -> None:
        """AtollError where the mode cannot run this job by this plan, or go on in this directory. Nothing is written or started yet."""

    def resume(self, run: RunContext) -> ResumePoint | None:
        """Prepares the directory for those who go on in it; None where nothing was saved yet, so that the run begins anew."""

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """What processes of the run begin with that are forked from the one this is called in; it imports what they need."""

    def launch(self, run: RunContext) -> RunOutcome:
        """Trains, and comes back when it is over."""

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """Whether the run in a directory answers; None where that cannot be told, and its last event has to."""

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """What the mode has to say of a run, beside what its events say in every mode."""


def newest_checkpoint(directory: RunDirectory) -> ResumePoint | None:
    """Where a run goes on that is in the checkpoints of its directory; None where there are none."""
    from atoll.runtime.checkpoint.directory import find

    found = find(directory.checkpoints, None)
    step = int(found.name.removeprefix("step-")) if found is not None else None
    return ResumePoint(step) if step is not None else None


@cache
def mode_runtime(name: str) -> ModeRuntime:
    """The runtime of a mode; a `PlanError` says why it cannot be loaded."""
    place = mode_rules(name).runtime
    try:
        made: ModeRuntime = resolve_name(place)()
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"mode {name}: its runtime, {place}, cannot be loaded: {error}") from error
    return made
