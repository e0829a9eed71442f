"""What happens in a swarm becomes events and lines that people understand."""

from typing import Any

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
from atoll.events import AnyEvent, CheckpointSaved, StepFinished, StepRepaired
from atoll.runtime.swarm.telling import Teller, say_event

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
