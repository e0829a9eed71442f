"""What happens in a swarm becomes events and lines that people understand."""

import asyncio
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from atoll.control.coordinator import Coordinator
from atoll.control.membership import Member, Members, MissedHeartbeats
from atoll.control.messages import WorkerBeat
from atoll.control.settings import Settings
from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    CoordinatorStarted,
    EventLog,
    MemberMoved,
    MemberTooSlow,
    NonFinite,
    StageLost,
    StepFinished,
    StepRepaired,
    StopTraining,
)
from atoll.runtime.modes.swarm.coordinator_process import StartupProgress, _Coordinating, _Watching
from atoll.runtime.modes.swarm.files import CheckpointFiles, FileJournal
from atoll.runtime.modes.swarm.spec import JOURNAL, STATES, SwarmSpec, write_start
from atoll.runtime.run_directory import RunDirectory
from atoll.watch.describe import describe_event
from atoll.watch.progress import Progress

from .test_compute import job

SETTINGS = Settings(stages=1, micro_batches=1, steps=50)
ANNA, FEEDER = Member("anna", True, 7, 1, 1, 0.0), Member("feeder", False, 8, 1, -1, 0.0)
LINES = [
    (ANNA.changed("active", "joining"), "anna joined stage 1"),
    (FEEDER.changed("active", "joining"), "feeder joined"),
    (ANNA.changed("left", "active", "it asked to leave"), "anna left stage 1 (it asked to leave)"),
    (ANNA.changed("active", "silent"), "anna is back: heartbeats again"),
    (
        MemberTooSlow(name="anna", stage=1, fetched=0.375),
        "anna fetches the state of stage 1 too slowly: after 38% the next step replaced it, several times in a row. It keeps trying; a"
        " faster link, longer steps or more stages would let it join",
    ),
    (MemberMoved(name="anna", source=0, target=1, reason="it helps"), "anna moves from stage 0 to stage 1: it helps"),
    (StageLost(stage=0, step=20, epoch=1), "stage 0 has no worker left; all workers roll back to step 20"),
    (NonFinite(step=5, what="loss", value="nan"), "step 5: the loss is nan"),
    (CoordinatorStarted(term=2, step=5), "a new coordinator leads from step 5 on"),
    (CoordinatorStarted(term=1, step=0), "the coordinator leads from step 0 on"),
    (
        StepRepaired(step=5, micro_batches=(0, 3), reason="no progress"),
        "step 5: no progress; micro-batches computed again: 3 of stage 1",
    ),
]


@pytest.mark.parametrize(("event", "line"), LINES)
def test_each_is_a_line(event: AnyEvent, line: str) -> None:
    assert describe_event(event) == line


def test_whoever_misses_heartbeats_is_told_of_once_and_when_it_is_back() -> None:
    members, missed = Members(SETTINGS, 1), MissedHeartbeats()
    beat = WorkerBeat("anna", 0, 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None)
    members.hear(beat, 0.0)
    assert list(missed.look(members, 1.0)) == []
    (silent,) = missed.look(members, 3.0)
    assert describe_event(silent) == "anna missed heartbeats (no heartbeat for 3 s); it gets no work"
    assert list(missed.look(members, 4.0)) == []
    members.hear(beat, 5.0)
    (back,) = missed.look(members, 5.0)
    assert describe_event(back) == "anna is back: heartbeats again"


def step_made(step: int) -> StepFinished:
    """As the protocol tells it."""
    return StepFinished(step=step, loss=1.5, samples=0, weight=4.0, seconds=0.5, learning_rate=None, epoch=1)


@pytest.mark.parametrize("starting", [True, False])
def test_only_the_first_coordinator_since_a_start_begins_with_what_was_before(starting: bool, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_start(directory, "h:1")
    it, files = job(), CheckpointFiles(tmp_path / STATES)
    spec = cast("SwarmSpec", SimpleNamespace(parameters=1, frozen_parameters=0, settings=SETTINGS))
    with EventLog(tmp_path) as log:
        for _ in range(2 - starting):
            progress = Progress(Console(file=StringIO(), width=120, highlight=False))
            watching = _Watching((progress,), progress.recall)
            coordinating = _Coordinating(directory, spec, it, watching, FileJournal(tmp_path / JOURNAL), files)
            coordinating._log = log
            coordinating._begin()
            coordinating._observe(CoordinatorStarted(term=2, step=25))
        for event in (StageLost(stage=0, step=20, epoch=1), step_made(21), StageLost(stage=0, step=20, epoch=2)):
            coordinating._observe(event)
    assert isinstance(progress.console.file, StringIO)
    lines = [line for line in progress.console.file.getvalue().splitlines()[1:] if not line.startswith("step")]
    resumed = ["no worker came back with a later state of stage 0; all workers continue from step 20"]
    replaced = ["a new coordinator leads from step 25 on", "stage 0 has no worker left; all workers roll back to step 20"]
    assert lines == [*(resumed if starting else replaced), "stage 0 has no worker left; all workers roll back to step 20"]


def test_the_protocols_events_gain_samples_and_what_is_stored_where(tmp_path: Path) -> None:
    told: list[AnyEvent] = []
    spec = cast("SwarmSpec", SimpleNamespace(parameters=1, frozen_parameters=0, settings=SETTINGS))
    files = cast("CheckpointFiles", SimpleNamespace(stored_bytes=lambda step: 100 * step))
    watching = _Watching((told.append,), lambda events: None)
    write_start(RunDirectory(tmp_path), "h:1")
    coordinating = _Coordinating(RunDirectory(tmp_path), spec, job(), watching, FileJournal(tmp_path / JOURNAL), files)
    with EventLog(tmp_path) as log:
        coordinating._log = log
        coordinating._observe(step_made(1))
        coordinating._emit(coordinating._saved(5, 2.5))
    made, saved = told
    assert isinstance(made, StepFinished)
    assert (made.samples, made.loss, made.weight) == (job().batch_size, 1.5, 4.0)
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path, saved.size_bytes, saved.seconds) == (5, "checkpoints/step-00000005", 500, 2.5)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (StopTraining(), ""),
        (KeyError("mine"), "step 0: a callback, told of step_finished, failed: KeyError: 'mine'"),
        (SystemExit(3), "step 0: a callback, told of step_finished, failed: RuntimeError: the script exits (3) while the run is under way"),
    ],
)
def test_callbacks_end_a_run_by_asking_for_it_or_by_failing(error: BaseException, sentence: str, tmp_path: Path) -> None:
    """The coordinator is asked to stop after the step, and those who watch hear on."""

    def ends(event: AnyEvent) -> None:
        raise error

    told, stopped = list[AnyEvent](), asyncio.Event()
    spec = cast("SwarmSpec", SimpleNamespace(parameters=1, frozen_parameters=0, settings=SETTINGS))
    write_start(RunDirectory(tmp_path), "h:1")
    watching = _Watching((ends, told.append), lambda events: None)
    states = CheckpointFiles(tmp_path / STATES)
    coordinating = _Coordinating(RunDirectory(tmp_path), spec, job(), watching, FileJournal(tmp_path / JOURNAL), states)

    async def run() -> None:
        await coordinating._until(asyncio.ensure_future(stopped.wait()), cast("Coordinator", SimpleNamespace(stop=stopped.set)))  # type: ignore[arg-type]

    with EventLog(tmp_path) as log:
        coordinating._log = log
        coordinating._observe(step_made(1))
        asyncio.run(run())
        coordinating._observe(step_made(2))
    assert [event.step for event in told if isinstance(event, StepFinished)] == [1, 2]
    assert str(coordinating._callback_failed or "") == sentence
    ended = coordinating._finished(2, (), failed=coordinating._callback_failed is not None)
    assert ended.reason == ("failed" if sentence else "stopped")


def test_what_is_waited_for_is_told_soon_and_again_when_it_changes() -> None:
    waiting = StartupProgress(3, 2)

    def line(now: float, joined: list[int]) -> str | None:
        event = waiting.event(now, joined)
        return None if event is None else describe_event(event)

    assert line(0.5, []) is None
    assert line(2.0, []) == "waiting for members: 0 of 3 joined; no member yet for stages 0, 1 (they load PyTorch and the job)"
    assert line(2.5, []) is None
    assert line(3.0, [0]) is None  # the next line soon, not at once
    assert line(4.0, [0]) == "waiting for members: 1 of 3 joined; no member yet for stage 1"
    assert line(18.5, [0]) is None
    assert line(19.0, [0]) == "waiting for members: 1 of 3 joined; no member yet for stage 1"
    assert line(25.0, [0, 1]) == "2 of 3 members joined; the first step is under way"


def test_others_may_have_come_first() -> None:
    event = StartupProgress(1, 3).event(2.0, [0, 1])
    assert event is not None
    assert describe_event(event) == "waiting for members: 2 of 2 joined; no member yet for stage 2"
