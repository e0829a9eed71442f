"""Disks: the coordinator's journal and the store of checkpoints on the virtual clock, slow when a seed asks for it."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from atoll.control.coordinator import Coordinator
from atoll.control.journal import FencedError, Record, admit
from atoll.simulate.loop import Loop, Process

__all__ = ["CheckpointDisk", "CheckpointStore", "JournalDisk", "JournalHandle", "exact_digest"]


def exact_digest(snapshot: Any) -> str:
    """Of an exact state."""
    return f"{hash(tuple(snapshot)) & ((1 << 64) - 1):x}"


class JournalDisk:
    """What is durable. Survives every process."""

    def __init__(self, loop: Loop, randomness: random.Random, *, fence: bool, on_record: Callable[[Record], None] | None = None) -> None:
        self.loop = loop
        self.records: list[Record] = []
        self.slowness = 1.0
        self.seconds = 0.1
        self._random, self._fence = randomness, fence
        self._term = 0
        self._on_record = on_record

    def delay(self) -> float:
        """What a read or a write takes now."""
        return self.slowness * self.seconds * (0.5 + self._random.random())

    def outlives(self) -> bool:
        """Whether a write under way lands although its process was killed."""
        return self._random.random() < 0.5

    def land(self, term: int, record: Record) -> bool:
        """The record becomes durable, or is refused."""
        if self._fence:
            try:
                self._term = admit(self._term, term, record)
            except FencedError:
                return False
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)
        return True


class JournalHandle:
    """One coordinator's access: what `atoll.control.world.Journal` asks for."""

    def __init__(self, disk: JournalDisk, process: Process) -> None:
        self._disk, self._process = disk, process

    async def read(self) -> Sequence[Record]:
        """All durable records."""
        await self._process.sleep(self._disk.delay())
        return list(self._disk.records)

    async def append(self, term: int, record: Record) -> None:
        """The write lands at its time even if the process is stopped, and perhaps if it is killed."""
        disk, box = self._disk, self._process.mailbox()
        outlives = disk.outlives()

        def land(_: Any) -> None:
            if self._process.alive or outlives:
                box.put(disk.land(term, record))

        disk.loop.at(disk.loop.now + disk.delay(), land)
        if not await box.take():
            raise FencedError(f"a record of term {term} was refused")


class CheckpointDisk:
    """Stored stages. Survives every process; write-once."""

    def __init__(self, randomness: random.Random) -> None:
        self.stored: dict[tuple[int, int, int], Any] = {}
        self.slowness = 1.0
        self.seconds = 0.5
        self._random = randomness

    def delay(self) -> float:
        """What a read or a write takes now."""
        return self.slowness * self.seconds * (0.5 + self._random.random())

    def offer(self, leader: Coordinator, process: str, key: tuple[int, int, int], snapshot: Any) -> None:
        """A process sends a state: it is stored if the coordinator has told it to."""
        if leader.why_not_stored(process, *key, 1) is None:
            self.stored.setdefault(key, snapshot)
            leader.stored(*key, exact_digest(self.stored[key]))

    def discard(self, epoch: int, version: int, stage: int) -> None:
        """The coordinator does not want it."""
        self.stored.pop((epoch, version, stage), None)


class CheckpointStore:
    """One process's access: what `atoll.control.world.Checkpoints` asks for. `leader` is who says what is taken; None: there is nobody."""

    def __init__(self, disk: CheckpointDisk, process: Process, leader: Callable[[], Coordinator | None]) -> None:
        self._disk, self._process, self._leader = disk, process, leader

    async def write(self, epoch: int, version: int, stage: int, snapshot: Any) -> None:
        """The first write of a key stays. Whoever coordinates is waited for."""
        while True:
            await self._process.sleep(self._disk.delay())
            leader = self._leader()
            if leader is not None:
                self._disk.offer(leader, self._process.name, (epoch, version, stage), snapshot)
                return

    async def digest(self, snapshot: Any) -> str:
        """Of what is in it."""
        return exact_digest(snapshot)

    async def read(self, epoch: int, version: int, stage: int) -> Any:
        """What was written, or None."""
        await self._process.sleep(self._disk.delay())
        return self._disk.stored.get((epoch, version, stage))
