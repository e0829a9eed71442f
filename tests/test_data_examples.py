"""The examples of data: two ranks share them, a run alone goes on with what they trained, and all is as if one had trained throughout."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.events import StepFinished, read_events
from atoll.job import Job
from atoll.script import load_job

from .process_group import fork_ranks

pytestmark = pytest.mark.timeout(600)

EXAMPLES = [Path(__file__).parent.parent / "examples" / f"{name}.py" for name in ("streaming_text", "augmented_images")]


def short(path: Path, steps: int) -> Job:
    """Less of it; how workers load is tested elsewhere."""
    return replace(load_job(path), steps=steps, batch_size=5, num_workers=0, eval_data=None, eval_every=None, metrics={})


def train(rank: int, ports: list[int], folder: Path) -> None:
    for path, port in zip(EXAMPLES, ports, strict=True):
        role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in role.items()})
        short(path, 3).run(out=folder / path.stem, progress=False)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_examples_in_lockstep_and_gone_on_with_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert fork_ranks(2, train, free_ports(len(EXAMPLES)), tmp_path) == 0
    for path in EXAMPLES:
        run = tmp_path / path.stem
        resumed = short(path, 5).run(resume=run, progress=False, device="cpu")
        expected = short(path, 5).run(progress=False, device="cpu").losses
        assert resumed.losses == pytest.approx(expected, rel=1e-5)
        steps = [event.step for event in read_events(run / "events.jsonl") if isinstance(event, StepFinished)]
        assert steps == [1, 2, 3, 4, 5]
