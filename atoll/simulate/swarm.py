"""Swarm: a whole simulated swarm — processes by name, started, killed, stopped and started again — running the protocol's own code."""

import random
from collections.abc import Callable

import msgspec

from atoll.control import Coordinator, Feeder, Settings, SwarmProcess, Worker
from atoll.control.journal import replay
from atoll.control.kernels import DeviceTurns
from atoll.control.message_checks import why_unsound
from atoll.control.multi_stage import hosted_workers, process_of
from atoll.events import EventStream, Observer
from atoll.simulate.arithmetic import CHUNKS, MAX_NORM, ExactCompute, ExactFeed
from atoll.simulate.checker import Checker
from atoll.simulate.disks import CheckpointDisk, CheckpointStore, JournalDisk, JournalHandle
from atoll.simulate.loop import Loop, Process
from atoll.simulate.network import SimulatedNetwork

__all__ = ["COORDINATORS", "ExactSwarm", "SwarmRoles", "SwarmSize", "exact_settings"]

COORDINATORS = ("c0", "c1")


class SwarmSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a simulated swarm is."""

    stages: int = 2
    workers: int = 6  # processes
    feeders: int = 1
    micro_batches: int = 6
    staleness: int = 0
    checkpoint_every: int = 2  # 0: as is worth it
    rebalance_seconds: float = 0.0
    tied: bool = False  # the first and the last stage share weights
    hosting: tuple[int, ...] = ()  # stages hosted by each of the first processes; all others host one

    def hosted(self, process: str) -> tuple[str, ...]:
        """The workers of a process."""
        number = int(process[1:])
        return hosted_workers(process, self.hosting[number] if number < len(self.hosting) else 1)


def exact_settings(shape: SwarmSize) -> Settings:
    """Settings in the time scale of `ExactCompute`."""
    return Settings(
        stages=shape.stages,
        micro_batches=shape.micro_batches,
        steps=1_000_000,
        chunks=CHUNKS,
        heartbeat_seconds=2.0,
        silent_beats=3,
        forget_seconds=60.0,
        gather_seconds=3.0,
        patience_seconds=8.0,
        lost_seconds=9.0,
        hold_seconds=4.0,
        hold_limit_seconds=20.0,
        ban_seconds=6.0,
        checkpoint_every=shape.checkpoint_every,
        rebalance_seconds=shape.rebalance_seconds,
        migration_seconds=2.0,
        max_norm=MAX_NORM,
        in_flight=8,
        staleness=shape.staleness,
        tied=((0, shape.stages - 1),) if shape.tied else (),
    )


class SwarmRoles(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a swarm run; tests of the checker have others than those of production."""

    coordinator: type[Coordinator] = Coordinator
    feeder: type[Feeder] = Feeder
    worker: type[Worker] = Worker
    fenced: bool = True  # whether the journal refuses records of older terms


class ExactSwarm:
    """A swarm with exact arithmetic, its checker, and handles on every process."""

    def __init__(
        self,
        shape: SwarmSize,
        seed: int,
        *,
        roles: SwarmRoles | None = None,
        settings: Settings | None = None,
        observe: Observer = lambda event: None,
    ) -> None:
        self.shape = shape
        self.roles = roles or SwarmRoles()
        self.settings = settings or exact_settings(shape)
        self.random = random.Random(seed)
        self.loop = Loop()
        self.network = SimulatedNetwork(self.loop, self.random)
        self.checkpoint_disk = CheckpointDisk(self.random)
        self.checker = Checker(self.loop, self.settings, self.checkpoint_disk.stored)
        self.network.check = self.checker.on_message
        self.network.refuse = lambda message: why_unsound(message, self.settings)
        self.journal_disk = JournalDisk(self.loop, self.random, fence=self.roles.fenced, on_record=self.checker.on_record)
        self.processes: dict[str, Process] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.feeders: dict[str, Feeder] = {}
        self.workers: dict[str, Worker] = self.checker.workers
        self.computes: dict[str, ExactCompute] = {}
        self._emit = EventStream(observe, seconds=lambda: self.loop.now)
        self._starts = 0
        self._slowness: dict[str, float] = {}

    def start_all(self) -> None:
        """The first coordinator, all feeders and workers."""
        self.start(COORDINATORS[0])
        for name in self.names():
            self.start(name)

    def names(self) -> list[str]:
        """Of the processes of feeders and workers."""
        return [f"f{i}" for i in range(self.shape.feeders)] + [f"w{i}" for i in range(self.shape.workers)]

    def alive(self, name: str) -> bool:
        """Whether a process of that name runs."""
        process = self.processes.get(name)
        return process is not None and process.alive

    def start(self, name: str) -> None:
        """A new process of that name, with nothing in memory."""
        if self.alive(name):
            return
        self._starts += 1
        process = self.processes[name] = Process(name, self.loop)
        node = self._node(name, process)
        if name in COORDINATORS:
            journal = JournalHandle(self.journal_disk, process)
            coordinator = self.coordinators[name] = self.roles.coordinator(node, journal, self.settings, self.checkpoint_disk.discard)
            process.spawn(coordinator.run())
        elif name.startswith("f"):
            feeder = self.feeders[name] = self.roles.feeder(node, ExactFeed(), self.settings, COORDINATORS, on_owned=self.checker.on_owned)
            process.spawn(feeder.run())
        else:
            device = DeviceTurns(process)
            for worker in self.shape.hosted(name):
                self._start_worker(node if worker == name else self._node(worker, process), process, device)

    def _node(self, name: str, process: Process) -> SwarmProcess:
        port = self.network.open(process, name)
        return SwarmProcess(name, process, port, port.inbox, self._starts, random.Random(self.random.getrandbits(32)), self._emit)

    def _start_worker(self, node: SwarmProcess, process: Process, device: DeviceTurns) -> None:
        compute = self.computes[node.name] = ExactCompute(
            process, node.random, self.checker.on_digest, self.settings.tied[0] if self.settings.tied else ()
        )
        compute.slowness = self._slowness.get(process.name, 1.0)
        store = CheckpointStore(self.checkpoint_disk, process, self.coordinator)
        worker = self.workers[node.name] = self.roles.worker(
            node, compute, store, self.settings, COORDINATORS, on_state=self.checker.on_state, device=device
        )
        process.spawn(worker.run())

    def kill(self, name: str) -> None:
        """Ends a process at once, with all its workers."""
        if self.alive(name):
            self.processes[name].kill()
            for worker in self.hosted(name):
                del self.workers[worker]

    def hosted(self, name: str) -> list[str]:
        """The workers that run in a process."""
        return [worker for worker in self.workers if process_of(worker) == name]

    def stop(self, name: str) -> None:
        """As SIGSTOP does."""
        if self.alive(name):
            self.processes[name].stop()

    def go_on(self, name: str) -> None:
        """As SIGCONT does."""
        if self.alive(name) and self.processes[name].stopped:
            self.processes[name].go_on()

    def slow_down(self, name: str, factor: float) -> None:
        """Kernels of this process take so many times as long, also after it is started again."""
        self._slowness[name] = factor
        for worker, compute in self.computes.items():
            if process_of(worker) == name:
                compute.slowness = factor

    def coordinator(self) -> Coordinator | None:
        """The one with the newest term that still runs."""
        running = [c for name, c in self.coordinators.items() if self.alive(name) and not c.finished]
        return max(running, key=lambda c: c.term, default=None)

    def ended(self) -> bool:
        """Whether the run is over by the word of the newest coordinator, not of one that was replaced."""
        term = replay(self.journal_disk.records).term
        return any(c.finished and not c.deposed and c.term == term for name, c in self.coordinators.items() if self.alive(name))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Runs on until a time, a wish or a violation."""
        violations = self.checker.violations
        self.loop.run(until, (lambda: bool(violations)) if stop is None else (lambda: bool(violations) or stop()))

    def run_to_version(self, version: int, until: float = 1000.0) -> None:
        """Runs on until so many steps are committed in the present epoch."""
        records = self.journal_disk.records
        self.run(until, lambda: bool(records) and getattr(records[-1], "version", -1) + 1 >= version and hasattr(records[-1], "digests"))
