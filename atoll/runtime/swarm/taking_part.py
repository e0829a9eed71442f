"""Taking part: the process of a worker or a feeder, from its credentials to the end of the run."""

import asyncio
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

import torch

from atoll.control.device import Device
from atoll.control.feeder import Feeder
from atoll.control.hosting import hosted_workers
from atoll.control.messages import Message
from atoll.control.worker import Worker
from atoll.control.world import Node
from atoll.errors import AtollError, FabricError
from atoll.events import Observer
from atoll.fabric.address import split_address
from atoll.fabric.backoff import Backoff
from atoll.fabric.deadline import LinkEstimate
from atoll.fabric.remote import Remote
from atoll.fabric.security import Credentials, Member
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.runtime.memory import keep_freed_memory
from atoll.runtime.swarm.clock import LoopClock
from atoll.runtime.swarm.coding import Coding, coding_of
from atoll.runtime.swarm.compute import programs_of
from atoll.runtime.swarm.feed import SampleFeed
from atoll.runtime.swarm.files import RemoteCheckpoints
from atoll.runtime.swarm.group import GroupCompute
from atoll.runtime.swarm.measured import Measured
from atoll.runtime.swarm.measuring import Account, MeasureService, Measuring
from atoll.runtime.swarm.own_devices import OwnDevices
from atoll.runtime.swarm.pacing import Imposed, Pace, PacedCompute
from atoll.runtime.swarm.spec import SwarmSpec
from atoll.runtime.swarm.transport import COORDINATOR, Directory, FabricTransport, Inboxes, Place, SwarmService
from atoll.units import format_seconds, plural

__all__ = ["Ending", "check_divisible", "check_hosted", "ending_of", "take_part"]

Ending: TypeAlias = Literal["over", "stopped", "left"]
"""How taking part ended: with the run's last step, with a run that was stopped before it, or because this process asked to leave."""

_PEERS = Backoff(largest_seconds=1.0, attempts=10)  # one that left is not dialled for ever; the next message to it dials anew
_PATIENT = Backoff(largest_seconds=1.0, attempts=800)  # a coordinator that is started anew is waited for: about ten minutes
_REGISTER_SECONDS = 3.0  # a coordinator that is started anew does not know where we are
_ANSWER_SECONDS = 30.0
_ACCOUNT_SECONDS = 2.0
_FIRST_SECONDS = 120.0  # to be connected at all
_GOODBYE_SECONDS = 10.0  # after the coordinator's: who has worked ends by itself before


def check_divisible(captured: Captured, bounds: tuple[int, ...]) -> None:
    """AtollError where stages cannot be trained apart."""
    for program in programs_of(captured, bounds):
        changed = [unit.buffers[attribute] for unit in program.units for attribute in unit.changes]
        if changed:
            name = captured.program.graph_signature.inputs_to_buffers.get(changed[0], changed[0]).removeprefix("model.")
            raise AtollError(
                f"the buffer {name!r} is changed by computing (as BatchNorm's running statistics are), so workers of a stage would come to "
                "differ; in swarm mode use track_running_stats=False or another normalisation, or train in lockstep"
            )


def check_hosted(stages: int, spec: SwarmSpec) -> None:
    """AtollError where a process cannot host so many stages."""
    if not 1 <= stages <= spec.settings.stages:
        raise AtollError(
            f"--stages {stages}: the run has {plural(spec.settings.stages, 'stage')}; a process hosts at least one and each at most once"
        )


def ending_of(workers: Sequence[tuple[int, int]], steps: int) -> Ending:
    """Of a process, by the stages of its workers and the versions they last heard of; those who were let go have no stage."""
    versions = [version for stage, version in workers if stage >= 0]
    if not versions:
        return "left"
    return "over" if max(versions) >= steps else "stopped"


def take_part(
    credentials: Credentials,
    address: str,
    spec: SwarmSpec,
    job: Job,
    *,
    observer: Observer | None = None,
    dialled: bool = True,
    imposed: Imposed | None = None,
    say: Callable[[str], None] = lambda line: None,
    polite: bool = False,
    devices: OwnDevices | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> Ending:
    """Works or feeds until the run is over. With `dialled=False` nobody connects to this machine: it is reached through the coordinator.

    `devices` are a worker's own: several work in lockstep, as one strong worker, and it may host several stages on them; the coordinator
    says which. `imposed` names the device whose speed it has. `say` tells people how far it is, `warn` what they might not expect.
    With `polite` a worker that gets SIGINT or SIGTERM asks to be let go: what it has summed still counts, and it leaves after the step, or
    as soon as its stage can do without it. The second signal ends it at once (KeyboardInterrupt).
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    own = devices or OwnDevices()
    check_hosted(own.stages, spec)
    began = time.monotonic()
    captured = capture_program(job)
    check_divisible(captured, spec.bounds)
    say(f"the model is captured ({format_seconds(time.monotonic() - began)}); connects to the others")
    return asyncio.run(_Process(credentials, address, spec, job, captured, observer, dialled, imposed, say, polite, own, warn).run())


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
        say: Callable[[str], None],
        polite: bool,
        devices: OwnDevices,
        warn: Callable[[str], None],
    ) -> None:
        self.credentials, self.address, self.spec, self.job, self.captured = credentials, address, spec, job, captured
        self._observer, self._dialled, self._imposed = observer, dialled, imposed
        self._say, self._polite, self._devices, self._warn = say, polite, devices, warn
        self._ending: Ending = "over"
        self._errors: list[BaseException] = []

    async def run(self) -> "Ending":
        loop = asyncio.get_running_loop()
        clock = LoopClock(self._errors.append)
        inboxes = Inboxes(self.credentials.name)

        def arrived(to: str, message: Message) -> None:
            loop.call_soon_threadsafe(inboxes.put, to, message)

        member = await asyncio.to_thread(self._member, arrived)
        try:
            listening = await asyncio.to_thread(member.fabric.listen, "0.0.0.0:0") if self._dialled else ""
            coordinator = await asyncio.to_thread(member.join, self.address, _PATIENT)
            registered = asyncio.Event()
            clock.spawn(self._register(coordinator, _own_address(self.address, listening), registered))
            transport = FabricTransport(member, coordinator, coding=self._coding(member), inside=inboxes)
            nonce = time.time_ns()
            nodes = [
                Node(name, clock, transport, inboxes.open(name, clock), nonce, random.Random(secrets.randbits(64)))
                for name in hosted_workers(self.credentials.name, self._devices.stages)
            ]
            clock.spawn(_end_after_goodbye(coordinator))
            await self._until_over(_connected(registered, self.address))  # what is measured begins there
            if self.credentials.role == "feeder":
                await self._feed(nodes[0])
            else:
                await self._work(nodes, member, coordinator)
            return self._ending
        finally:
            await clock.close()
            await asyncio.to_thread(member.close)

    def _member(self, arrived: Callable[[str, Message], None]) -> Member:
        return Member(
            self.credentials,
            services=[SwarmService(arrived)],
            fingerprint=self.spec.fingerprint,
            observer=self._observer,
            backoff=_PEERS,
        )

    def _coding(self, member: Member) -> Coding:
        def estimate(name: str) -> LinkEstimate | None:
            peer = member.fabric.peers.get(name)
            return None if peer is None else peer.estimate

        return coding_of(self.spec.codec, estimate, self._observer)

    async def _register(self, coordinator: Remote, place: Place, registered: asyncio.Event) -> None:
        while True:
            try:
                await asyncio.wrap_future(coordinator.call_soon(Directory.register, place, timeout_seconds=_ANSWER_SECONDS))
                registered.set()
            except FabricError as error:
                if coordinator.given_up is not None:
                    raise coordinator.given_up from error
            await asyncio.sleep(_REGISTER_SECONDS)

    async def _feed(self, node: Node) -> None:
        programs = programs_of(self.captured, self.spec.bounds)
        feed = SampleFeed(self.job, self.captured, programs, self.spec.micro_batches, threading.Lock())
        await self._until_over(Feeder(node, feed, self.spec.settings, (COORDINATOR,)).run())
        feed.close()

    async def _work(self, nodes: Sequence[Node], member: Member, coordinator: Remote) -> None:
        """One worker for every stage hosted, on one device."""
        generators, device = threading.Lock(), Device(nodes[0].clock)
        checkpoints = RemoteCheckpoints(coordinator)
        computes, workers, accounts = [], [], {}
        for node, planned in zip(nodes, (*self._devices.planned, *[-1] * len(nodes)), strict=False):
            compute, measuring = self._compute(generators), Measuring(self._say)
            worker = Worker(
                node,
                compute,
                checkpoints,
                self.spec.settings,
                (COORDINATOR,),
                on_state=measuring.on_state,
                on_kernel=measuring.on_kernel,
                device=device,
                planned=planned,
            )
            computes.append(compute)
            workers.append(worker)
            accounts[node.name] = measuring
        nodes[0].clock.spawn(_account(accounts, member, coordinator))
        with self._obeying_signals(workers, coordinator):
            await self._until_over(_all(worker.run() for worker in workers))
        await self._until_over(_give_account(accounts, member, coordinator, _ACCOUNT_SECONDS))
        self._ending = ending_of([(worker.stage, worker.announced) for worker in workers], self.spec.settings.steps)
        for worker, compute in zip(workers, computes, strict=True):
            if worker.state is not None and worker.version == self.spec.settings.steps:
                await self._until_over(checkpoints.write(worker.epoch, worker.version, worker.stage, compute.snapshot(worker.state)))
            compute.close()

    @contextmanager
    def _obeying_signals(self, workers: Sequence[Worker], coordinator: Remote) -> Iterator[None]:
        """The first asks to be let go; after it they do what they always do."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM) if self._polite else ()

        def leave() -> None:
            if coordinator.state == "dead":
                self._errors.append(FabricError(f"leaves; the coordinator was not there to be told ({coordinator.lost_because})"))
                return
            for worker in workers:
                worker.leave()
            self._say("leaves as soon as its stage can do without it, after this step at the soonest; Ctrl-C again leaves at once")
            for number in numbers:
                loop.remove_signal_handler(number)

        for number in numbers:
            loop.add_signal_handler(number, leave)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _compute(self, generators: threading.Lock) -> PacedCompute | GroupCompute:
        spec, devices = self.spec, self._devices.find()
        if len(devices) == 1:
            compute = PacedCompute(
                *(self.job, self.captured, spec.bounds),
                chunks=spec.settings.chunks,
                micro_batches=spec.micro_batches,
                generators=generators,
                staleness=spec.settings.staleness,
                recompute=spec.recompute,
                device=devices[0],
            )
            if self._imposed is not None:
                compute.pace = self._pace(0, spec.micro_batches)
            return compute
        group = GroupCompute(
            *(self.job, self.captured, spec.bounds),
            chunks=spec.settings.chunks,
            micro_batches=spec.micro_batches,
            generators=generators,
            staleness=spec.settings.staleness,
            recompute=spec.recompute,
            devices=devices,
            shares=self._devices.shares,
            say=self._warn,
        )
        if self._imposed is not None:
            group.impose(self._pace)
        return group

    def _pace(self, index: int, micro_batches: Sequence[tuple[int, int]]) -> Pace:
        """Of one of the worker's devices, for its samples of every micro-batch."""
        assert self._imposed is not None
        own = self._imposed.of_number(self._devices.numbers[index])
        return Pace(own, self.captured.graph, self.spec.bounds, micro_batches, self.spec.recompute)

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> None:
        """The role's own end, or the first error of anything it started."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=0.2)
            if self._errors:
                task.cancel()
                raise self._errors[0]
        await task


async def _connected(registered: asyncio.Event, address: str) -> None:
    try:
        await asyncio.wait_for(registered.wait(), _FIRST_SECONDS)
    except TimeoutError:
        raise FabricError(f"{address}: the coordinator did not answer for {format_seconds(_FIRST_SECONDS)}; is the run over?") from None


async def _end_after_goodbye(coordinator: Remote) -> None:
    """A coordinator that says goodbye does so at the run's end; whoever has heard nothing of that by then waits for nobody."""
    gone = 0.0
    while gone < _GOODBYE_SECONDS:
        await asyncio.sleep(0.5)
        gone = gone + 0.5 if coordinator.state == "dead" and " left: " in coordinator.lost_because else 0.0
    raise FabricError("the coordinator has left: the run is over, or was stopped")


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)


async def _account(accounts: Mapping[str, Measuring], member: Member, coordinator: Remote) -> None:
    """Tells the coordinator from time to time what was measured here; what does not arrive is told again."""
    while True:
        await asyncio.sleep(_ACCOUNT_SECONDS)
        await _give_account(accounts, member, coordinator, _ANSWER_SECONDS)


async def _give_account(accounts: Mapping[str, Measuring], member: Member, coordinator: Remote, limit: float) -> None:
    peers = {name: remote for name, remote in member.fabric.peers.items() if remote.estimate is not None}
    for worker, measuring in accounts.items():
        measured = _look(measuring, peers)
        peers = {}  # links are the process's: they are in the account of its first worker
        with suppress(FabricError):
            account = Account(worker, measured)
            await asyncio.wrap_future(coordinator.call_soon(MeasureService.measured, account, timeout_seconds=limit))


def _look(measuring: Measuring, peers: Mapping[str, Remote]) -> Measured:
    estimates = {name: remote.estimate for name, remote in peers.items()}
    return measuring.look(
        {name: remote.received_bytes for name, remote in peers.items()},
        {name: estimate.incoming.bytes_per_s for name, estimate in estimates.items() if estimate and estimate.incoming.bytes_per_s},
        {name: estimate.round_trip.mean for name, estimate in estimates.items() if estimate and estimate.round_trip.mean},
    )


def _own_address(coordinator: str, listening: str) -> Place:
    """Where peers dial this process: the address it has on the way to the coordinator (the first, where others stand by)."""
    if not listening:
        return Place("")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split_address(coordinator.partition(",")[0]))
        return Place(f"{probe.getsockname()[0]}:{listening.rpartition(':')[2]}")
