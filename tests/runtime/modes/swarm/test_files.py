"""A swarm's states on disk: whole or not there, written once, and not for ever."""

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.errors import JobFailedError
from atoll.runtime.modes.swarm import coordinator_process
from atoll.runtime.modes.swarm.files import CheckpointFiles, Key
from atoll.runtime.run_directory import RunDirectory


def state(value: int) -> torch.Tensor:
    return torch.full((5,), value, dtype=torch.uint8)


def test_states_are_written_once_and_damaged_ones_are_not_there(tmp_path: Path) -> None:
    async def use() -> None:
        files, key = CheckpointFiles(tmp_path), Key(0, 5, 1)
        assert await files.read(key) is None
        await files.write(key, state(1))
        await files.write(key, state(2))
        found = await files.read(key)
        assert found is not None
        assert found.tolist() == [1] * 5
        path = files.path(key)
        assert path is not None
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        assert await files.read(key) is None

    asyncio.run(use())


def test_old_states_are_forgotten_and_counted_by_their_step(tmp_path: Path) -> None:
    async def use() -> None:
        files = CheckpointFiles(tmp_path)
        for version in (5, 10, 15):
            for stage in (0, 1):
                await files.write(Key(0, version, stage), state(version))
        assert files.stored_bytes(10) == 2 * 5
        await files.forget_before(10)
        assert [await files.exists(Key(0, version, 0)) for version in (5, 10, 15)] == [False, True, True]

    asyncio.run(use())


def test_a_state_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(CheckpointFiles(tmp_path).write(Key(0, 1, 0), torch.arange(9, dtype=torch.uint8)))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_sentence_and_other_errors_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, expected in ((errno.ENOSPC, JobFailedError), (errno.ENOENT, FileNotFoundError)):

        async def fails(*rest: object, number: int = number) -> bool:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(coordinator_process, "_coordinate_from_files", fails)
        monkeypatch.setattr(RunDirectory, "settings", lambda self: SimpleNamespace(options_as=lambda kind: kind()))
        with pytest.raises(expected, match=r"No (space left on device|such file)"):
            coordinator_process.coordinate(RunDirectory(tmp_path), None, None, "")  # type: ignore[arg-type]
