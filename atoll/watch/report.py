"""The report of a run: what its events say, and what its mode has to say beside that — predicted against measured, who came and went.

It reads the run's directory and says what is missing there; it needs neither PyTorch nor the training script.
"""

import math
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from atoll.errors import PlanError
from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    Compiled,
    Logged,
    NonFinite,
    Restarted,
    RunFinished,
    RunStarted,
    StepFinished,
    WorkerFailed,
    read_events,
    steps_after_the_first,
)
from atoll.plan.modes import starts_in_first_step
from atoll.runtime.mode import ModeRuntime, mode_runtime
from atoll.runtime.report import ModeReport, ReportSection, RunSummary
from atoll.runtime.run_directory import RunDirectory, is_held
from atoll.units import format_seconds
from atoll.watch.describe import describe_event

__all__ = ["DataWaits", "RunReport", "SampleCounts", "is_silent", "read_report"]

_SILENT_SECONDS = 120.0  # a file of events nobody has written to for so long, and for so many steps, is no run under way
_SILENT_STEPS = 10
_WAITS_WORTH_TELLING = 0.05  # of the time
_STARTING_SECONDS = 30.0  # so long nobody may listen while a coordinator is started in another's place


class SampleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the training data, counted once for every time they were computed on."""

    committed: int  # in the weights the run ended with, or has reached
    lost: int  # computed for nothing: skipped steps, steps after the last checkpoint of a run that failed
    redone: int  # computed again after going back to a checkpoint


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """The median, without each process's first (of the last start that made steps), and what was predicted."""

    median: float | None
    predicted: float | None = None


class DataWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How long training waited for data, by the steps after each start's first, which waits for workers to begin."""

    waited_share: float  # of the steps' time
    loading_seconds_per_sample: float  # of one process
    num_workers: int  # for every process that trains
    workers_needed: int  # so that loading a step's data takes no longer than computing it

    def in_words(self) -> str:
        """What to do about it; nothing where there is no need."""
        if self.waited_share < _WAITS_WORTH_TELLING:
            return ""
        waited = f"Training waited for data {self.waited_share:.0%} of the time"
        if self.workers_needed > self.num_workers:
            return f"{waited}; num_workers={self.workers_needed} would cure it."
        loading = f"a sample takes {format_seconds(self.loading_seconds_per_sample)} to load"
        return f"{waited}, with num_workers={self.num_workers}: {loading}, and workers have too little of the processor or the disk."


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to say about a run."""

    mode: str
    name: str
    state: str  # "done", "stopped", "interrupted", "failed", "running", "silent" (it ended without a word, or stands still), "not started"
    message: str
    steps: int  # made
    planned_steps: int
    losses: list[float]  # one a step, the last that was computed
    samples: SampleCounts
    samples_per_second: float | None  # redone ones included; without each start's first step where that lasts from the start
    step_seconds: StepSeconds
    steps_since_start: int  # made since the run was last started: none where nothing was left to do
    events: dict[str, int]  # by kind
    codecs: list[str] = []  # how tensors went over links, where not as they are: "oslo-rome: int8", and what `--codec` said of others
    logged: dict[str, list[float]] = {}  # numbers that callbacks logged, by name, one a step, the last that was logged
    data: DataWaits | None = None  # None: nobody measured it
    compile_seconds: dict[str, float] = {}  # that torch.compile took, by process; of the only one under no name
    conclusion: str = ""
    missing: list[str] = []  # what could not be reported, and why
    sections: tuple[ReportSection, ...] = ()  # of its mode

    @property
    def facts(self) -> dict[str, Any]:
        """What the mode's sections say, by their keys in JSON; `link_bytes` is there in every mode."""
        return {"link_bytes": {}, **{key: value for section in self.sections for key, value in section.facts.items()}}

    def to_json(self) -> str:
        """What `atoll report --json` prints."""
        common = {name: getattr(self, name) for name in self.__struct_fields__ if name != "sections"}
        return msgspec.json.format(msgspec.json.encode({**common, **self.facts}), indent=1).decode()


def _tell_events(path: Path, listening: bool | None = None) -> RunReport:
    """What `events.jsonl` says; of a run that has not begun if there is none. `listening`: whether its coordinator is, if known."""
    held = is_held(path.parent)
    if not path.exists():
        return _story([], "not started", "")
    events = list(read_events(path))
    age = max(0.0, time.time() - path.stat().st_mtime)
    steps = [event.seconds for event in events if isinstance(event, StepFinished)]
    silent = is_silent(age, median(steps) if steps else 0.0, listening, held)
    return _story(events, *_state(events, f"last heard of {format_seconds(age)} ago" if silent else None))


def is_silent(age_seconds: float, step_seconds: float, listening: bool | None, held: bool | None = None) -> bool:
    """Whether a run that has not said how it ended has ended all the same, by the age of its last event and the usual step.

    Nobody who `held` its directory is there any more, where that is known: then it has, unless somebody listens for it.
    """
    if held is False and not listening:
        return True
    if listening is not None:
        return not listening and age_seconds > _STARTING_SECONDS
    return age_seconds > max(_SILENT_SECONDS, _SILENT_STEPS * step_seconds)


def _state(events: list[AnyEvent], silent: str | None) -> tuple[str, str]:
    """How it ended, by the last event that tells; what follows a failure may be a new beginning."""
    for event in reversed(events):
        match event:
            case RunFinished():
                return event.reason, event.message
            case WorkerFailed() | NonFinite():
                return "failed", event.message if isinstance(event, WorkerFailed) else describe_event(event)
            case RunStarted() | Restarted() | StepFinished():
                return ("silent", silent) if silent is not None else ("running", "")
    return "not started", ""


def _story(events: list[AnyEvent], state: str, message: str) -> RunReport:
    started = [event for event in events if isinstance(event, RunStarted)]
    steps = [event for event in events if isinstance(event, StepFinished)]
    last = {event.step: event for event in steps}
    losses = [last[step].loss for step in sorted(last)]
    starts = _seconds_by_start(events)
    latest = next((seconds for seconds in reversed(starts) if seconds), [])
    return RunReport(
        name=started[-1].name if started else "",
        mode=started[-1].mode if started else "",
        state=state,
        message=message,
        steps=len(last),
        planned_steps=started[-1].steps if started else 0,
        losses=losses,
        samples=_samples(events, steps, last, state),
        step_seconds=StepSeconds(median=median(latest[2:] or latest[1:] or latest) if latest else None),
        steps_since_start=len(starts[-1]),
        samples_per_second=_rate(steps_after_the_first(events) if started and starts_in_first_step(started[-1].mode) else steps),
        data=_data_waits(events),
        compile_seconds=_compile_seconds(events),
        events=dict(sorted(Counter(event.kind for event in events).items())),
        logged=_logged(events),
    )


def _compile_seconds(events: list[AnyEvent]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Compiled):
            found[event.source] += event.seconds  # type: ignore[assignment]
    return dict(found)


def _logged(events: list[AnyEvent]) -> dict[str, list[float]]:
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if isinstance(event, Logged):
            for name, value in event.numbers.items():
                found.setdefault(name, {})[event.step] = value
    return {name: [values[step] for step in sorted(values)] for name, values in sorted(found.items())}


def _data_waits(events: list[AnyEvent]) -> DataWaits | None:
    steps = [step for step in steps_after_the_first(events) if step.data_seconds is not None and step.loading_seconds is not None]
    seconds, samples = sum(step.seconds for step in steps), sum(step.samples for step in steps)
    if not seconds or not samples:
        return None
    waited, loading = (sum(getattr(step, name) for step in steps) for name in ("data_seconds", "loading_seconds"))
    computing = max(seconds - waited, 1e-3 * seconds)
    workers = next(event.num_workers for event in reversed(events) if isinstance(event, RunStarted))
    return DataWaits(
        waited_share=waited / seconds,
        loading_seconds_per_sample=loading / samples,
        num_workers=workers,
        workers_needed=math.ceil(loading / computing - 1e-3),
    )


def _rate(steps: list[StepFinished]) -> float | None:
    seconds = sum(event.seconds for event in steps)
    return sum(event.samples for event in steps) / seconds if seconds else None


def _samples(events: list[AnyEvent], steps: list[StepFinished], last: dict[int, StepFinished], state: str) -> SampleCounts:
    lossy = state in ("failed", "silent") and any(isinstance(event, RunStarted) for event in events)
    saved = _saved_step(events) if lossy else max(last, default=0)
    once = sum(event.samples for event in last.values())
    committed = sum(event.samples for step, event in last.items() if step <= saved and event.applied)
    return SampleCounts(committed=committed, lost=once - committed, redone=sum(event.samples for event in steps) - once)


def _saved_step(events: list[AnyEvent]) -> int:
    """The last step that a checkpoint was said to be whole of, since the run last went back."""
    saved = 0
    for event in events:
        if isinstance(event, CheckpointSaved):
            saved = event.step
        elif isinstance(event, RunFinished) and event.reason != "failed":
            saved = event.steps  # such a run saves before it says so
    return saved


def _seconds_by_start(events: list[AnyEvent]) -> list[list[float]]:
    """The steps' seconds of every time the run was started: another may have been under another plan."""
    starts: list[list[float]] = [[]]
    for event in events:
        if isinstance(event, RunStarted):
            starts.append([])
        elif isinstance(event, StepFinished):
            starts[-1].append(event.seconds)
    return starts


def read_report(path: str | Path) -> RunReport:
    """The report of the run in a directory, whether it is done, failed, under way or was resumed."""
    directory = RunDirectory(path)
    if not directory.events.exists():
        directory.read("run.json")  # says what is wrong with a directory that holds no run
    missing: list[str] = []
    story = _tell_events(directory.events)
    mode = story.mode or (directory.settings().mode if (directory.path / "run.json").exists() else "")
    runtime = _runtime(mode, missing)
    if runtime is not None and (listening := runtime.is_listening(directory)) is not None:
        story = _tell_events(directory.events, listening)
    if not directory.events.exists() and (directory.path / "measured").exists():
        missing.append("events.jsonl: it is not there, though something was measured, so what happened is not known")
    median_seconds = story.step_seconds.median
    summary = RunSummary(state=story.state, step_seconds=median_seconds, steps_since_start=story.steps_since_start)
    own = runtime.report(directory, summary) if runtime is not None else ModeReport()
    return msgspec.structs.replace(
        story,
        mode=mode,
        step_seconds=StepSeconds(median=median_seconds, predicted=own.predicted_step_seconds),
        codecs=_codecs(directory),
        conclusion=_conclusion(story, own),
        missing=[*missing, *own.missing],
        sections=own.sections,
    )


def _codecs(directory: RunDirectory) -> list[str]:
    """Those of the plan's links, and what was asked for where others join."""
    plan = directory.plan() if (directory.path / "plan.json").exists() else None
    asked = directory.settings().codec if (directory.path / "run.json").exists() else "none"
    links = [f"{link}: {codec}" for link, codec in (plan.codecs if plan is not None else {}).items() if codec != "none"]
    return [*links, *([f"asked for: {asked}"] if asked != "none" else [])]


def _runtime(mode: str, missing: list[str]) -> ModeRuntime | None:
    """The mode's, if it is known here: a run may have been made where more are installed."""
    if not mode:
        return None
    try:
        return mode_runtime(mode)
    except PlanError as error:
        missing.append(f"the mode's own part: {error}")
        return None


def _conclusion(story: RunReport, own: ModeReport) -> str:
    if story.step_seconds.median is None:
        return "No step was finished, so there is nothing to compare."
    if story.steps_since_start or story.state == "running":
        return own.conclusion
    done = "No step was left to do when the run was last started; what is said here was measured before."
    return done if story.state == "done" else ""
