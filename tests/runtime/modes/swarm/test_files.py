"""A swarm's states on disk: whole or not there, written once, and not for ever."""

import asyncio
import errno
import os
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.errors import JobFailedError
from atoll.runtime.checkpoint import safetensors_file
from atoll.runtime.checkpoint.manifest import SmallState
from atoll.runtime.checkpoint.safetensors_file import raw_bytes
from atoll.runtime.checkpoint.state_file import StateFile
from atoll.runtime.modes.swarm import coordinator_process
from atoll.runtime.modes.swarm.files import CheckpointFiles, CheckpointService, Key, StageSnapshot, state_digest
from atoll.runtime.run_directory import RunDirectory


def state(value: int) -> torch.Tensor:
    return torch.full((5,), value, dtype=torch.uint8)


def test_states_are_written_once_and_damaged_ones_are_not_there(tmp_path: Path) -> None:
    async def use() -> None:
        files, key = CheckpointFiles(tmp_path), Key(0, 5, 1)
        assert await files.read(key) is None
        assert await files.write(key, state(1)) == state_digest(state(1))
        assert await files.write(key, state(2)) == state_digest(state(1)), "what the key has"
        found = await files.read(key)
        assert found is not None
        assert found.tolist() == [1] * 5
        path = files.path(key)
        assert path is not None
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        assert await files.read(key) is None
        others = CheckpointFiles(tmp_path)  # did not write it, so it reads
        assert await others.whole(key) is None
        assert await others.write(key, state(1)) is None

    asyncio.run(use())


def test_what_was_written_here_is_known_to_be_whole_with_its_checksums(tmp_path: Path) -> None:
    async def use() -> None:
        files, key = CheckpointFiles(tmp_path), Key(0, 5, 1)
        content = StateFile({"model/a": torch.arange(3.0), "model/b": torch.ones(2)}, SmallState(), {}).content()
        await files.write(key, content)
        path = await files.whole(key)
        assert path is not None
        assert files.checksums(path) == {
            "model/a": zlib.crc32(raw_bytes(torch.arange(3.0))),
            "model/b": zlib.crc32(raw_bytes(torch.ones(2))),
        }
        assert CheckpointFiles(tmp_path).checksums(path) is None
        assert await CheckpointFiles(tmp_path).whole(key) == path
        await files.write(Key(0, 6, 1), state(1))  # no state: whoever makes a checkpoint of it reads it and says so
        await files.forget_before(7)
        assert files.checksums(path) is None

    asyncio.run(use())


def test_bytes_are_written_in_order_a_stretch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_STRETCH_BYTES", 7)
    blocks = [bytes(range(start, start + size)) for start, size in ((0, 3), (3, 0), (3, 7), (10, 40), (50, 1))]
    with (tmp_path / "file").open("wb") as file:
        safetensors_file.write_durably(file, map(memoryview, blocks))
    assert (tmp_path / "file").read_bytes() == bytes(range(51))


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


def test_a_state_that_cannot_be_written_is_told_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def use() -> None:
        stored = SimpleNamespace(why_not_stored=lambda *rest: None, stored=lambda *rest: None)
        service = CheckpointService(CheckpointFiles(tmp_path), tmp_path, asyncio.get_running_loop(), lambda: stored, told.append)  # type: ignore[arg-type, return-value]
        for version in (4, 4, 5, 5):
            with pytest.raises(OSError, match="No space"):
                await service.write(StageSnapshot(Key(0, version, 1), state(version)), SimpleNamespace(name="anna"))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", full)
    asyncio.run(use())
    assert [line.partition("cannot be written")[0] for line in told] == [f"the state of stage 1 after step {step} " for step in (4, 5)]
    assert "No space left on device" in told[0]


def test_a_full_disk_is_a_sentence_and_other_errors_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, expected in ((errno.ENOSPC, JobFailedError), (errno.ENOENT, FileNotFoundError)):

        async def fails(*rest: object, number: int = number) -> bool:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(coordinator_process, "_coordinate_from_files", fails)
        monkeypatch.setattr(RunDirectory, "settings", lambda self: SimpleNamespace(options_as=lambda kind: kind()))
        with pytest.raises(expected, match=r"No (space left on device|such file)"):
            coordinator_process.coordinate(RunDirectory(tmp_path), None, None, "")  # type: ignore[arg-type]
