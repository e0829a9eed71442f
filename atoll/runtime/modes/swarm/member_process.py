"""The process of a worker or a feeder, from its credentials to the end of the run."""

import asyncio
import random
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from atoll.cluster.memory import keep_freed_memory
from atoll.control.feeder import Feeder
from atoll.control.kernels import DeviceTurns
from atoll.control.messages import Message
from atoll.control.multi_stage import hosted_workers
from atoll.control.worker import Worker
from atoll.control.world import SwarmProcess
from atoll.errors import AtollError, FabricError
from atoll.events import (
    AnyEvent,
    EventStream,
    MemberChanged,
    MemberState,
    Observer,
    PeerRefused,
    StopRequested,
    Warned,
)
from atoll.fabric.address import split_address
from atoll.fabric.deadline import Backoff, LinkEstimate
from atoll.fabric.remote import Remote
from atoll.fabric.security import Credentials, RunMember
from atoll.fabric.shaped import LinkChoice
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.runtime.imposed_speed import Imposed, Pace, pace_of_worker
from atoll.runtime.modes.swarm.compression import Compression, PlannedCompression, compression_of
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute, programs_of, stage_names
from atoll.runtime.modes.swarm.files import RemoteCheckpoints
from atoll.runtime.modes.swarm.group import GroupCompute
from atoll.runtime.modes.swarm.measurement import Account, MeasureService, Measuring, MemberEvent
from atoll.runtime.modes.swarm.micro_batches import SampleFeed, TensorChecks
from atoll.runtime.modes.swarm.report import Measured
from atoll.runtime.modes.swarm.spec import OwnDevices, SwarmSpec
from atoll.runtime.modes.swarm.stream_places import RemotePlaces
from atoll.runtime.modes.swarm.transport import COORDINATOR, Directory, FabricTransport, Inboxes, LoopClock, PeerAddress, SwarmService
from atoll.runtime.stage.compilation import Compiler, compiler_for
from atoll.units import format_seconds, plural

__all__ = ["Ending", "check_divisible", "check_hosted", "ending_of", "own_hosts", "run_member"]

Ending: TypeAlias = Literal["over", "stopped", "left"]
"""How taking part ended: with the run's last step, with a run that was stopped before it, or because this process asked to leave."""

_PEERS = Backoff(largest_seconds=1.0, attempts=10)  # one that left is not dialled for ever; the next message to it dials anew
_PATIENT = Backoff(largest_seconds=1.0, attempts=800)  # a coordinator that is started anew is waited for: about ten minutes
_REGISTER_SECONDS = 3.0  # a coordinator that is started anew does not know where we are
_ANSWER_SECONDS = 30.0
_ACCOUNT_SECONDS = 2.0
_COMPILED_SECONDS = 0.5  # between two looks at what was compiled
_FIRST_SECONDS = 120.0  # to be connected at all
_MOST_UNSENT = 64  # events that wait for the next account
_ELSEWHERE = "192.0.2.1"  # on no network (RFC 5737): by which a machine's own address is found
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


def run_member(
    credentials: Credentials,
    address: str,
    spec: SwarmSpec,
    job: Job,
    *,
    observer: Observer = lambda event: None,
    dialled: bool = True,
    imposed: Imposed | None = None,
    links: LinkChoice | None = None,
    polite: bool = False,
    devices: OwnDevices | None = None,
    captured: Captured | None = None,
) -> Ending:
    """Works or feeds until the run is over. With `dialled=False` nobody connects to this machine: it is reached through the coordinator.

    `devices` are a worker's own: several work in lockstep, as one strong worker, and it may host several stages on them; the coordinator
    says which. `captured` is the job's program where it was captured before. `imposed` names the device whose speed it has, `links` are
    those to its peers in a lab without namespaces. `observer` hears how far this process is, and of its peers.
    With `polite` a worker that gets SIGINT or SIGTERM asks to be let go: what it has summed still counts, and it leaves after the step, or
    as soon as its stage can do without it. The second signal ends it at once (KeyboardInterrupt).
    """
    torch.set_num_threads(1)
    keep_freed_memory(2**31 - 1, one_arena=True)
    own = devices or OwnDevices()
    check_hosted(own.stages, spec)
    began = time.monotonic()
    stream = EventStream(observer, seconds=lambda: time.monotonic() - began)
    stream(_changed(credentials, "capturing", "loading"))
    captured = captured or _own_capture(job, spec)
    check_divisible(captured, spec.bounds)
    stream(_changed(credentials, "joining", "capturing", f"model captured in {format_seconds(time.monotonic() - began)}"))
    return asyncio.run(_Process(credentials, address, spec, job, captured, stream, dialled, imposed, links, polite, own).run())


def _own_capture(job: Job, spec: SwarmSpec) -> Captured:
    """The job's program; AtollError where it is not the one that the run's other members have."""
    captured = capture_program(job, divided=True)
    if spec.program and captured.digest() != spec.program:
        raise AtollError(
            "the program captured here is not the run's: this machine has other versions of the script's libraries, or what the script "
            "builds depends on the machine, the time or chance; make it build the same everywhere, then join again"
        )
    return captured


def _changed(credentials: Credentials, state: MemberState, before: MemberState, reason: str = "") -> MemberChanged:
    host = socket.gethostname()
    return MemberChanged(name=credentials.name, state=state, before=before, role=credentials.role, host=host, reason=reason)


@dataclass
class _Process:
    """One node of the swarm: its fabric, its clock, its role."""

    credentials: Credentials
    address: str
    spec: SwarmSpec
    job: Job
    captured: Captured
    observer: EventStream
    dialled: bool
    imposed: Imposed | None
    links: LinkChoice | None
    polite: bool
    devices: OwnDevices

    def __post_init__(self) -> None:
        self._unsent: deque[MemberEvent] = deque(maxlen=_MOST_UNSENT)  # for the run's log
        self.observer.observers.append(self._keep)
        self._ending: Ending = "over"
        self._errors: list[BaseException] = []

    def _keep(self, event: AnyEvent) -> None:
        if isinstance(event, MemberEvent):
            self._unsent.append(event)
        elif isinstance(event, PeerRefused) and event.what == "call":
            self._unsent.append(Warned(message=f"refused a call of {event.peer}: {event.reason}", source=self.credentials.name))

    def _warn(self, message: str) -> None:
        self.observer(Warned(message=message, source=self.credentials.name))

    async def run(self) -> "Ending":
        loop = asyncio.get_running_loop()
        clock = LoopClock(self._errors.append)
        inboxes = Inboxes(self.credentials.name)

        def arrived(to: str, message: Message) -> None:
            loop.call_soon_threadsafe(inboxes.put, to, message)

        member = await asyncio.to_thread(self._member, arrived)
        try:
            host, told = own_hosts(self.address) if self.links is None else (self.links.source,) * 2
            listening = await asyncio.to_thread(member.fabric.listen, f"{host}:0") if self.dialled else ""
            coordinator = await asyncio.to_thread(member.join, self.address, _PATIENT)
            registered = asyncio.Event()
            clock.spawn(self._register(coordinator, PeerAddress(f"{told}:{listening.rpartition(':')[2]}" if listening else ""), registered))
            transport = FabricTransport(member, coordinator, coding=self._compression(member), inside=inboxes)
            nonce = time.time_ns()
            nodes = [
                SwarmProcess(name, clock, transport, inboxes.open(name, clock), nonce, random.Random(secrets.randbits(64)), self.observer)
                for name in hosted_workers(self.credentials.name, self.devices.stages)
            ]
            clock.spawn(_end_after_goodbye(coordinator))
            await self._until_over(_connected(registered, self.address))  # what is measured begins there
            if self.credentials.role == "feeder":
                await self._feed(nodes[0], coordinator)
            else:
                await self._work(nodes, member, coordinator)
            return self._ending
        finally:
            await clock.close()
            await asyncio.to_thread(member.close)

    def _member(self, arrived: Callable[[str, Message], None]) -> RunMember:
        checks = TensorChecks(self.captured, programs_of(self.captured, self.spec.bounds), self.spec.micro_batches)
        return RunMember(
            self.credentials,
            services=[SwarmService(arrived, self.spec.settings, checks.why_unfit)],
            fingerprint=self.spec.fingerprint,
            observer=self.observer,
            backoff=_PEERS,
            links=self.links,
        )

    def _compression(self, member: RunMember) -> Compression:
        def estimate(name: str) -> LinkEstimate | None:
            peer = member.fabric.peers.get(name)
            return None if peer is None else peer.estimate

        others = compression_of(self.spec.codec, estimate, self.observer)
        return PlannedCompression(self.credentials.name, self.spec.sites, self.spec.site_codecs, others, self.observer)

    async def _register(self, coordinator: Remote, place: PeerAddress, registered: asyncio.Event) -> None:
        while True:
            try:
                await asyncio.wrap_future(coordinator.call_soon(Directory.register, place, timeout_seconds=_ANSWER_SECONDS))
                registered.set()
            except FabricError as error:
                if coordinator.given_up is not None:
                    raise coordinator.given_up from error
            await asyncio.sleep(_REGISTER_SECONDS)

    async def _feed(self, node: SwarmProcess, coordinator: Remote) -> None:
        programs, places = programs_of(self.captured, self.spec.bounds), RemotePlaces(coordinator, self._warn)
        feed = SampleFeed(self.job, self.captured, programs, self.spec.micro_batches, threading.Lock(), places)
        await self._until_over(Feeder(node, feed, self.spec.settings, (COORDINATOR,)).run())
        feed.close()

    async def _work(self, nodes: Sequence[SwarmProcess], member: RunMember, coordinator: Remote) -> None:
        """One worker for every stage hosted, on one device."""
        generators, device = threading.Lock(), DeviceTurns(nodes[0].clock)
        compiler = compiler_for(self.job, self.devices.find()[0])
        checkpoints = RemoteCheckpoints(coordinator, lambda stage: stage_names(self.job, self.captured, self.spec.bounds, stage))
        computes, workers, accounts = [], [], {}
        for node, planned in zip(nodes, (*self.devices.planned, *[-1] * len(nodes)), strict=False):
            compute, measuring = self._compute(generators, compiler), Measuring(node.name, self.observer)
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
        nodes[0].clock.spawn(_account(accounts, self._unsent, member, coordinator))
        if compiler is not None:
            nodes[0].clock.spawn(_tell_of_compiling(compiler, self.credentials.name, self.observer))
        with self._obeying_signals(workers, coordinator):
            await self._until_over(_all(worker.run() for worker in workers))
        await self._until_over(_give_account(accounts, self._unsent, member, coordinator, _ACCOUNT_SECONDS))
        self._ending = ending_of([(worker.stage, worker.announced) for worker in workers], self.spec.settings.steps)
        for compute in computes:
            compute.close()
        if compiler is not None:
            compiler.close()

    @contextmanager
    def _obeying_signals(self, workers: Sequence[Worker], coordinator: Remote) -> Iterator[None]:
        """The first asks to be let go; after it they do what they always do."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM) if self.polite else ()

        def leave() -> None:
            if coordinator.state == "dead":
                self._errors.append(FabricError(f"leaves; the coordinator was not there to be told ({coordinator.lost_because})"))
                return
            for worker in workers:
                worker.leave()
            message = "leaves as soon as its stage can do without it, after this step at the earliest; Ctrl-C again leaves at once"
            self.observer(StopRequested(source=self.credentials.name, message=message))
            for number in numbers:
                loop.remove_signal_handler(number)

        for number in numbers:
            loop.add_signal_handler(number, leave)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _compute(self, generators: threading.Lock, compiler: Compiler | None) -> StageCompute | GroupCompute:
        spec, devices = self.spec, self.devices.find()
        divided = DividedJob(
            *(self.job, self.captured, spec.bounds, spec.micro_batches, generators),
            chunks=spec.settings.chunks,
            staleness=spec.settings.staleness,
            recompute=spec.recompute,
            compiler=compiler,
        )
        if len(devices) == 1:
            compute = StageCompute(divided, devices[0])
            if self.imposed is not None:
                compute.pace = self._pace(0, spec.micro_batches)
            return compute
        group = GroupCompute(divided, devices, self.devices.shares, self._warn)
        if self.imposed is not None:
            group.impose(self._pace)
        return group

    def _pace(self, index: int, micro_batches: Sequence[tuple[int, int]]) -> Pace:
        """Of one of the worker's devices, for its samples of every micro-batch."""
        assert self.imposed is not None
        own = self.imposed.of_number(self.devices.numbers[index])
        return pace_of_worker(own, self.captured.graph, self.spec.bounds, micro_batches, self.spec.recompute)

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


async def _tell_of_compiling(compiler: Compiler, name: str, observer: Observer) -> None:
    while True:
        await asyncio.sleep(_COMPILED_SECONDS)
        for event in compiler.take(name):
            observer(event)


async def _account(accounts: Mapping[str, Measuring], unsent: "deque[MemberEvent]", member: RunMember, coordinator: Remote) -> None:
    """Tells the coordinator from time to time what was measured here; what does not arrive is told again."""
    while True:
        await asyncio.sleep(_ACCOUNT_SECONDS)
        await _give_account(accounts, unsent, member, coordinator, _ANSWER_SECONDS)


async def _give_account(
    accounts: Mapping[str, Measuring],
    unsent: "deque[MemberEvent]",
    member: RunMember,
    coordinator: Remote,
    limit: float,
) -> None:
    peers = {name: remote for name, remote in member.fabric.peers.items() if remote.estimate is not None}
    for worker, measuring in accounts.items():
        measured = _look(measuring, peers)
        peers = {}  # links are the process's: they are in the account of its first worker
        events = tuple(unsent)
        with suppress(FabricError):
            account = Account(worker, measured, events)
            await asyncio.wrap_future(coordinator.call_soon(MeasureService.measured, account, timeout_seconds=limit))
            for _ in events:
                unsent.popleft()


def _look(measuring: Measuring, peers: Mapping[str, Remote]) -> Measured:
    estimates = {name: remote.estimate for name, remote in peers.items()}
    return measuring.look(
        {name: remote.received_bytes for name, remote in peers.items()},
        {name: estimate.incoming.bytes_per_s for name, estimate in estimates.items() if estimate and estimate.incoming.bytes_per_s},
        {name: estimate.round_trip.mean for name, estimate in estimates.items() if estimate and estimate.round_trip.mean},
    )


def own_hosts(coordinator: str) -> tuple[str, str]:
    """Where this process listens, and where it says so: at the address it has on the way to the coordinator (the first, where others stand
    by), so that a run on the loopback interface cannot be reached from elsewhere; at all addresses where the run listens at all of them.
    """
    host, port = split_address(coordinator.partition(",")[0])
    if host in ("0.0.0.0", "::"):
        return ("[::]" if host == "::" else host), _address_towards(_ELSEWHERE, port)
    own = _address_towards(host, port)
    return own, own


def _address_towards(host: str, port: int) -> str:
    """Of this machine, on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            if host != _ELSEWHERE:
                raise
            return "127.0.0.1"  # a machine without a network
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own
