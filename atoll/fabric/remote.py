"""A peer as seen from here: calls to it, its state, and the connection kept up to it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import msgspec

from atoll.errors import DeadlineError, FabricError, FrameError, PeerLostError, RefusedError
from atoll.fabric.backoff import Backoff
from atoll.fabric.call import Caller
from atoll.fabric.carrier import Wire
from atoll.fabric.connection import Connection
from atoll.fabric.deadline import DeadlineRule, LinkEstimate
from atoll.fabric.link import Link
from atoll.fabric.liveness import PeerState
from atoll.fabric.method import Method, Peer

__all__ = ["Dial", "Expected", "Remote", "RemoteOwner"]

Service = TypeVar("Service")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Result = TypeVar("Result")


class RemoteOwner(Protocol):
    """What a remote needs of its fabric."""

    def method(self, function: Callable[..., Any]) -> Method:
        """What a function's annotations say."""

    def new_link(self, address: str, remote: "Remote") -> Link:
        """A link that begins to connect to a remote."""

    def retried(self, peer: str, attempt: int, delay_seconds: float | None, reason: str) -> None:
        """A peer is dialled again, or given up."""

    def random(self) -> float:
        """In [0, 1)."""

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Runs a coroutine in the fabric's loop."""

    def result_of(self, future: "concurrent.futures.Future[Result]") -> Result:
        """Waits for what `submit` gave."""

    @property
    def thread(self) -> threading.Thread:
        """Where that loop runs."""


Dial: TypeAlias = Callable[[Connection], Wire]
"""What makes a wire for a connection that begins."""


class Expected(msgspec.Struct, frozen=True):
    """Who must be at the other end of a connection this side makes; None: whoever may be a peer at all."""

    name: str | None = None
    role: str | None = None

    def check(self, name: str, role: str) -> None:
        """RefusedError if it is somebody else."""
        if self.name not in (None, name):
            raise RefusedError(f"{self.name} was to be reached there, but it is {name}")
        if self.role not in (None, role):
            raise RefusedError(f"the {self.role} was to be reached there, but it is {name} ({role})")


class Remote:
    """A peer to call. One that was dialled is dialled again when it is lost; calls under way then fail, later ones wait for it.

    `name` is the address until the peer has said its name.
    """

    def __init__(
        self,
        owner: RemoteOwner,
        address: str | None,
        backoff: Backoff,
        deadlines: DeadlineRule,
        *,
        expected: Expected | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.address = address  # None: the peer dialled us, and comes back by itself or not at all
        self.expected = expected or Expected()
        self.dial = dial  # how to get there, where that is not the carrier's own way
        self.name = address or ""
        self.role = ""
        self.state: PeerState = "dead"
        self.lost_because = "not connected yet"
        self._owner = owner
        self._backoff = backoff
        self._caller = Caller(deadlines)
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._given_up: FabricError | None = None

    def __repr__(self) -> str:
        return f"Remote({self.name!r}, role={self.role!r}, state={self.state!r})"

    @property
    def estimate(self) -> LinkEstimate | None:
        """What was measured of the way to it; None while not connected."""
        return None if self._link is None else self._link.connection.estimate

    @property
    def received_bytes(self) -> int:
        """Over the connection that is up now; 0 while there is none."""
        return 0 if self._link is None else self._link.connection.received_bytes

    @property
    def given_up(self) -> FabricError | None:
        """Why it is not dialled any more; None: it is, or it never was."""
        return self._given_up

    # ---- calls, in the fabric's loop

    @overload
    async def call(
        self,
        method: Callable[[Service, Request, Peer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> Reply: ...
    @overload
    async def call(
        self,
        method: Callable[[Service, AsyncIterator[Request], Peer], Coroutine[Any, Any, Reply]],
        request: AsyncIterable[Request],
        *,
        timeout_seconds: float | None = None,
    ) -> Reply: ...
    async def call(self, method: Callable[..., Any], request: object, *, timeout_seconds: float | None = None) -> Any:
        """Calls a method and returns its reply. Without `timeout_seconds` the deadline follows from what was measured.

        Tensors of the request must not change until the reply is there. PeerLostError: whether the method ran is not known.
        """
        link = await self._connected(timeout_seconds)
        return await self._caller.one(link, self._owner.method(method), request, timeout_seconds)

    @overload
    def stream(
        self, method: Callable[[Service, Request, Peer], AsyncIterator[Reply]], request: Request, *, timeout_seconds: float | None = None
    ) -> AsyncIterator[Reply]: ...
    @overload
    def stream(
        self,
        method: Callable[[Service, AsyncIterator[Request], Peer], AsyncIterator[Reply]],
        request: AsyncIterable[Request],
        *,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Reply]: ...
    async def stream(self, method: Callable[..., Any], request: object, *, timeout_seconds: float | None = None) -> AsyncIterator[Any]:
        """Calls a method and gives its replies as they come; the deadline is for each. Closing the iterator cancels the call."""
        link = await self._connected(timeout_seconds)
        replies = self._caller.many(link, self._owner.method(method), request, timeout_seconds)
        try:
            async for reply in replies:
                yield reply
        finally:
            await replies.aclose()  # type: ignore[attr-defined]

    async def connected(self, timeout_seconds: float | None = None) -> None:
        """Waits until the peer is there; PeerLostError if it was given up, DeadlineError if it takes too long."""
        await self._connected(timeout_seconds)

    # ---- the same for code without a loop

    def call_sync(
        self,
        method: Callable[[Service, Request, Peer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> Reply:
        """As `call`, for code outside the loop: waits for the reply."""
        assert threading.current_thread() is not self._owner.thread, "call_sync would wait for itself; use `await remote.call` in the loop"
        return self._owner.result_of(self.call_soon(method, request, timeout_seconds=timeout_seconds))

    def call_soon(
        self,
        method: Callable[[Service, Request, Peer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> "concurrent.futures.Future[Reply]":
        """As `call`, without waiting: a future of the reply. Cancelling it cancels the call."""
        return self._owner.submit(self.call(method, request, timeout_seconds=timeout_seconds))

    # ---- the connection

    async def _connected(self, timeout_seconds: float | None) -> Link:
        if self._link is not None:
            return self._link
        limit = self._caller.rule.unknown_service_seconds if timeout_seconds is None else timeout_seconds
        try:
            async with asyncio.timeout(limit):
                while self._link is None:
                    if self._given_up is not None:
                        raise type(self._given_up)(str(self._given_up))
                    if self.address is None:
                        raise PeerLostError(f"{self.name} is not connected: {self.lost_because}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineError(f"{self.name} could not be reached within {limit:.3g} s: {self.lost_because}") from None
        return self._link

    async def keep(self) -> None:
        """Keeps a connection up (a task of the fabric), until the peer is given up or this is cancelled."""
        assert self.address is not None
        failures = 0
        while True:
            try:
                error, greeted = await self._hold(self.address)
            except OSError as problem:
                error, greeted = PeerLostError(problem.strerror or str(problem)), False
            except FabricError as problem:
                self._owner.retried(self.name, failures + 1, None, str(problem))
                self._give_up(problem)
                return
            failures = 1 if greeted else failures + 1
            refused = isinstance(error, (RefusedError, FrameError))
            delay = None if refused else self._backoff.delay_seconds(failures, self._owner.random())
            self._owner.retried(self.name, failures, delay, str(error))
            if delay is None:
                self._give_up(error if refused else PeerLostError(f"{self.name} was given up after {failures} attempts: {error}"))
                return
            await asyncio.sleep(delay)

    async def _hold(self, address: str) -> tuple[FabricError, bool]:
        """One connection, from its beginning to its end: why it ended, and whether the peer was there."""
        link = self._owner.new_link(address, self)
        try:
            return await asyncio.shield(link.over), link.connection.peer is not None
        except asyncio.CancelledError:
            link.close("the fabric was closed")
            raise

    def attach(self, link: Link) -> None:
        """The peer is there over this link."""
        self._link = link
        self._changed.set()

    def detach(self, link: Link, reason: str) -> None:
        """That link is over."""
        self.lost_because = reason
        if self._link is link:
            self._link = None

    def holds(self, link: Link) -> bool:
        """Whether this is the link its calls go over."""
        return self._link is link

    def close(self, reason: str) -> None:
        """Ends the link, if there is one."""
        if self._link is not None:
            self._link.close(reason)

    def _give_up(self, error: FabricError) -> None:
        self._given_up = error
        self._changed.set()
