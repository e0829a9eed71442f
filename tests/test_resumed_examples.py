"""Examples: two ranks share them, a run alone goes on with what they trained, and all is as if one had trained throughout."""

import os
import runpy
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.events import StepFinished, read_events
from atoll.job import Job
from atoll.script import load_job

from .process_group import fork_ranks

pytestmark = pytest.mark.timeout(600)

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = [FOLDER / f"{name}.py" for name in ("streaming_text", "augmented_images")]


def short(path: Path, steps: int) -> Job:
    """Less of it; how workers load is tested elsewhere."""
    return replace(load_job(path), steps=steps, batch_size=5, num_workers=0, eval_data=None, eval_every=None, metrics={})


def own_loop(*arguments: str | Path) -> None:
    """The example with a loop of its own, as `python examples/own_loop.py ARGUMENTS` runs it."""
    sys.argv = ["own_loop.py", *map(str, arguments)]
    runpy.run_path(str(FOLDER / "own_loop.py"), run_name="__main__")


def train(rank: int, ports: list[int], folder: Path) -> None:
    runs = [lambda path=path: short(path, 3).run(out=folder / path.stem, progress=False) for path in EXAMPLES]
    for run, port in zip([*runs, lambda: own_loop("--steps", "3", "--out", folder / "own_loop")], ports, strict=True):
        role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in role.items()})
        run()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def losses_of(run: Path) -> dict[int, float]:
    events = [event for event in read_events(run / "events.jsonl") if isinstance(event, StepFinished)]
    assert [event.step for event in events] == [1, 2, 3, 4, 5]
    return {event.step: event.loss for event in events}


def test_examples_in_lockstep_and_gone_on_with_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert fork_ranks(2, train, free_ports(len(EXAMPLES) + 1), tmp_path) == 0
    for path in EXAMPLES:
        resumed = short(path, 5).run(resume=tmp_path / path.stem, progress=False, device="cpu")
        expected = short(path, 5).run(progress=False, device="cpu").losses
        assert resumed.losses == pytest.approx(expected, rel=1e-5)
        assert list(losses_of(tmp_path / path.stem).values()) == pytest.approx(expected, rel=1e-5)
    own_loop("--steps", "5", "--resume", tmp_path / "own_loop")
    own_loop("--steps", "5", "--out", tmp_path / "alone")
    assert losses_of(tmp_path / "own_loop") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)
