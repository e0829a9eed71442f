"""What happens in a swarm becomes events and lines that people understand."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from atoll.control import notices
from atoll.control.notices import (
    Joined,
    Left,
    Moved,
    Refused,
    Repaired,
    Resealed,
    Returned,
    RolledBack,
    Saved,
    Silent,
    StateRefused,
    StatesDiffer,
    StepCommitted,
    TookOver,
    TooSlow,
)
from atoll.control.settings import Settings
from atoll.events import AnyEvent, CheckpointSaved, EventLog, StepFinished, StepRepaired
from atoll.runtime.modes.swarm.coordinator_process import _Coordinating, _Watching
from atoll.runtime.modes.swarm.events import StartupProgress, SwarmEvents
from atoll.runtime.modes.swarm.files import CheckpointFiles, FileJournal
from atoll.runtime.modes.swarm.spec import JOURNAL, STATES, SwarmSpec, write_start
from atoll.runtime.run_directory import RunDirectory
from atoll.watch.describe import describe_event
from atoll.watch.progress import Progress

from .test_compute import job

LINES = [
    (Joined("anna", 7, 1), "anna joined stage 1"),
    (Joined("feeder", 7, -1), "feeder joined"),
    (Left("anna", 0), "anna left stage 0 (it asked to leave)"),
    (Silent("anna", 0, 2.0), "anna missed heartbeats (no heartbeat for 2 s); it gets no work"),
    (Returned("anna", 0), "anna is back: heartbeats again"),
    (
        TooSlow("anna", 1, 0.375),
        "anna fetches the state of stage 1 too slowly: after 38% the next step replaced it, several times in a row. It keeps trying; a"
        " faster link, longer steps or more stages would let it join",
    ),
    (Moved("anna", 0, 1, "it helps"), "anna moves from stage 0 to stage 1: it helps"),
    (
        StateRefused("anna", 20, 1, "berta is told to store it"),
        "state refused: anna: a state of stage 1 after step 20: berta is told to store it",
    ),
    (
        StatesDiffer(20, 1),
        "workers of stage 1 have states after step 20 that differ in some bits, as devices of several kinds may; that of the worker told to"
        " store it was taken",
    ),
    (RolledBack(1, 20, 0), "stage 0 has no worker left; all workers roll back to step 20"),
    (Refused(4, "loss", float("nan")), "step 5: the loss is nan"),
    (TookOver(2, 5), "a new coordinator leads from step 5 on"),
    (TookOver(1, 0), "the coordinator leads from step 0 on"),
]


@pytest.mark.parametrize(("happening", "line"), LINES)
def test_each_is_an_event_that_survives_its_file_and_a_line(happening: Any, line: str) -> None:
    event = SwarmEvents(lambda: 3.0, 8).event(happening)
    assert event is not None
    assert event.at_seconds == 3.0
    assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
    assert describe_event(event) == line


@pytest.mark.parametrize("starting", [True, False])
def test_only_the_first_coordinator_since_a_start_begins_with_what_was_before(starting: bool, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_start(directory, "h:1")
    it, files = job(), CheckpointFiles(tmp_path / STATES)
    spec = cast("SwarmSpec", SimpleNamespace(parameters=1, settings=Settings(stages=1, micro_batches=1, steps=50)))
    with EventLog(tmp_path) as log:
        for _ in range(2 - starting):
            progress = Progress(Console(file=StringIO(), width=120, highlight=False))
            watching = _Watching((progress,), progress.recall)
            coordinating = _Coordinating(directory, spec, it, watching, FileJournal(tmp_path / JOURNAL), files)
            coordinating._log = log
            coordinating._begin()
            coordinating._observe(TookOver(2, 25))
        for happening in (
            RolledBack(1, 20, 0),
            StepCommitted(1, 20, 6.0, 4.0, False, 0.5, 1),
            RolledBack(2, 20, 0),
        ):
            coordinating._observe(happening)
    assert isinstance(progress.console.file, StringIO)
    lines = [line for line in progress.console.file.getvalue().splitlines()[1:] if not line.startswith("step")]
    resumed = ["no worker came back with a later state of stage 0; all workers continue from step 20"]
    replaced = ["a new coordinator leads from step 25 on", "stage 0 has no worker left; all workers roll back to step 20"]
    assert lines == [*(resumed if starting else replaced), "stage 0 has no worker left; all workers roll back to step 20"]


def test_a_repair_says_why() -> None:
    teller = SwarmEvents(lambda: 0.0, 8)
    assert teller.event(Resealed(4, "no progress")) is None
    event = teller.event(Repaired(4, (0, 3)))
    assert event == StepRepaired(at_seconds=0.0, step=5, micro_batches=(0, 3), reason="no progress")
    assert describe_event(event) == "step 5: no progress; micro-batches computed again: 3 of stage 1"
    again = teller.event(Repaired(4, (1, 0)))
    assert isinstance(again, StepRepaired)
    assert again.reason == "somebody who had it is gone"


def test_a_step_has_its_mean_loss() -> None:
    event = SwarmEvents(lambda: 0.0, 8).event(StepCommitted(0, 0, 6.0, 4.0, False, 0.5, 1))
    assert isinstance(event, StepFinished)
    assert (event.step, event.loss, event.samples, event.applied) == (1, 1.5, 8, True)


def test_a_checkpoint_took_from_its_step_until_it_was_stored() -> None:
    moments = iter([1.0, 1.0, 3.5, 3.5, 4.0, 4.0])
    teller = SwarmEvents(lambda: next(moments), 8, lambda step: 100 * step)
    teller.event(StepCommitted(0, 4, 6.0, 4.0, False, 0.5, 1))
    event = teller.event(Saved(0, 5))
    assert event == CheckpointSaved(
        at_seconds=3.5, step=5, path="checkpoints/step-00000005", size_bytes=500, blocked_seconds=0.0, seconds=2.5
    )
    unknown = teller.event(Saved(0, 9))  # made under the coordinator before
    assert isinstance(unknown, CheckpointSaved)
    assert unknown.seconds == 0.0


def test_no_happening_is_forgotten() -> None:
    known = {type(happening).__name__ for happening, _ in LINES} | {"Repaired", "Resealed", "Saved", "StepCommitted"}
    assert known == set(notices.__all__) - {"Happening"}


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
