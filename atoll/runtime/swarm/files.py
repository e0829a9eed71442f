"""Files of a swarm: the coordinator's journal, and the stages' checkpoints, which live with it and are reached over the fabric."""

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.control.journal import Record, Term, admit, decode, encode
from atoll.errors import FabricError
from atoll.fabric import Remote
from atoll.fabric.method import Peer
from atoll.fabric.roles import allowed

__all__ = ["CheckpointFiles", "CheckpointService", "FileJournal", "Key", "RemoteCheckpoints", "Snapshot", "States"]

_DIGEST_BYTES = 32

Answer = TypeVar("Answer")


class FileJournal:
    """A file that only grows. What `append` came back from is on the disk; the fence is checked under the file's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes, self._newest_term = 0, 0  # up to where this process has read, and what it found there
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def read(self) -> Sequence[Record]:
        """All durable records, oldest first."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Sequence[Record]:
        return decode(self._path.read_bytes())[0]

    async def append(self, term: int, record: Record) -> None:
        """Comes back when the record is durable."""
        await asyncio.to_thread(self._append, term, record)

    def _append(self, term: int, record: Record) -> None:
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._read_bytes)
            records, good = decode(file.read())
            self._newest_term = max((one.term for one in records if isinstance(one, Term)), default=self._newest_term)
            self._read_bytes += good
            admit(self._newest_term, term, record)
            file.truncate(self._read_bytes)
            file.seek(self._read_bytes)
            file.write(encode(record))
            file.flush()
            os.fsync(file.fileno())


class Key(msgspec.Struct, frozen=True):
    """Which state of which stage."""

    epoch: int
    version: int
    stage: int


class Snapshot(msgspec.Struct, frozen=True):
    """A stage's state as bytes; None: nothing is stored."""

    key: Key
    content: Tensor | None


class CheckpointFiles:
    """Write-once files: a digest, then the state. A file is whole or not there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, key: Key) -> Path:
        """Where a state is."""
        return self._directory / f"epoch-{key.epoch}-step-{key.version}-stage-{key.stage}.state"

    async def write(self, key: Key, content: Tensor) -> None:
        """On the disk when it comes back; a second write of the same key changes nothing."""
        await asyncio.to_thread(self._write, key, content)

    def _write(self, key: Key, content: Tensor) -> None:
        target = self.path(key)
        if target.exists():
            return
        data = content.contiguous().numpy().tobytes()
        temporary = target.with_suffix(f".{os.getpid()}.{id(content)}")
        try:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)  # a full disk is not filled further by what did not fit

    async def read(self, key: Key) -> Tensor | None:
        """The state, or None where nothing whole is stored."""
        return await asyncio.to_thread(self._read, key)

    async def exists(self, key: Key) -> bool:
        """Whether it was stored."""
        return self.path(key).exists()

    def _read(self, key: Key) -> Tensor | None:
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return None
        return torch.frombuffer(bytearray(data[_DIGEST_BYTES:]), dtype=torch.uint8)

    def is_whole(self, key: Key) -> bool:
        """Whether it is stored as it was written."""
        return self._read(key) is not None

    def newest(self, epoch: int) -> int:
        """The last step that has a state in this epoch or a later one; -1: none has."""
        found = [file.name.split("-") for file in self._directory.glob("epoch-*-step-*-stage-*.state")]
        return max((int(parts[3]) for parts in found if int(parts[1]) >= epoch), default=-1)

    def stored_bytes(self, version: int) -> int:
        """What the states of a step weigh, of whichever epoch."""
        return sum(file.stat().st_size for file in self._directory.glob(f"epoch-*-step-{version}-stage-*.state"))

    async def forget_before(self, version: int) -> None:
        """Removes states of steps before this one."""
        await asyncio.to_thread(self._forget_before, version)

    def _forget_before(self, version: int) -> None:
        for file in self._directory.glob("epoch-*-step-*-stage-*.state"):
            if int(file.name.split("-")[3]) < version:
                file.unlink(missing_ok=True)


class States(Protocol):
    """Where stages' states are kept."""

    async def write(self, key: Key, content: Tensor) -> None:
        """Comes back when durable; a second write of the same key changes nothing."""

    async def read(self, key: Key) -> Tensor | None:
        """The state, or None where nothing whole is stored."""

    async def exists(self, key: Key) -> bool:
        """Whether it was stored."""

    async def forget_before(self, version: int) -> None:
        """Removes states of steps before this one."""

    def stored_bytes(self, version: int) -> int:
        """What the states of a step weigh, as far as it is known here."""


class CheckpointService:
    """The states, for workers elsewhere. They are read and written in the loop they belong to, which is not the fabric's."""

    def __init__(self, states: States, loop: asyncio.AbstractEventLoop) -> None:
        self._states, self._loop = states, loop

    @allowed("worker")
    async def write(self, snapshot: Snapshot, peer: Peer) -> None:
        """Comes back when durable."""
        if snapshot.content is not None:
            await self._there(self._states.write(snapshot.key, snapshot.content))

    @allowed("worker")
    async def read(self, key: Key, peer: Peer) -> Snapshot:
        """What is stored."""
        return Snapshot(key, await self._there(self._states.read(key)))

    async def _there(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class RemoteCheckpoints:
    """What a worker writes to and reads from."""

    def __init__(self, coordinator: Remote) -> None:
        self._coordinator = coordinator

    async def write(self, epoch: int, version: int, stage: int, snapshot: Tensor) -> None:
        """Comes back when durable; tries until it is."""
        while True:
            try:
                stored = Snapshot(Key(epoch, version, stage), snapshot)
                await asyncio.wrap_future(self._coordinator.call_soon(CheckpointService.write, stored))
                return
            except FabricError:
                await asyncio.sleep(1.0)

    async def read(self, epoch: int, version: int, stage: int) -> Tensor | None:
        """What was written, or None where nothing complete is stored or nobody answers."""
        try:
            found = await asyncio.wrap_future(self._coordinator.call_soon(CheckpointService.read, Key(epoch, version, stage)))
        except FabricError:
            return None
        return found.content
