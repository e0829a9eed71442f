"""The report of a run: what was predicted against what was measured — the step, each stage, collective and link, memory — and where they
differ most. It reads the run's directory and says what is missing there; it needs neither PyTorch nor the training script.
"""

from pathlib import Path

import msgspec

from atoll.cluster import Cluster, load_cluster
from atoll.cost import Cost
from atoll.errors import AtollError, JobError
from atoll.events import read_events
from atoll.plan import Plan
from atoll.runtime.lockstep.measuring import RankMeasured, read_measured
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.measured import read_members
from atoll.watch.comparison import CollectiveReport, Compared, Comparison, Difference, LinkReport, StageReport, compare
from atoll.watch.listening import is_listening
from atoll.watch.run_events import EventStory, Samples, tell_events
from atoll.watch.swarm import SwarmReport, tell_swarm

__all__ = ["RunReport", "StepSeconds", "read_report"]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """A step."""

    median: float | None
    predicted: float | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to say about a run; encoded, it is what `atoll report --json` prints."""

    mode: str
    name: str
    state: str
    message: str
    steps: int
    planned_steps: int
    losses: list[float]
    samples: Samples
    samples_per_second: float | None
    step_seconds: StepSeconds
    steps_since_start: int  # made since the run was last started or resumed
    breakdown: dict[str, Compared]  # of a step, on the busiest rank
    stages: list[StageReport]
    collectives: list[CollectiveReport]
    links: list[LinkReport]
    link_bytes: dict[str, float]  # a step, as counted
    memory_bytes: dict[str, Compared]  # by device
    events: dict[str, int]
    differs_most: Difference | None
    conclusion: str
    missing: list[str]  # what could not be reported, and why
    swarm: SwarmReport | None = None


def read_report(path: str | Path) -> RunReport:
    """The report of the run in a directory, whether it is done, failed, under way or was resumed."""
    directory = RunDirectory(path)
    if not directory.events.exists():
        directory.read("run.json")  # says what is wrong with a directory that holds no run
    story = tell_events(directory.events, is_listening(directory))
    mode = story.mode or _planned_mode(directory)
    missing: list[str] = []
    if not directory.events.exists() and (directory.path / "measured").exists():
        missing.append("events.jsonl: it is not there, though something was measured, so what happened is not known")
    found = _found(directory, mode, missing)
    comparison, predicted = Comparison(), None
    if found is not None and (story.steps_since_start or found[3] or story.step_seconds is None):
        comparison = compare(*found, measured_step=story.step_seconds)
        predicted = found[2].step_seconds if found[2] is not None else None
    elif found is not None:  # steps were made, but all of them under a plan before this one
        missing.append("plan.json: no step was made under this plan, so there is nothing to compare")
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
        step_seconds=StepSeconds(median=story.step_seconds, predicted=predicted if mode != "swarm" else _predicted_step(directory)),
        steps_since_start=story.steps_since_start,
        breakdown=comparison.breakdown,
        stages=comparison.stages,
        collectives=comparison.collectives,
        links=comparison.links,
        link_bytes=comparison.link_bytes,
        memory_bytes=comparison.memory_bytes,
        events=story.counts,
        differs_most=comparison.differs_most,
        conclusion=_conclusion(directory, story, predicted, comparison),
        missing=missing,
        swarm=_swarm(directory, story.state == "silent") if mode == "swarm" else None,
    )


def _planned_mode(directory: RunDirectory) -> str:
    return directory.settings().mode if (directory.path / "run.json").exists() else ""


def _found(directory: RunDirectory, mode: str, missing: list[str]) -> tuple[Plan, Cluster | None, Cost | None, list[RankMeasured]] | None:
    """What there is of plan, cluster, prediction and measurements; `missing` gets a sentence for each that is not there."""
    if not (directory.path / "plan.json").exists():
        if mode != "alone":
            missing.append("plan.json: without it nothing can be compared")
        return None
    if mode == "swarm":
        return None  # told apart
    plan = directory.plan()
    cluster = load_cluster(directory.cluster) if directory.cluster.exists() else None
    if cluster is None or cluster.name != plan.cluster:
        missing.append(f"cluster.toml: the devices of {plan.cluster} are not known, so links are called by their devices")
        cluster = None
    predicted = _predicted(directory)
    if predicted is None or len(predicted.stages) != len(plan.stages):
        missing.append("predicted.json: nothing was predicted; `atoll run` does where --cluster describes the plan's devices")
        predicted = None
    ranks = read_measured(directory)
    absent = sorted({device for stage in plan.stages for device in stage.devices} - {rank.device for rank in ranks})
    if absent:
        shown = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        missing.append(f"measured/: {shown} have written nothing; ranks write after some seconds of training and when they end")
    elif any(not rank.exchanges and len(ranks) > 1 for rank in ranks):
        missing.append("measured/: no exchanges were counted; a rank's second step is")
    return plan, cluster, predicted, ranks


def _swarm(directory: RunDirectory, silent: bool) -> SwarmReport:
    plan = directory.plan() if (directory.path / "plan.json").exists() else None
    predicted = _predicted(directory)
    events = list(read_events(directory.events)) if directory.events.exists() else []
    micro_batches = -(-plan.batch_size // plan.micro_batch_size) if plan is not None else 0
    stages = len(plan.stages) if plan is not None else 0
    return tell_swarm(events, read_members(directory), micro_batches, stages, predicted, silent=silent)


def _predicted_step(directory: RunDirectory) -> float | None:
    predicted = _predicted(directory)
    return None if predicted is None else predicted.step_seconds


def _predicted(directory: RunDirectory) -> Cost | None:
    if not directory.predicted.exists():
        return None
    try:
        return msgspec.json.decode(directory.predicted.read_bytes(), type=Cost)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise AtollError(f"{directory.predicted}: this is not a prediction: {error}; remove it to report without it") from None
    except OSError as error:
        raise JobError(f"{directory.predicted}: cannot read it: {(error.strerror or str(error)).lower()}") from None


def _conclusion(directory: RunDirectory, story: EventStory, predicted: float | None, comparison: Comparison) -> str:
    """Where prediction and reality differ most, and what to do about it."""
    if story.step_seconds is None:
        return "No step was finished, so there is nothing to compare."
    if not story.steps_since_start and story.state != "running":
        return (
            "No step was left to do when the run was last started; what is said here was measured before." if story.state == "done" else ""
        )
    if predicted is None or comparison.differs_most is None:
        return ""
    ratio = story.step_seconds / predicted
    if 0.9 <= ratio <= 1.1:
        return f"Prediction and reality agree: a step took {ratio - 1:+.0%} against the prediction. {comparison.differs_most.sentence}"
    how = f"{ratio:.2g} times as long as predicted" if ratio >= 1 else f"{ratio:.0%} of the time predicted"
    calibration = directory.path / "calibration.json"
    advice = f" To plan with what was measured: `atoll plan … --calibration {calibration}`." if calibration.exists() else ""
    return f"A step took {how}. {comparison.differs_most.sentence}{advice}"
