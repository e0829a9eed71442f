"""What a run's events say of it: how far it came, its losses, what was done twice. Restarts and resumes are folded into one story."""

import time
from collections import Counter
from pathlib import Path
from statistics import median

import msgspec

from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    NonFinite,
    Restarted,
    RunFinished,
    RunStarted,
    StepFinished,
    WorkerFailed,
    read_events,
    steps_after_the_first,
)
from atoll.plan.modes import find_rules
from atoll.units import format_seconds

__all__ = ["EventStory", "SampleCounts", "is_silent", "starts_in_first_step", "tell_events"]

_SILENT_SECONDS = 120.0  # a file of events nobody has written to for so long, and for so many steps, is no run under way
_SILENT_STEPS = 10
_STARTING_SECONDS = 30.0  # so long nobody may listen while a coordinator is started in another's place


class SampleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the training data, counted once for every time they were computed on."""

    committed: int  # in the weights the run ended with, or has reached
    lost: int  # computed for nothing: skipped steps, steps after the last checkpoint of a run that failed
    redone: int  # computed again after going back to a checkpoint


class EventStory(msgspec.Struct, frozen=True, kw_only=True):
    """A run, by its events alone."""

    name: str
    mode: str
    state: str  # "done", "stopped", "interrupted", "failed", "running", "silent" (it ended without a word, or stands still), "not started"
    message: str
    steps: int  # made
    planned_steps: int
    losses: list[float]  # one a step, the last that was computed
    samples: SampleCounts
    step_seconds: float | None  # median, without each process's first; of the last start that made steps
    steps_since_start: int  # made since the run was last started: none where nothing was left to do
    samples_per_second: float | None  # redone ones included; without each start's first step where that lasts from the start
    counts: dict[str, int]  # events by kind


def tell_events(path: Path, listening: bool | None = None) -> EventStory:
    """The story of `events.jsonl`; of a run that has not begun if there is none. `listening`: whether its coordinator is, if known."""
    if not path.exists():
        return _story([], "not started", "")
    events = list(read_events(path))
    age = max(0.0, time.time() - path.stat().st_mtime)
    steps = [event.seconds for event in events if isinstance(event, StepFinished)]
    silent = is_silent(age, median(steps) if steps else 0.0, listening)
    return _story(events, *_state(events, f"last heard of {format_seconds(age)} ago" if silent else None))


def is_silent(age_seconds: float, step_seconds: float, listening: bool | None) -> bool:
    """Whether a run that has not said how it ended has ended all the same, by the age of its last event and the usual step."""
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
                return "failed", event.message if isinstance(
                    event, WorkerFailed
                ) else f"step {event.step}: the {event.what} is {event.value}"
            case RunStarted() | Restarted() | StepFinished():
                return ("silent", silent) if silent is not None else ("running", "")
    return "not started", ""


def _story(events: list[AnyEvent], state: str, message: str) -> EventStory:
    started = [event for event in events if isinstance(event, RunStarted)]
    steps = [event for event in events if isinstance(event, StepFinished)]
    last = {event.step: event for event in steps}
    losses = [last[step].loss for step in sorted(last)]
    starts = _seconds_by_start(events)
    latest = next((seconds for seconds in reversed(starts) if seconds), [])
    return EventStory(
        name=started[-1].name if started else "",
        mode=started[-1].mode if started else "",
        state=state,
        message=message,
        steps=len(last),
        planned_steps=started[-1].steps if started else 0,
        losses=losses,
        samples=_samples(events, steps, last, state),
        step_seconds=median(latest[2:] or latest[1:] or latest) if latest else None,
        steps_since_start=len(starts[-1]),
        samples_per_second=_rate(steps_after_the_first(events) if started and starts_in_first_step(started[-1].mode) else steps),
        counts=dict(sorted(Counter(event.kind for event in events).items())),
    )


def starts_in_first_step(mode: str) -> bool:
    """Whether a mode's first step lasts from the start of the run, so that it tells no speed."""
    rules = find_rules(mode)
    return rules is not None and rules.starts_in_first_step


def _rate(steps: list[StepFinished]) -> float | None:
    seconds = sum(event.seconds for event in steps)
    return sum(event.samples for event in steps) / seconds if seconds else None


def _samples(events: list[AnyEvent], steps: list[StepFinished], last: dict[int, StepFinished], state: str) -> SampleCounts:
    kept = set(last)
    if state in ("failed", "silent") and any(isinstance(event, RunStarted) for event in events):
        saved = _saved_step(events)
        kept = {step for step in last if step <= saved}
    kept = {step for step in kept if last[step].applied}
    once = sum(event.samples for event in last.values())
    committed = sum(last[step].samples for step in kept)
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
