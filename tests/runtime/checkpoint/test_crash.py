"""Killed at every moment: whatever a save was about to do to the file system, the last whole checkpoint is found and right."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.export import export
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import MODEL, RunIdentity, SmallState
from atoll.runtime.checkpoint.state_file import StateFile, assemble_checkpoint
from atoll.runtime.stage.shard_spec import ShardSpec

_IDENTITY = RunIdentity(job="crash", optimizer="SGD", seed=0, batch_size=1)
_EVENTS = {"open", "os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir", "shutil.rmtree"}


def _held(value: float) -> list[LocalShard]:
    return [
        LocalShard(ShardSpec(name="w", shape=(5, 3)), torch.full((5, 3), value)),
        LocalShard(ShardSpec(name="b", shape=(3,)), torch.full((3,), value)),
    ]


def _save(directory: Path, step: int) -> Callable[[], bool]:
    """A rank's save; whether it went well."""
    checkpoints = Checkpointer(directory, identity=_IDENTITY, keep_last=2)

    def save() -> bool:
        checkpoints.save(step, _held(float(step * 10)))
        outcome = checkpoints.wait()
        return outcome is not None and outcome.error is None

    return save


def _assemble(directory: Path, step: int) -> Callable[[], bool]:
    """A swarm's coordinator, which makes a checkpoint of the stages' stored states."""
    files = []
    for number, held in enumerate(_held(float(step * 10))):
        files.append(directory.with_name(f"{directory.name}-stage-{number}.safetensors"))
        files[-1].write_bytes(StateFile({MODEL + held.name: held.tensor}, SmallState(), {}).content().numpy().tobytes())

    def save() -> bool:
        extra = {"losses": [0.5] * step}
        assemble_checkpoint(directory, dict.fromkeys(files), step=step, identity=_IDENTITY, extra=extra, keep_last=2)
        return True

    return save


def _save_and_be_killed(directory: Path, moment: int, step: int, how: Callable[[Path, int], Callable[[], bool]]) -> bool:
    """In a child process: save, and die just before the file system is touched for the `moment`-th time. Whether it died."""
    child = os.fork()
    if child == 0:
        try:
            save = how(directory, step)
            seen = 0

            def count(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal seen
                if event in _EVENTS and arguments and str(directory) in f"{arguments[0]} {directory if event == 'open' else ''}":
                    seen += 1
                    if seen == moment:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            os._exit(0 if save() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("how", [_save, _assemble])
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
def test_killed_at_every_moment(tmp_path: Path, step: int, how: Callable[[Path, int], Callable[[], bool]]) -> None:
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
        died = _save_and_be_killed(directory, moment, step, how)
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
