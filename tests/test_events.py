"""Events survive their file, a crash included, and bad files are explained."""

from pathlib import Path

import msgspec
import pytest

from atoll.errors import AtollError
from atoll.events import AnyEvent, Evaluated, EventLog, NonFinite, RunFinished, RunStarted, StepFinished, read_events

EVENTS: list[AnyEvent] = [
    RunStarted(
        at_seconds=0.0,
        name="job",
        mode="alone",
        steps=2,
        batch_size=4,
        samples=8,
        parameters=10,
        devices=("cpu",),
        precision="fp32",
        seed=0,
        unix_seconds=1.5,
    ),
    StepFinished(at_seconds=1.0, step=1, loss=2.5, samples=4, weight=4.0, seconds=0.5, learning_rate=0.1, gradient_norm=3.0),
    Evaluated(at_seconds=1.5, step=1, loss=2.0, metrics={"accuracy": 0.5}, samples=8, seconds=0.1),
    NonFinite(at_seconds=2.0, step=2, what="loss", value="nan"),
    RunFinished(at_seconds=2.0, reason="failed", steps=1, samples=4, seconds=2.0, loss=2.5, message="the loss is nan"),
]


def write(directory: Path) -> Path:
    with EventLog(directory) as log:
        for event in EVENTS:
            log(event)
    return log.path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    assert list(read_events(write(tmp_path / "run"))) == EVENTS


def test_events_are_frozen_and_know_their_kind() -> None:
    assert EVENTS[1].kind == "step_finished"
    assert b'"event":"non_finite"' in msgspec.json.encode(EVENTS[3])
    with pytest.raises(AttributeError):
        EVENTS[1].step = 3  # type: ignore[misc]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_events(path)) == EVENTS[:-1]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":"one"', 1))
    with pytest.raises(AtollError, match=r"events\.jsonl:2: not an event: Expected `int`, got `str`"):
        list(read_events(path))


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AtollError, match="holds another run already"):
        EventLog(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(AtollError, match="cannot write the run there"):
        EventLog(tmp_path / "file" / "run")
    with pytest.raises(AtollError, match="cannot read it"):
        list(read_events(tmp_path / "nowhere"))
