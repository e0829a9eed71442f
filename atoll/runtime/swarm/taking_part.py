"""Taking part: the process of a worker or a feeder, from its credentials to the end of the run."""

import asyncio
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from atoll.control.feeder import Feeder
from atoll.control.messages import Message
from atoll.control.worker import Worker
from atoll.control.world import Node
from atoll.errors import AtollError, FabricError
from atoll.events import Observer
from atoll.fabric.backoff import Backoff
from atoll.fabric.carrier import split_address
from atoll.fabric.remote import Remote
from atoll.fabric.security import Credentials, Member
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.runtime.stage.program import shared_parameters
from atoll.runtime.swarm.clock import LoopClock
from atoll.runtime.swarm.compute import StageCompute, programs_of
from atoll.runtime.swarm.feed import SampleFeed
from atoll.runtime.swarm.files import RemoteCheckpoints
from atoll.runtime.swarm.pacing import Imposed, Pace, PacedCompute
from atoll.runtime.swarm.spec import SwarmSpec
from atoll.runtime.swarm.transport import COORDINATOR, Directory, FabricTransport, Place, SwarmService

__all__ = ["check_divisible", "take_part"]

_PATIENT = Backoff(attempts=60)  # a coordinator that is started anew is waited for: about ten minutes
_REGISTER_SECONDS = 3.0  # a coordinator that is started anew does not know where we are
_ANSWER_SECONDS = 30.0


def check_divisible(job: Job, captured: Captured, bounds: tuple[int, ...]) -> None:
    """AtollError where stages cannot be trained apart."""
    if job.precision == "fp16":
        raise AtollError("Job: precision: swarm training runs in fp32 or bf16; fp16 needs a loss scale that all agree on")
    homes: dict[str, int] = {}
    for stage, program in enumerate(programs_of(captured, bounds)):
        for name in {name for unit in program.units for name in unit.parameters.values()}:
            if name in shared_parameters(captured) and homes.setdefault(name, stage) != stage:
                raise AtollError(
                    f"the parameter {name!r} is used by stages {homes[name]} and {stage}; swarm training needs every parameter in one "
                    "stage: give it a plan whose stages keep its uses together"
                )


def take_part(
    credentials: Credentials,
    address: str,
    spec: SwarmSpec,
    job: Job,
    *,
    observer: Observer | None = None,
    dialled: bool = True,
    imposed: Imposed | None = None,
) -> None:
    """Works or feeds until the run is over. With `dialled=False` nobody connects to this machine: it is reached through the coordinator.

    `imposed` names the device whose speed a worker has.
    """
    torch.set_num_threads(1)
    captured = capture_program(job)
    check_divisible(job, captured, spec.bounds)
    asyncio.run(_Process(credentials, address, spec, job, captured, observer, dialled, imposed).run())


class _Process:
    """One node of the swarm: its fabric, its clock, its role."""

    def __init__(
        self,
        credentials: Credentials,
        address: str,
        spec: SwarmSpec,
        job: Job,
        captured: Captured,
        observer: Observer | None,
        dialled: bool,
        imposed: Imposed | None,
    ) -> None:
        self.credentials, self.address, self.spec, self.job, self.captured = credentials, address, spec, job, captured
        self._observer, self._dialled, self._imposed = observer, dialled, imposed
        self._errors: list[BaseException] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        clock = LoopClock(self._errors.append)
        inbox = clock.mailbox()

        def arrived(message: Message) -> None:
            loop.call_soon_threadsafe(inbox.put, message)

        member = await asyncio.to_thread(self._member, arrived)
        try:
            listening = await asyncio.to_thread(member.fabric.listen, "0.0.0.0:0") if self._dialled else ""
            coordinator = await asyncio.to_thread(member.join, self.address)
            clock.spawn(self._register(coordinator, _own_address(self.address, listening)))
            transport = FabricTransport(member, coordinator)
            node = Node(self.credentials.name, clock, transport, inbox, time.time_ns(), random.Random(secrets.randbits(64)))
            await self._play(node, coordinator)
        finally:
            await clock.close()
            await asyncio.to_thread(member.close)

    def _member(self, arrived: Callable[[Message], None]) -> Member:
        return Member(
            self.credentials,
            services=[SwarmService(arrived)],
            fingerprint=self.spec.fingerprint,
            observer=self._observer,
            backoff=_PATIENT,
        )

    async def _register(self, coordinator: Remote, place: Place) -> None:
        while True:
            try:
                await asyncio.wrap_future(coordinator.call_soon(Directory.register, place, timeout_seconds=_ANSWER_SECONDS))
            except FabricError as error:
                if coordinator.given_up is not None:
                    raise coordinator.given_up from error
            await asyncio.sleep(_REGISTER_SECONDS)

    async def _play(self, node: Node, coordinator: Remote) -> None:
        generators = threading.Lock()
        spec = self.spec
        if self.credentials.role == "feeder":
            programs = programs_of(self.captured, spec.bounds)
            feed = SampleFeed(self.job, self.captured, programs, spec.micro_batches, generators)
            await self._until_over(Feeder(node, feed, spec.settings, (COORDINATOR,)).run())
            feed.close()
            return
        compute = self._compute(generators)
        checkpoints = RemoteCheckpoints(coordinator)
        worker = Worker(node, compute, checkpoints, spec.settings, (COORDINATOR,))
        await self._until_over(worker.run())
        if worker.state is not None and worker.version == spec.settings.steps:
            final = checkpoints.write(worker.epoch, worker.version, worker.stage, compute.snapshot(worker.state))
            await self._until_over(final)
        compute.close()

    def _compute(self, generators: threading.Lock) -> StageCompute:
        spec = self.spec
        kind = StageCompute if self._imposed is None else PacedCompute
        compute = kind(
            self.job, self.captured, spec.bounds, chunks=spec.settings.chunks, micro_batches=spec.micro_batches, generators=generators
        )
        if self._imposed is not None:
            assert isinstance(compute, PacedCompute)
            compute.pace = Pace(self._imposed, self.captured.graph, spec.bounds, spec.micro_batches)
        return compute

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> None:
        """The role's own end, or the first error of anything it started."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=0.2)
            if self._errors:
                task.cancel()
                raise self._errors[0]
        await task


def _own_address(coordinator: str, listening: str) -> Place:
    """Where peers dial this process: the address it has on the way to the coordinator."""
    if not listening:
        return Place("")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split_address(coordinator))
        return Place(f"{probe.getsockname()[0]}:{listening.rpartition(':')[2]}")
