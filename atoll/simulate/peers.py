"""Peers: a swarm of modelled workers, which take virtual time and compute nothing, for many peers over many hours.

They come and go as a trace says, or all stay; it is noted who committed how much, and when.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.control import Coordinator, Feeder, Settings, SwarmProcess, Worker
from atoll.control.kernels import DeviceTurns
from atoll.control.messages import Backward, Committed, Forward, StateChunk, SumChunk, SumPart
from atoll.control.multi_stage import hosted_workers, process_of
from atoll.events import AnyEvent, CheckpointSaved, EventStream, MemberMoved, Observer, StageLost, StepFinished
from atoll.simulate.disks import JournalDisk, JournalHandle
from atoll.simulate.loop import Loop, Process
from atoll.simulate.network import SimulatedLinks, SimulatedNetwork

__all__ = ["ModelledCompute", "ModelledFeed", "PeerModel", "PeerSwarm"]


class ModelledCompute:
    """What `atoll.control.world.Compute` asks for. A buffer is a count of micro-batches; a state is a number of steps."""

    def __init__(self, process: Process, *, forward_seconds: float, backward_seconds: float, slowness: float = 1.0) -> None:
        self._process = process
        self._forward = forward_seconds * slowness
        self._backward = backward_seconds * slowness

    async def initial(self, stage: int) -> int:
        """No step made."""
        return 0

    async def forward(self, state: int, version: int, micro_batch: int, stage: int, entering: Any) -> None:
        """Takes its time."""
        await self._process.sleep(self._forward)

    async def turn(self, state: int, version: int, micro_batch: int, stage: int, entering: Any) -> tuple[None, int, float, float]:
        """Takes the time of both directions."""
        await self._process.sleep(self._forward + self._backward)
        return None, 1, 0.0, 1.0

    async def backward(self, state: int, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any) -> tuple[None, int]:
        """Takes its time."""
        await self._process.sleep(self._backward)
        return None, 1

    def buffer(self, stage: int) -> list[int]:
        """Nothing counted."""
        return [0]

    async def accumulate(self, buffer: list[int], contribution: int) -> None:
        """Counted with the kernel."""
        buffer[0] += contribution

    def part(self, buffers: Sequence[list[int]], stage: int, section: int, chunk: int) -> int:
        """How many."""
        return sum(buffer[0] for buffer in buffers)

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Nobody sends anything else."""
        return True

    def zero(self, stage: int, chunk: int) -> int:
        """None."""
        return 0

    def add(self, total: int, part: int) -> int:
        """Both."""
        return total + part

    def digest(self, sums: Sequence[int]) -> str:
        """The counts."""
        return str(sums[0])

    def norm_squared(self, stage: int, section: int, sums: Sequence[int]) -> float:
        """Always the same."""
        return 1.0

    async def apply(self, state: int, sums: Sequence[int], commit: Committed) -> int:
        """One step more."""
        return state + 1

    def delayed(self, state: int) -> int:
        """The same."""
        return state

    def read_chunk(self, state: int, chunk: int) -> int:
        """The number of steps."""
        return state

    async def keep(self, state: int) -> int:
        """A number."""
        return state

    def read_kept(self, kept: int, chunk: int) -> int:
        """The number of steps."""
        return kept

    def expect(self, stage: int) -> None:
        """Nothing to make ready."""

    async def assemble(self, stage: int, chunks: Sequence[int]) -> int:
        """All chunks say the same."""
        return chunks[0]

    def snapshot(self, state: int) -> int:
        """A number."""
        return state

    async def restore(self, stage: int, snapshot: int) -> int:
        """The same number."""
        return snapshot


class ModelledFeed:
    """Micro-batches of nothing."""

    async def load(self, version: int, micro_batch: int) -> None:
        """At once."""


COORDINATOR = "coordinator"


class PeerModel(msgspec.Struct, frozen=True, kw_only=True):
    """What peers and links are like. Times are of one micro-batch on one stage; bytes of one stage."""

    forward_seconds: float
    backward_seconds: float
    latency_seconds: float = 0.02
    activation_bytes: float = 0.0  # between stages, each way; what feeders send is small
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    bytes_per_s: float = 1.25e8
    disk_bytes_per_s: float = 1e9  # of the coordinator, where states are stored
    shared_links: bool = False  # connections share a host's bandwidth up and down; otherwise uplinks send one message after another
    feeders: int = 1
    seed: int = 0

    @property
    def seconds(self) -> float:
        """Of a micro-batch on one stage."""
        return self.forward_seconds + self.backward_seconds


class ModelledStore:
    """States at the coordinator: what a peer writes or reads passes its link and the coordinator's disk, which serves one after another."""

    def __init__(self, swarm: "PeerSwarm", process: Process) -> None:
        self._swarm, self._process = swarm, process

    async def write(self, epoch: int, version: int, stage: int, snapshot: int) -> None:
        """The first write of a key stays."""
        await self._pass(self._process.name, COORDINATOR)
        coordinator = self._swarm.coordinator
        if coordinator.why_not_stored(self._process.name, epoch, version, stage, 1) is None:
            self._swarm.stored.setdefault((epoch, version, stage), snapshot)
            coordinator.stored(epoch, version, stage, str(snapshot))

    async def digest(self, snapshot: int) -> str:
        """In no time: bytes are hashed faster than they are sent."""
        return str(snapshot)

    async def read(self, epoch: int, version: int, stage: int) -> int | None:
        """What was written, or None."""
        await self._pass(COORDINATOR, self._process.name)
        return self._swarm.stored.get((epoch, version, stage))

    async def _pass(self, source: str, target: str) -> None:
        swarm, size = self._swarm, self._swarm.model.state_bytes
        now = swarm.loop.now
        swarm.disk_free_at = max(now, swarm.disk_free_at) + size / swarm.model.disk_bytes_per_s
        link = swarm.network.transfer_seconds(source, target, size) if size else 0.0
        await self._process.sleep(swarm.model.latency_seconds + max(link, swarm.disk_free_at - now))


class PeerSwarm:
    """A coordinator, feeders, and workers by name. Events have virtual times."""

    def __init__(self, settings: Settings, model: PeerModel, *observers: Observer) -> None:
        self.settings, self.model = settings, model
        self.loop = Loop()
        self.random = random.Random(model.seed)
        chunks = settings.chunks
        sizes = {
            Forward: model.activation_bytes,
            Backward: model.activation_bytes,
            StateChunk: model.state_bytes / chunks,
            SumPart: model.gradient_bytes / chunks,
            SumChunk: model.gradient_bytes / chunks,
        }
        self.network = SimulatedNetwork(
            self.loop,
            self.random,
            latency_seconds=model.latency_seconds,
            jitter_seconds=0.0,
            sizes={kind: size for kind, size in sizes.items() if size},
            bytes_per_s=model.bytes_per_s,
            shared=SimulatedLinks(model.bytes_per_s) if model.shared_links else None,
            unlimited=frozenset(f"feeder{index}" for index in range(model.feeders)),
        )
        self.journal_disk = JournalDisk(self.loop, self.random, fence=True)
        self.journal_disk.seconds = 0.01
        self.stored: dict[tuple[int, int, int], int] = {}
        self.disk_free_at = 0.0
        self.committed: list[StepFinished] = []
        self.moves: list[MemberMoved] = []
        self.rollbacks: list[StageLost] = []
        self.saves: list[CheckpointSaved] = []
        self.workers: dict[str, Worker] = {}
        self._emit = EventStream(self._note, *observers, seconds=lambda: self.loop.now)
        self._processes: dict[str, Process] = {}
        self._nonce = 0
        node = self._node(COORDINATOR)
        process = self._processes[COORDINATOR]
        self.coordinator = Coordinator(node, JournalHandle(self.journal_disk, process), settings)
        process.spawn(self.coordinator.run())
        self.feeders = [self._start_feeder(f"feeder{index}") for index in range(model.feeders)]

    def _node(self, name: str) -> SwarmProcess:
        self._nonce += 1
        self._processes[name] = Process(name, self.loop)
        return self._hosted_node(name)

    def _hosted_node(self, name: str) -> SwarmProcess:
        process = self._processes[process_of(name)]
        port = self.network.open(process, name)
        return SwarmProcess(name, process, port, port.inbox, self._nonce, random.Random(self.random.getrandbits(32)), self._emit)

    def _start_feeder(self, name: str) -> Feeder:
        feeder = Feeder(self._node(name), ModelledFeed(), self.settings, (COORDINATOR,))
        self._processes[name].spawn(feeder.run())
        return feeder

    def start(self, name: str, slowness: float = 1.0, stages: int = 1) -> None:
        """A process joins that hosts so many stages, on one device."""
        first = self._node(name)
        process = self._processes[name]
        device = DeviceTurns(process)
        for worker in hosted_workers(name, stages):
            self._start_worker(first if worker == name else self._hosted_node(worker), process, device, slowness)

    def _start_worker(self, node: SwarmProcess, process: Process, device: DeviceTurns, slowness: float) -> None:
        compute = ModelledCompute(
            process,
            forward_seconds=self.model.forward_seconds,
            backward_seconds=self.model.backward_seconds,
            slowness=slowness,
        )
        store = ModelledStore(self, process)
        worker = self.workers[node.name] = Worker(node, compute, store, self.settings, (COORDINATOR,), device=device)
        process.spawn(worker.run())

    def kill(self, name: str) -> None:
        """A process is gone with all its workers, without a word."""
        self._processes[name].kill()
        for worker in [worker for worker in self.workers if process_of(worker) == name]:
            del self.workers[worker]

    def _note(self, event: AnyEvent) -> None:
        match event:
            case StepFinished():
                self.committed.append(event)
            case MemberMoved():
                self.moves.append(event)
            case StageLost():
                self.rollbacks.append(event)
            case CheckpointSaved():
                self.saves.append(event)

    def useful_micro_batches(self) -> int:
        """In committed steps, those undone by a rollback not counted: the highest version reached counts each step once."""
        return len({event.step for event in self.committed}) * self.settings.micro_batches
