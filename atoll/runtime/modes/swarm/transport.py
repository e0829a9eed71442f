"""The protocol's world on asyncio and the fabric: its clock, and messages between members, who find each other in a directory that the
coordinator keeps.

A message that cannot be sent is lost, as the protocol expects. Nobody can speak for another: a message that names its sender must come from
the member whose certificate has that name, and roles send only what is theirs to send. A process that hosts several stages is one member
and speaks for all its workers; what they tell each other stays in memory.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, cast

import msgspec

from atoll.control.message_checks import why_unsound
from atoll.control.messages import (
    Ack,
    Announce,
    Backward,
    FeederBeat,
    FetchState,
    Forward,
    Manifest,
    Message,
    Pull,
    PullSum,
    Reduced,
    StateChunk,
    SumChunk,
    SumPart,
    WorkerBeat,
)
from atoll.control.multi_stage import hosted_number, process_of
from atoll.control.settings import Settings
from atoll.control.world import Clock, Mailbox
from atoll.errors import FabricError, RefusedError
from atoll.fabric import Remote
from atoll.fabric.security import RunMember
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.modes.swarm.compression import Compression, FixedCompression, compressed, compressed_bytes, decompressed, is_compressed

__all__ = [
    "COORDINATOR",
    "AnyMessage",
    "Directory",
    "FabricTransport",
    "Inboxes",
    "Letter",
    "LoopClock",
    "LoopMailbox",
    "PeerAddress",
    "SwarmService",
    "check_sender",
    "speaks_for",
]


class LoopMailbox:
    """Things put in are taken out in order, by one taker. Only for the loop's own thread."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any) -> None:
        """Never waits."""
        self._queue.put_nowait(item)

    async def take(self) -> Any:
        """The oldest thing, as soon as there is one."""
        return await self._queue.get()


class LoopClock:
    """The clock of one process; what it spawned ends with `close`. `failed` is told of what ends in an error."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Comes back after so long, or later."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside everything else of this process and ends with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def mailbox(self) -> LoopMailbox:
        """A new, empty one."""
        return LoopMailbox()

    async def close(self) -> None:
        """Ends everything spawned."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)


COORDINATOR = "coordinator"
_MOST_WAITING = 4096  # messages on their way to one peer; more are lost
_SMALL_SECONDS = 30.0  # a message without tensors that takes longer is lost

AnyMessage: TypeAlias = (
    Ack
    | Announce
    | Backward
    | FeederBeat
    | FetchState
    | Forward
    | Manifest
    | SumPart
    | Pull
    | PullSum
    | Reduced
    | StateChunk
    | SumChunk
    | WorkerBeat
)
"""Every kind of message that may arrive."""

_BY_ROLE: dict[str, tuple[type, ...]] = {
    "coordinator": (Announce,),
    "feeder": (FeederBeat, Forward),
    "worker": (Ack, Backward, FetchState, Forward, Manifest, SumPart, Pull, PullSum, Reduced, StateChunk, SumChunk, WorkerBeat),
}
_SENDERS: dict[type, str] = {Announce: "sender", FeederBeat: "feeder", Pull: "owner"}
"""Which field names the sender, where it is not `worker`; a message with neither names nobody."""


def check_sender(message: Message, name: str, role: str) -> None:
    """RefusedError unless this member may send this message."""
    if not isinstance(message, _BY_ROLE.get(role, ())):
        raise RefusedError(f"{name} is a {role}, which sends no {type(message).__name__}")
    named = getattr(message, _SENDERS.get(type(message), "worker"), None)
    if named is not None and not speaks_for(name, role, named):
        raise RefusedError(f"{name} sent a {type(message).__name__} in the name of {named}")


def speaks_for(name: str, role: str, named: str) -> bool:
    """Whether a member may say something in this name: its own, or that of a worker it hosts. No certificate has a hosted worker's name."""
    return named == name or (role == "worker" and process_of(named) == name and hosted_number(named) is not None)


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """A message and whom it is for: several workers may be reached at one place."""

    to: str
    message: AnyMessage


class SwarmService:
    """Where messages arrive. `arrived` is called in the fabric's loop with whom a message is for and the message; `why_unfit` says what is
    wrong with the tensors in it. What cannot be meant is refused, which is an event that names the member who sent it.
    """

    def __init__(
        self,
        arrived: Callable[[str, Message], None],
        settings: Settings,
        why_unfit: Callable[[Message], str | None] = lambda message: None,
    ) -> None:
        self._arrived, self._settings, self._why_unfit = arrived, settings, why_unfit

    @allowed("coordinator", "feeder", "worker")
    async def deliver(self, letter: Letter, peer: CallingPeer) -> None:
        """One message; that it was taken means nothing more."""
        message: Message = letter.message
        check_sender(message, peer.name, peer.role)
        unsound = why_unsound(message, self._settings)
        if unsound is None:
            message = await asyncio.to_thread(decompressed, message) if is_compressed(message) else message
            unsound = self._why_unfit(message)
        if unsound is not None:
            raise RefusedError(f"{peer.name} sent a {type(message).__name__} that cannot be meant: {unsound}")
        self._arrived(letter.to, message)


class Inboxes:
    """The inboxes of one process, by the name of who hears there. Belongs to the event loop of the protocol.

    What workers of a process send each other is put there as it is: nobody changes a tensor that came in a message, but for parts of a
    reduction, which are copies made for whoever asked (`StageCompute.part`). Activations are safe since no graph is cut where a value that
    crosses is changed in place later (`atoll/graph/liveness.py`).
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._inboxes: dict[str, Mailbox] = {}

    def open(self, name: str, clock: Clock) -> Mailbox:
        """A new one."""
        inbox = self._inboxes[name] = clock.mailbox()
        return inbox

    def put(self, to: str, message: Message) -> bool:
        """False: it is for another process. What nobody here is called is lost."""
        inbox = self._inboxes.get(to)
        if inbox is not None:
            inbox.put(message)
        return process_of(to) == self._process


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a member is reached; an empty address means only through the coordinator."""

    address: str


class Directory:
    """Who listens where: kept by the coordinator, filled by the members themselves."""

    def __init__(self) -> None:
        self._places: dict[str, PeerAddress] = {}

    @allowed("feeder", "worker")
    async def register(self, place: PeerAddress, peer: CallingPeer) -> None:
        """The caller listens there."""
        self._places[peer.name] = place

    @allowed("coordinator", "feeder", "worker")
    async def find(self, name: str, peer: CallingPeer) -> PeerAddress:
        """Where a member, or a worker it hosts, listens; RefusedError when nobody of that name has said."""
        place = self.get(name)
        if place is None:
            raise RefusedError(f"nobody called {name!r} has said where it listens")
        return place

    def get(self, name: str) -> PeerAddress | None:
        """The same, for the coordinator itself."""
        return self._places.get(process_of(name))


class FabricTransport:
    """Sends to whoever has a name. Belongs to the event loop of the protocol, which is not the fabric's."""

    def __init__(
        self,
        member: RunMember,
        coordinator: Remote | None,
        directory: Directory | None = None,
        coding: Compression | None = None,
        inside: Inboxes | None = None,
    ) -> None:
        self._inside = inside  # where this process hears itself
        self._member, self._coordinator, self._directory = member, coordinator, directory
        self._compression = coding or FixedCompression("none")
        self._remotes: dict[str, asyncio.Task[Remote]] = {}
        self._waiting: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = 0

    large: tuple[type, ...] = (Forward, Backward, SumPart, SumChunk, StateChunk)
    """What carries tensors: how long it may take is for the fabric to say."""

    def call(self, to: str, message: Message) -> tuple[Callable[..., Any], Any]:
        """How a message is delivered: the method of the other side, and what it is given."""
        return SwarmService.deliver, Letter(to, cast(AnyMessage, message))

    def send(self, to: str, message: Message) -> None:
        """Never waits and never fails: what cannot be sent is lost."""
        if self._inside is not None and self._inside.put(to, message):
            return
        process = process_of(to)
        if self._waiting.get(process, 0) >= _MOST_WAITING:
            self.lost += 1
            return
        self._waiting[process] = self._waiting.get(process, 0) + 1
        task = asyncio.get_running_loop().create_task(self._deliver(process, to, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, process: str, to: str, message: Message) -> None:
        try:
            remote = await self._remote(process)
            limit = None if isinstance(message, self.large) else _SMALL_SECONDS
            method, letter = self.call(to, await self._coded(process, message))
            await asyncio.wrap_future(remote.call_soon(method, letter, timeout_seconds=limit))
        except FabricError:
            self.lost += 1
        finally:
            self._waiting[process] -= 1

    async def _coded(self, to: str, message: Message) -> Message:
        nbytes = compressed_bytes(message)
        codec = self._compression.choose(to, message, nbytes) if nbytes else None
        return message if codec is None else await asyncio.to_thread(compressed, message, codec)

    async def _remote(self, to: str) -> Remote:
        if to == COORDINATOR and self._coordinator is not None:
            return self._coordinator
        known = self._member.fabric.peers.get(to)
        if known is not None and known.state != "dead":
            return known  # whoever dialled
        task = self._remotes.get(to)
        if task is None or (task.done() and (task.exception() is not None or task.result().given_up is not None)):
            task = self._remotes[to] = asyncio.get_running_loop().create_task(self._reach(to))
        return await asyncio.shield(task)

    async def _reach(self, to: str) -> Remote:
        place = await self._find(to)
        if place.address:
            return await asyncio.to_thread(self._member.fabric.connect, place.address, name=to)
        if self._coordinator is None:
            raise RefusedError(f"{to} cannot be dialled")
        return await asyncio.to_thread(self._member.reach, to, self._coordinator)

    async def _find(self, to: str) -> PeerAddress:
        if self._directory is not None:
            place = self._directory.get(to)
            if place is None:
                raise RefusedError(f"{to} is not here yet")
            return place
        assert self._coordinator is not None
        return await asyncio.wrap_future(self._coordinator.call_soon(Directory.find, to, timeout_seconds=_SMALL_SECONDS))
