"""A swarm in one event loop, for tests: real tensors and the real protocol; messages are handed over as they would be after a journey."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from atoll import Job
from atoll.control.coordinator import Coordinator
from atoll.control.feeder import Feeder
from atoll.control.journal import Record, admit
from atoll.control.kernels import DeviceTurns
from atoll.control.messages import Message
from atoll.control.multi_stage import hosted_workers, process_of
from atoll.control.settings import Settings
from atoll.control.worker import Worker
from atoll.control.world import SwarmProcess, Transport
from atoll.events import AnyEvent, Warned
from atoll.fabric.payload import decode_payload, encode_payload
from atoll.graph.capture import capture_program
from atoll.runtime.modes.swarm.compute import CPU, DividedJob, StageCompute, programs_of
from atoll.runtime.modes.swarm.files import state_digest
from atoll.runtime.modes.swarm.group import GroupCompute
from atoll.runtime.modes.swarm.micro_batches import SampleFeed, TensorChecks
from atoll.runtime.modes.swarm.transport import AnyMessage, Inboxes, LoopClock
from atoll.runtime.stage.compilation import Compiler


class MemoryJournal:
    """Durable as long as the test."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._term = 0

    async def read(self) -> Sequence[Record]:
        return list(self.records)

    async def append(self, term: int, record: Record) -> None:
        self._term = admit(self._term, term, record)
        self.records.append(record)


class MemoryCheckpoints:
    """What is stored."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int, int], Any] = {}


class MemoryAccess:
    """One worker's."""

    def __init__(self, swarm: "OneProcess", worker: str) -> None:
        self._swarm, self._process = swarm, process_of(worker)

    async def write(self, epoch: int, version: int, stage: int, snapshot: Any) -> None:
        coordinator, stored = self._swarm.coordinator, self._swarm.checkpoints.stored
        assert coordinator is not None
        if coordinator.why_not_stored(self._process, epoch, version, stage, snapshot.numel()) is None:
            stored.setdefault((epoch, version, stage), snapshot)
            coordinator.stored(epoch, version, stage, state_digest(stored[epoch, version, stage]))

    async def digest(self, snapshot: Any) -> str:
        return state_digest(snapshot)

    async def read(self, epoch: int, version: int, stage: int) -> Any:
        return self._swarm.checkpoints.stored.get((epoch, version, stage))


class Inside:
    """What workers of one process send each other is handed over as it is, as in a real process."""

    def __init__(self, process: str, outside: Transport) -> None:
        self.inboxes, self._outside = Inboxes(process), outside

    def send(self, to: str, message: Message) -> None:
        if not self.inboxes.put(to, message):
            self._outside.send(to, message)


class OneProcess:
    """Everybody of a swarm. `disturb` is called with every event; `groups` says who has several devices, and how many."""

    def __init__(
        self,
        job: Job,
        bounds: Sequence[int],
        workers: int,
        micro_batch_size: int,
        groups: Mapping[str, int] | None = None,
        recompute: Sequence[bool] = (),
        compiler: Compiler | None = None,
        **settings: Any,
    ) -> None:
        self.groups, self.recompute, self.compiler = groups or {}, recompute, compiler
        self.job, self.bounds = job, bounds
        self.captured = capture_program(job, divided=True)
        size = job.batch_size
        self.micro_batches = [(start, min(start + micro_batch_size, size)) for start in range(0, size, micro_batch_size)]
        self.checks = TensorChecks(self.captured, programs_of(self.captured, bounds), self.micro_batches)
        self.settings = Settings(
            stages=len(bounds) - 1, micro_batches=len(self.micro_batches), steps=job.total_steps, **{"heartbeat_seconds": 0.1, **settings}
        )
        self.journal = MemoryJournal()
        self.checkpoints = MemoryCheckpoints()
        self.coordinator: Coordinator | None = None
        self.workers: dict[str, Worker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.inboxes: dict[str, Any] = {}
        self.computes: dict[str, StageCompute | GroupCompute] = {}
        self.events: list[AnyEvent] = []
        self.errors: list[BaseException] = []
        self.generators = threading.Lock()
        self._first = workers
        self._nonce = 0

    def send(self, to: str, message: Message) -> None:
        if to in self.inboxes:
            payload = encode_payload(message)
            copied = decode_payload(payload.data, [tensor.clone() for tensor in payload.tensors], AnyMessage)
            assert self.checks.why_unfit(copied) is None
            self.inboxes[to].put(copied)

    def _node(self, name: str) -> SwarmProcess:
        self._nonce += 1
        clock = LoopClock(self.errors.append)
        self.inboxes[name] = clock.mailbox()
        return SwarmProcess(name, clock, self, self.inboxes[name], self._nonce, random.Random(self._nonce), self._emit)

    def _emit(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.disturb(self, event)

    @property
    def warned(self) -> list[str]:
        """What workers say of what came and cannot be."""
        return [event.message for event in self.events if isinstance(event, Warned)]

    def add_process(self, name: str, stages: int) -> None:
        """One that hosts so many stages."""
        inside = Inside(name, self)
        device = DeviceTurns(LoopClock(self.errors.append))
        self._nonce += 1
        for worker in hosted_workers(name, stages):
            clock = LoopClock(self.errors.append)
            self.inboxes[worker] = inside.inboxes.open(worker, clock)
            draw = random.Random(self._nonce)
            self._start(SwarmProcess(worker, clock, inside, self.inboxes[worker], self._nonce, draw, self._emit), device)

    async def kill_process(self, name: str) -> None:
        for worker in [worker for worker in self.workers if process_of(worker) == name]:
            await self.kill(worker)

    def add_worker(self, name: str) -> None:
        self._start(self._node(name), None)

    def _start(self, node: SwarmProcess, device: DeviceTurns | None) -> None:
        kind = partial(GroupCompute, devices=[CPU] * self.groups[node.name]) if node.name in self.groups else StageCompute
        compute = kind(
            DividedJob(
                *(self.job, self.captured, self.bounds, self.micro_batches, self.generators),
                chunks=self.settings.chunks,
                staleness=self.settings.staleness,
                recompute=self.recompute,
                compiler=self.compiler,
            )
        )
        worker = Worker(node, compute, MemoryAccess(self, node.name), self.settings, ("coordinator",), device=device)
        self.workers[node.name], self.computes[node.name] = worker, compute
        self.tasks[node.name] = asyncio.get_running_loop().create_task(worker.run())

    async def kill(self, name: str) -> None:
        del self.inboxes[name]
        self.tasks.pop(name).cancel()
        worker = self.workers.pop(name)
        await worker.node.clock.close()  # type: ignore[attr-defined]

    async def run(self, disturb: Callable[["OneProcess", AnyEvent], None] = lambda swarm, event: None) -> None:
        self.disturb = disturb
        self.coordinator = coordinator = Coordinator(self._node("coordinator"), self.journal, self.settings)
        feeder = Feeder(
            self._node("feeder"),
            SampleFeed(self.job, self.captured, programs_of(self.captured, self.bounds), self.micro_batches, self.generators),
            self.settings,
            ("coordinator",),
        )
        for number in range(self._first):
            self.add_worker(f"worker-{number}")
        roles = [asyncio.create_task(coordinator.run()), asyncio.create_task(feeder.run())]
        while not roles[1].done() or not all(worker.finished for worker in self.workers.values()):
            await asyncio.sleep(0.05)
            if self.errors:
                raise self.errors[0]
            for task in (*roles, *self.tasks.values()):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
        for task in (*roles, *self.tasks.values()):
            task.cancel()
        for compute in self.computes.values():
            compute.close()
        feeder.feed.close()  # type: ignore[attr-defined]
