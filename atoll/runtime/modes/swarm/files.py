"""Files of a swarm: the coordinator's journal, and the stages' checkpoints, which live with it and are reached over the fabric."""

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.control.coordinator import Coordinator
from atoll.control.journal import RECORDS, Term, admit, encode, read_records
from atoll.errors import CheckpointError, FabricError, RefusedError
from atoll.fabric import Remote
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.checkpoint.directory import step_path
from atoll.runtime.checkpoint.safetensors_file import write_durably
from atoll.runtime.checkpoint.state_file import cut, state_checksums

__all__ = [
    "CheckpointFiles",
    "CheckpointService",
    "FileJournal",
    "Key",
    "RemoteCheckpoints",
    "StageSnapshot",
    "States",
    "WantedState",
    "state_digest",
]

_LEADER_SECONDS = 0.1
_LONGEST_PAUSE = 8.0  # seconds

Answer = TypeVar("Answer")


def state_digest(content: Tensor) -> str:
    """Of a state as bytes."""
    return hashlib.sha256(content.contiguous().numpy().data).hexdigest()


class FileJournal:
    """A file that only grows. What `append` came back from is on the disk; the fence is checked under the file's lock.

    `decoder` reads the records of another protocol than the swarm's.
    """

    def __init__(self, path: Path, decoder: "msgspec.json.Decoder[Any]" = RECORDS) -> None:
        self._path, self._decoder = path, decoder
        self._read_bytes, self._newest_term = 0, 0  # up to where this process has read, and what it found there
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def read(self) -> Sequence[Any]:
        """All durable records, oldest first."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Sequence[Any]:
        return read_records(self._path.read_bytes(), self._decoder)[0]

    async def append(self, term: int, record: msgspec.Struct) -> None:
        """Comes back when the record is durable."""
        await asyncio.to_thread(self._append, term, record)

    def _append(self, term: int, record: msgspec.Struct) -> None:
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._read_bytes)
            records, good = read_records(file.read(), self._decoder)
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


class StageSnapshot(msgspec.Struct, frozen=True):
    """A stage's state as bytes; None: nothing is stored."""

    key: Key
    content: Tensor | None


class WantedState(msgspec.Struct, frozen=True):
    """Which state a worker asks for, and the names of the parameters and buffers its stage has."""

    key: Key
    names: tuple[str, ...]


class CheckpointFiles:
    """Write-once safetensors files, one for a stage's state, with a digest of it in the name. A file is whole or not there.

    What one of these objects has written it need not read to know that it is whole.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[Path, Mapping[str, int]] = {}  # and the checksums of the tensors in it
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, key: Key) -> Path | None:
        """Where a state is, if it is stored."""
        return next(self._directory.glob(f"epoch-{key.epoch}-step-{key.version}-stage-{key.stage}-*.safetensors"), None)

    async def write(self, key: Key, content: Tensor) -> str | None:
        """On the disk when it comes back; a second write of the same key changes nothing. The digest of what it has, if whole."""
        return await asyncio.to_thread(self._write, key, content)

    def _write(self, key: Key, content: Tensor) -> str | None:
        before = self.path(key)
        if before is not None:
            return _named_digest(before) if self._is_whole(before) else None
        digest = state_digest(content)
        target = self._directory / f"epoch-{key.epoch}-step-{key.version}-stage-{key.stage}-{digest}.safetensors"
        temporary = target.with_suffix(f".{os.getpid()}.{id(content)}")
        try:
            with temporary.open("wb") as file:
                write_durably(file, [content.contiguous().numpy().data])
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)  # a full disk is not filled further by what did not fit
        with suppress(CheckpointError):  # what is no state is found out when a checkpoint is made of it
            self._written[target] = state_checksums(content)
        return digest

    async def read(self, key: Key) -> Tensor | None:
        """The state, or None where nothing whole is stored."""
        return await asyncio.to_thread(self._read, key)

    async def exists(self, key: Key) -> bool:
        """Whether it was stored."""
        return self.path(key) is not None

    def _read(self, key: Key) -> Tensor | None:
        path = self.path(key)
        content = _content(path) if path is not None else None
        return content if path is not None and content is not None and state_digest(content) == _named_digest(path) else None

    def checksums(self, path: Path) -> Mapping[str, int] | None:
        """Of the tensors of a state that this object wrote."""
        return self._written.get(path)

    async def whole(self, key: Key) -> Path | None:
        """Where it is, if it is stored as it was written."""
        path = self.path(key)
        return path if path is not None and await asyncio.to_thread(self._is_whole, path) else None

    def _is_whole(self, path: Path) -> bool:
        if path in self._written:
            return True
        content = _content(path)
        return content is not None and state_digest(content) == _named_digest(path)

    def stages(self, epoch: int, version: int) -> int:
        """How many stages have a state of that step."""
        return len({file.name.split("-")[5] for file in self._directory.glob(f"epoch-{epoch}-step-{version}-stage-*-*.safetensors")})

    def clear(self) -> None:
        """Removes all: the run goes on from another checkpoint."""
        for file in self._directory.glob("epoch-*-step-*-stage-*"):
            file.unlink(missing_ok=True)

    def stored_bytes(self, version: int) -> int:
        """What the states of a step weigh, of whichever epoch."""
        return sum(file.stat().st_size for file in self._directory.glob(f"epoch-*-step-{version}-stage-*.safetensors"))

    async def forget_before(self, version: int) -> None:
        """Removes states of steps before this one."""
        await asyncio.to_thread(self._forget_before, version)

    async def discard(self, key: Key) -> None:
        """Removes one state, if it is there."""
        path = self.path(key)
        if path is not None:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    def _forget_before(self, version: int) -> None:
        for file in self._directory.glob("epoch-*-step-*-stage-*.safetensors"):
            if int(file.name.split("-")[3]) < version:
                file.unlink(missing_ok=True)
                self._written.pop(file, None)


def _named_digest(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _content(path: Path) -> Tensor | None:
    """Of a file, in memory that nobody else has."""
    try:
        content = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb") as file:
            return content if file.readinto(content.numpy().data) == content.numel() else None
    except FileNotFoundError:
        return None


class States(Protocol):
    """Where stages' states are kept."""

    async def write(self, key: Key, content: Tensor) -> str | None:
        """Comes back when durable; a second write of the same key changes nothing. The digest of what the key has, if it is whole."""

    async def read(self, key: Key) -> Tensor | None:
        """The state, or None where nothing whole is stored."""

    async def exists(self, key: Key) -> bool:
        """Whether it was stored."""

    async def forget_before(self, version: int) -> None:
        """Removes states of steps before this one."""

    async def discard(self, key: Key) -> None:
        """Removes one state, if it is there."""

    def stored_bytes(self, version: int) -> int:
        """What the states of a step weigh, as far as it is known here."""


class CheckpointService:
    """The states, for workers elsewhere. They are read and written in the loop they belong to, which is not the fabric's.

    What is not stored as a stage's state is cut out of the run's checkpoint of that step: other stages, or another mode, wrote it.
    """

    def __init__(
        self,
        states: States,
        checkpoints: Path,
        loop: asyncio.AbstractEventLoop,
        leader: Callable[[], Coordinator | None],
        warn: Callable[[str], None],
    ) -> None:
        self._states, self._checkpoints, self._loop, self._leader, self._warn = states, checkpoints, loop, leader, warn
        self._unwritten = -1  # the last step of which it was said that a state cannot be written

    @allowed("worker")
    async def write(self, snapshot: StageSnapshot, peer: CallingPeer) -> None:
        """Comes back when durable; RefusedError where the coordinator has not told this worker to store it."""
        if snapshot.content is not None:
            await self._there(self._take(snapshot.key, snapshot.content, peer.name))

    async def _take(self, key: Key, content: Tensor, process: str) -> None:
        while (leader := self._leader()) is None:
            await asyncio.sleep(_LEADER_SECONDS)  # it is just starting
        why_not = leader.why_not_stored(process, key.epoch, key.version, key.stage, content.numel() * content.element_size())
        if why_not is not None:
            raise RefusedError(f"the state of stage {key.stage} after step {key.version} is not stored: {why_not}")
        try:
            digest = await self._states.write(key, content)  # of what the key has: a state that came before this one stays
        except OSError as error:
            if key.version != self._unwritten:
                self._unwritten = key.version
                why = f"the state of stage {key.stage} after step {key.version} cannot be written ({error.strerror or error})"
                self._warn(f"{why}; training goes on, and its worker tries again until the next checkpoint")
            raise
        if digest is not None:
            leader.stored(key.epoch, key.version, key.stage, digest)

    @allowed("worker")
    async def read(self, wanted: WantedState, peer: CallingPeer) -> StageSnapshot:
        """What is stored."""
        content = await self._there(self._states.read(wanted.key))
        return StageSnapshot(wanted.key, await asyncio.to_thread(self._cut, wanted) if content is None else content)

    def _cut(self, wanted: WantedState) -> Tensor | None:
        path = step_path(self._checkpoints, wanted.key.version)
        try:
            return cut(path, wanted.names) if path.is_dir() else None
        except CheckpointError as error:  # whoever asked asks again
            self._loop.call_soon_threadsafe(self._warn, f"a worker asks for a state that cannot be read: {error}")
            return None

    async def _there(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class RemoteCheckpoints:
    """What a worker writes to and reads from. `names` says what a stage has."""

    def __init__(self, coordinator: Remote, names: Callable[[int], Iterable[str]]) -> None:
        self._coordinator, self._names = coordinator, names

    async def write(self, epoch: int, version: int, stage: int, snapshot: Tensor) -> None:
        """Comes back when durable or refused; tries until then, less and less often: a state may be large."""
        pause = 1.0
        while True:
            try:
                stored = StageSnapshot(Key(epoch, version, stage), snapshot)
                await asyncio.wrap_future(self._coordinator.call_soon(CheckpointService.write, stored))
                return
            except RefusedError:
                return  # another is told to store it, or nobody any more; the coordinator says so
            except FabricError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def digest(self, snapshot: Tensor) -> str:
        """As the store makes it."""
        return await asyncio.to_thread(state_digest, snapshot)

    async def read(self, epoch: int, version: int, stage: int) -> Tensor | None:
        """What was written, or None where nothing complete is stored or nobody answers."""
        try:
            wanted = WantedState(Key(epoch, version, stage), tuple(self._names(stage)))
            found = await asyncio.wrap_future(self._coordinator.call_soon(CheckpointService.read, wanted))
        except FabricError:
            return None
        return found.content
