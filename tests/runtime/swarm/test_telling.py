"""What happens in a swarm becomes events and lines that people understand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from atoll.control import happenings
from atoll.control.happenings import (
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
    StepCommitted,
    TookOver,
    TooSlow,
)
from atoll.control.settings import Settings
from atoll.events import AnyEvent, CheckpointSaved, EventLog, StepFinished, StepRepaired
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.coordinating import _Coordinating, _Watching
from atoll.runtime.swarm.files import CheckpointFiles, FileJournal
from atoll.runtime.swarm.run_files import JOURNAL, STATES, write_start
from atoll.runtime.swarm.spec import SwarmSpec
from atoll.runtime.swarm.telling import Teller, say_event

from .test_compute import job

LINES = [
    (Joined("anna", 7, 1), "anna joined and works on stage 1"),
    (Joined("feeder", 7, -1), "feeder joined"),
    (Left("anna", 0), "anna left stage 0, as it had asked"),
    (Silent("anna", 0, 2.0), "anna has not been heard for 2 s; it gets no work"),
    (Returned("anna", 0), "anna is heard again"),
    (
        TooSlow("anna", 1, 0.375),
        "anna gets the state of stage 1 too slowly to be of use: after 38% of it the next step superseded it, as before. It goes on"
        " trying; a faster link, longer steps or more stages would let it in",
    ),
    (Moved("anna", 0, 1, "it helps"), "anna moves from stage 0 to stage 1: it helps"),
    (RolledBack(1, 20, 0), "stage 0 was lost; everybody goes on from step 20"),
    (Refused(4, "loss", float("nan")), None),
    (TookOver(2, 5), "a new coordinator goes on after step 5"),
    (TookOver(1, 0), None),
]


@pytest.mark.parametrize(("happening", "line"), LINES)
def test_each_is_an_event_that_survives_its_file_and_a_line(happening: Any, line: str | None) -> None:
    event = Teller(lambda: 3.0, 8).event(happening)
    assert event is not None
    assert event.at_seconds == 3.0
    assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event
    assert say_event(event) == line


@pytest.mark.parametrize(
    ("happening", "line"),
    [
        (RolledBack(1, 20, 0), "nobody has come back with a later state of stage 0; everybody goes on from step 20"),
        (TookOver(2, 25), None),
    ],
)
def test_what_a_resumed_run_begins_with_is_no_accident(happening: Any, line: str | None) -> None:
    event = Teller(lambda: 3.0, 8).event(happening)
    assert event is not None
    assert say_event(event, starting=True) == line


@pytest.mark.parametrize("starting", [True, False])
def test_only_the_first_coordinator_since_a_start_begins_with_what_was_before(
    starting: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    write_start(directory, "h:1")
    it, files = job(), CheckpointFiles(tmp_path / STATES)
    spec = cast("SwarmSpec", SimpleNamespace(parameters=1, settings=Settings(stages=1, micro_batches=1, steps=50)))
    coordinators = [
        _Coordinating(directory, spec, it, _Watching((), lambda told: None), FileJournal(tmp_path / JOURNAL), files)
        for _ in range(2 - starting)
    ]
    with EventLog(tmp_path) as log:
        for coordinating in coordinators:
            coordinating._log = log
            coordinating._begin()
        for happening in (
            TookOver(3, 25),
            RolledBack(1, 20, 0),
            StepCommitted(1, 20, 6.0, 4.0, False, 0.5, 1),
            RolledBack(2, 20, 0),
        ):
            coordinating._observe(happening)
    resumed = ["nobody has come back with a later state of stage 0; everybody goes on from step 20"]
    replaced = ["a new coordinator goes on after step 25", "stage 0 was lost; everybody goes on from step 20"]
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [*(resumed if starting else replaced), "stage 0 was lost; everybody goes on from step 20"]


def test_a_repair_says_why() -> None:
    teller = Teller(lambda: 0.0, 8)
    assert teller.event(Resealed(4, "no progress")) is None
    event = teller.event(Repaired(4, (0, 3)))
    assert event == StepRepaired(at_seconds=0.0, step=5, micro_batches=(0, 3), reason="no progress")
    assert say_event(event) == "step 5: no progress; done again: 3 of stage 1 (micro-batches)"
    again = teller.event(Repaired(4, (1, 0)))
    assert isinstance(again, StepRepaired)
    assert again.reason == "somebody who had it is gone"


def test_a_step_has_its_mean_loss() -> None:
    event = Teller(lambda: 0.0, 8).event(StepCommitted(0, 0, 6.0, 4.0, False, 0.5, 1))
    assert isinstance(event, StepFinished)
    assert (event.step, event.loss, event.samples, event.applied) == (1, 1.5, 8, True)


def test_a_checkpoint_took_from_its_step_until_it_was_stored() -> None:
    moments = iter([1.0, 1.0, 3.5, 3.5, 4.0, 4.0])
    teller = Teller(lambda: next(moments), 8, lambda step: 100 * step)
    teller.event(StepCommitted(0, 4, 6.0, 4.0, False, 0.5, 1))
    event = teller.event(Saved(0, 5))
    assert event == CheckpointSaved(at_seconds=3.5, step=5, path="swarm", size_bytes=500, blocked_seconds=0.0, seconds=2.5)
    unknown = teller.event(Saved(0, 9))  # made under the coordinator before
    assert isinstance(unknown, CheckpointSaved)
    assert unknown.seconds == 0.0


def test_no_happening_is_forgotten() -> None:
    known = {type(happening).__name__ for happening, _ in LINES} | {"Repaired", "Resealed", "Saved", "StepCommitted"}
    assert known == set(happenings.__all__) - {"Happening"}
