"""The report of a run: what its events say, and what its mode has to say beside that — predicted against measured, who came and went.

It reads the run's directory and says what is missing there; it needs neither PyTorch nor the training script.
"""

from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import PlanError
from atoll.runtime.mode import ModeRuntime, mode_runtime
from atoll.runtime.report import ModeReport, ReportSection, RunSummary
from atoll.runtime.run_directory import RunDirectory
from atoll.watch.run_events import EventStory, SampleCounts, tell_events

__all__ = ["RunReport", "read_report"]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """A step."""

    median: float | None
    predicted: float | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to say about a run."""

    mode: str
    name: str
    state: str
    message: str
    steps: int
    planned_steps: int
    losses: list[float]
    samples: SampleCounts
    samples_per_second: float | None
    step_seconds: StepSeconds
    steps_since_start: int  # made since the run was last started or resumed
    events: dict[str, int]
    conclusion: str
    missing: list[str]  # what could not be reported, and why
    sections: tuple[ReportSection, ...]  # of its mode

    @property
    def facts(self) -> dict[str, Any]:
        """What the mode's sections say, by their keys in JSON; `link_bytes` is there in every mode."""
        return {"link_bytes": {}, **{key: value for section in self.sections for key, value in section.facts.items()}}

    def to_json(self) -> str:
        """What `atoll report --json` prints."""
        common = {name: getattr(self, name) for name in self.__struct_fields__ if name != "sections"}
        return msgspec.json.format(msgspec.json.encode({**common, **self.facts}), indent=1).decode()


def read_report(path: str | Path) -> RunReport:
    """The report of the run in a directory, whether it is done, failed, under way or was resumed."""
    directory = RunDirectory(path)
    if not directory.events.exists():
        directory.read("run.json")  # says what is wrong with a directory that holds no run
    missing: list[str] = []
    story = tell_events(directory.events)
    mode = story.mode or (directory.settings().mode if (directory.path / "run.json").exists() else "")
    runtime = _runtime(mode, missing)
    if runtime is not None and (listening := runtime.is_listening(directory)) is not None:
        story = tell_events(directory.events, listening)
    if not directory.events.exists() and (directory.path / "measured").exists():
        missing.append("events.jsonl: it is not there, though something was measured, so what happened is not known")
    summary = RunSummary(state=story.state, step_seconds=story.step_seconds, steps_since_start=story.steps_since_start)
    own = runtime.report(directory, summary) if runtime is not None else ModeReport()
    return RunReport(
        mode=mode,
        name=story.name,
        state=story.state,
        message=story.message,
        steps=story.steps,
        planned_steps=story.planned_steps,
        losses=story.losses,
        samples=story.samples,
        samples_per_second=story.samples_per_second,
        step_seconds=StepSeconds(median=story.step_seconds, predicted=own.predicted_step_seconds),
        steps_since_start=story.steps_since_start,
        events=story.counts,
        conclusion=_conclusion(story, own),
        missing=[*missing, *own.missing],
        sections=own.sections,
    )


def _runtime(mode: str, missing: list[str]) -> ModeRuntime | None:
    """The mode's, if it is known here: a run may have been made where more are installed."""
    if not mode:
        return None
    try:
        return mode_runtime(mode)
    except PlanError as error:
        missing.append(f"the mode's own part: {error}")
        return None


def _conclusion(story: EventStory, own: ModeReport) -> str:
    if story.step_seconds is None:
        return "No step was finished, so there is nothing to compare."
    if not story.steps_since_start and story.state != "running":
        return (
            "No step was left to do when the run was last started; what is said here was measured before." if story.state == "done" else ""
        )
    return own.conclusion
