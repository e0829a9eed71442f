"""A single worker on a virtual clock, with the test in the place of everybody else."""

import random
from typing import Any, TypeVar

from atoll.control import Settings, SwarmProcess
from atoll.control.messages import Announce, Assignment, Attempt, Committed, Forward, Manifest, Phase, Run, View
from atoll.simulate.arithmetic import CHUNKS, ExactCompute
from atoll.simulate.disks import CheckpointDisk, CheckpointStore
from atoll.simulate.loop import Loop, Process
from tests.simulate.faulty import without

M = TypeVar("M")
STAGES = 2
ALL = frozenset(range(4))


class Wire:
    """Keeps what the worker sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, to: str, message: Any) -> None:
        self.sent.append((to, message))


class Bench:
    """The worker `w`, first of incarnation 1 on the last stage, at version 0."""

    def __init__(self, *lacking: str, stage: int = 1) -> None:
        self.loop = Loop()
        self.process = Process("w", self.loop)
        self.wire = Wire()
        self.inbox = self.process.mailbox()
        settings = Settings(
            stages=STAGES, micro_batches=len(ALL), steps=100, chunks=CHUNKS, acknowledge_forward=False, heartbeat_seconds=2.0
        )
        self.compute = ExactCompute(self.process, random.Random(0))
        self.store = CheckpointDisk(random.Random(0))
        node = SwarmProcess("w", self.process, self.wire, self.inbox, 1, random.Random(0))
        self.worker = without(*lacking).worker(
            node, self.compute, CheckpointStore(self.store, self.process, lambda: None), settings, ("c",)
        )
        self.process.spawn(self.worker.run())
        self.stage = stage
        self.run(0.1)

    def run(self, seconds: float) -> None:
        self.loop.run(self.loop.now + seconds)

    def announce(
        self,
        phase: Phase,
        seq: int,
        *,
        term: int = 1,
        epoch: int = 0,
        version: int = 0,
        origin: tuple[int, int] = (0, 0),
        commit: Committed | None = None,
        incarnation: int = 1,
        stage: int | None = None,
        donors: tuple[str, ...] = (),
    ) -> None:
        view = View(term, seq, seq, epoch, version, origin, commit, phase, -1)
        yours = Assignment(1, incarnation, self.stage if stage is None else stage, donors)
        self.inbox.put(Announce("c", view, yours))
        self.run(0.01)

    def open(self, seq: int = 1, **where: Any) -> None:
        """RUN with everything missing."""
        self.announce(Run((ALL,) * STAGES, frozenset(), (1, seq)), seq, **where)

    def forward(self, micro_batch: int, *, round: tuple[int, int] = (1, 1), number: int = 0, epoch: int = 0, version: int = 0) -> None:
        """A micro-batch arrives from stage 0."""
        attempt = Attempt(round, "f", 1, number)
        self.inbox.put(Forward(epoch, version, 1, micro_batch, attempt, ("v", "w"), frozenset(), 1000 + micro_batch))
        self.run(0.01)

    def sent(self, kind: type[M]) -> list[M]:
        """Everything of a kind sent since last asked."""
        found = [message for _, message in self.wire.sent if isinstance(message, kind)]
        self.wire.sent = [pair for pair in self.wire.sent if not isinstance(pair[1], kind)]
        return found

    def reported(self) -> set[int]:
        """What the last manifest lists."""
        manifests = self.sent(Manifest)
        return {m for buffer in manifests[-1].buffers for m in buffer.micro_batches}

    def value(self, index: int = 0) -> int:
        """The first chunk of a buffer."""
        return int(self.worker.buffers.get(index, 1).value[0].value)
