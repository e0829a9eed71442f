"""A swarm's states on disk: whole or not there, written once, and not for ever."""

import asyncio
from pathlib import Path

import torch

from atoll.runtime.swarm.files import CheckpointFiles, Key


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
        files.path(key).write_bytes(files.path(key).read_bytes()[:-1] + b"\0")
        assert await files.read(key) is None

    asyncio.run(use())


def test_old_states_are_forgotten_and_counted_by_their_step(tmp_path: Path) -> None:
    async def use() -> None:
        files = CheckpointFiles(tmp_path)
        for version in (5, 10, 15):
            for stage in (0, 1):
                await files.write(Key(0, version, stage), state(version))
        assert files.stored_bytes(10) == 2 * (32 + 5)
        await files.forget_before(10)
        assert [await files.exists(Key(0, version, 0)) for version in (5, 10, 15)] == [False, True, True]

    asyncio.run(use())
