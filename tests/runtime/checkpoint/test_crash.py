"""Killed at every moment: whatever a save was about to do to the file system, the last whole checkpoint is found and right."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from atoll.runtime.checkpoint import Checkpointer, Held, RunIdentity, export
from atoll.runtime.stage.holding import Holding

_IDENTITY = RunIdentity(job="crash", optimizer="SGD", seed=0, batch_size=1)
_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir", "shutil.rmtree"}


def _held(value: float) -> list[Held]:
    return [Held(Holding(name="w", shape=(5, 3)), torch.full((5, 3), value)), Held(Holding(name="b", shape=(3,)), torch.full((3,), value))]


def _save_and_be_killed(directory: Path, moment: int, step: int) -> bool:
    """In a child process: save, and die just before the file system is touched for the `moment`-th time. Whether it died."""
    child = os.fork()
    if child == 0:
        try:
            checkpoints = Checkpointer(directory, identity=_IDENTITY, keep_last=2)
            seen = 0

            def count(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal seen
                if event in _EVENTS and arguments and str(directory) in f"{arguments[0]} {directory if event == 'open' else ''}":
                    seen += 1
                    if seen == moment:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            checkpoints.save(step, _held(float(step * 10)))
            outcome = checkpoints.wait()
            os._exit(0 if outcome is not None and outcome.error is None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
def test_killed_at_every_moment(tmp_path: Path, step: int) -> None:
    torch.set_num_threads(1)
    prepared = tmp_path / "prepared"
    with Checkpointer(prepared, identity=_IDENTITY) as checkpoints:
        checkpoints.save(1, _held(1.0))
        checkpoints.save(2, _held(2.0))
    moment, seen = 0, set()
    while True:
        moment += 1
        directory = tmp_path / f"run-{moment}"
        shutil.copytree(prepared, directory)
        died = _save_and_be_killed(directory, moment, step)
        for held in (_held(0.0), _held(0.0)):  # the second time, after what was left is cleaned
            loaded = Checkpointer(directory, identity=_IDENTITY).load(held)
            assert loaded is not None
            value = float(held[0].tensor[0, 0])
            assert (loaded.step, value) in {(2, 2.0), (1, 1.0), (step, step * 10.0)}
            assert loaded.step >= 2, "the last good one, not one before"
            assert all((part.tensor == value).all() for part in held)
            export(directory, tmp_path / "out")
        seen.add(value)
        left = {path.name for path in directory.iterdir()}
        assert left <= {"latest", "step-00000001", "step-00000002", "step-00000003"}
        if not died:
            break
    assert seen == {2.0, step * 10.0}
    assert moment > 15
