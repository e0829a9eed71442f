"""A peer as seen from here: calls to it with deadlines from what was measured, its state, and the connection kept up to it."""

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from atoll.errors import DeadlineError, FabricError, FrameError, PeerLostError, RefusedError
from atoll.fabric.carrier import Wire
from atoll.fabric.connection import Connection
from atoll.fabric.deadline import Backoff, DeadlineRule, LinkEstimate, Smoothed
from atoll.fabric.frame import LONGEST_SECONDS
from atoll.fabric.link import FabricLink
from atoll.fabric.liveness import PeerState
from atoll.fabric.payload import Payload, encode_payload
from atoll.fabric.service import CallingPeer, Method, content_of, take_in
from atoll.fabric.stream import IncomingMessage
from atoll.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atoll.fabric.fabric import Fabric

__all__ = ["Dial", "Remote"]


_DEADLINES = DeadlineRule()
_END = object()


class _Call:
    """One call under way. `service`: how long the method takes by itself, which this call adds to."""

    def __init__(self, service: Smoothed, link: FabricLink, method: Method, request: object, timeout_seconds: float | None) -> None:
        self._service, self._link, self._method = service, link, method
        self._fixed_seconds = None if timeout_seconds is None else min(timeout_seconds, LONGEST_SECONDS)
        self._started = link.loop.time()
        self._done = False
        self._feeding: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit_seconds = 0.0
        self._waiting = False
        if isinstance(request, AsyncIterable):
            self._sent_bytes = 0
            self._inbox = link.open(method.name, self._timeout(0), _NOTHING, end=False)
            self._feeding = link.loop.create_task(self._feed(request))
        else:
            payload = self._encode(request)
            self._sent_bytes = payload.size_bytes
            self._inbox = link.open(method.name, self._timeout(0), payload, end=True)

    async def next(self) -> object:
        """The next reply, or _END."""
        timeout = self._timeout(0)
        if self._service.mean is not None and self._fixed_seconds is None:  # else its caller knows better how long it may take
            self._link.overdue_at[self] = self._link.loop.time() + 0.5 + 2 * self._expected()
        self._limit(timeout)
        self._waiting = True
        self._inbox.announced = lambda size: self._limit(self._timeout(size))
        try:
            message = await self._inbox.get()
        except DeadlineError:  # whichever end noticed first
            raise DeadlineError(self._late_text(self._limit_seconds)) from None
        finally:
            self._inbox.announced, self._waiting = None, False
            if self._timer is not None:
                self._timer.cancel()
            self._link.overdue_at.pop(self, None)
        if message is None or message.end:
            self._done = True
        return _END if message is None else self._value(message)

    def _limit(self, seconds: float) -> None:
        """From now on, so long: then the inbox fails. A timer of its own costs half of what asyncio.timeout does."""
        self._limit_seconds = seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._link.loop.call_later(seconds, lambda: self._inbox.fail(DeadlineError()))

    def _flows(self, outgoing_bytes: int) -> None:
        """A request is about to go, or went."""
        self._started, self._sent_bytes = self._link.loop.time(), outgoing_bytes
        if self._waiting:
            self._limit(self._timeout(0))

    def close(self) -> None:
        """The caller is done with it, one way or the other."""
        feeding = self._feeding is not None and not self._feeding.done()
        if self._feeding is not None:
            self._feeding.cancel()
        if not self._done or feeding:
            self._link.cancel(self._inbox, "its caller no longer waits")
        self._link.let_go(self._inbox)

    def _encode(self, request: object) -> Payload:
        return encode_payload(request, content_of(self._method.request_content, self._method.name, request))

    def _value(self, message: IncomingMessage) -> object:
        self._link.taken(message)
        self._learn(message.size_bytes)
        return take_in(self._link, message, self._method.name, self._method.reply_type, self._method.reply_content)

    def _learn(self, size_bytes: int) -> None:
        """What of the time was neither the way there nor the way back was the method's own."""
        now = self._link.loop.time()
        nothing = Smoothed()
        nothing.mean = 0.0
        estimate = self._link.connection.estimate
        measured = estimate.round_trip.mean is not None and (estimate.outgoing_bytes_per_s or not self._sent_bytes)
        travel = _DEADLINES.expected_seconds(estimate, nothing, self._sent_bytes, size_bytes) if measured else 0.0
        self._service.add(max(0.0, now - self._started - travel))
        self._started, self._sent_bytes = now, 0

    def _timeout(self, incoming_bytes: int) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        estimate = self._link.connection.estimate
        return min(_DEADLINES.timeout_seconds(estimate, self._service, self._sent_bytes, incoming_bytes), LONGEST_SECONDS)

    def _expected(self) -> float:
        return _DEADLINES.expected_seconds(self._link.connection.estimate, self._service, self._sent_bytes)

    def _late_text(self, timeout_seconds: float) -> str:
        why = "the limit its caller set" if self._fixed_seconds is not None else "derived from what was measured of the link and the method"
        size = f" with {format_bytes(self._sent_bytes)} to send" if self._sent_bytes else ""
        return f"{self._method.name} of {self._link.peer_name}{size}: no answer within {format_seconds(timeout_seconds)} ({why})"

    async def _feed(self, requests: AsyncIterable[object]) -> None:
        """Sends the requests one by one, each when the one before is on the wire, as fast as the peer takes them.

        While requests flow the reply is not late: the deadline counts anew from each.
        """
        try:
            async for request in requests:
                payload = self._encode(request)
                self._flows(payload.size_bytes)
                await self._link.send(self._inbox, payload)
                self._flows(0)
            self._link.end(self._inbox)
        except Exception as error:  # the caller's own iterator failed: it is the caller who hears of it
            self._inbox.on_failed(error if isinstance(error, FabricError) else FabricError(f"{type(error).__name__}: {error}"))
            self._link.cancel(self._inbox, f"its caller failed: {type(error).__name__}: {error}")


_NOTHING = Payload(b"")


Service = TypeVar("Service")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


Dial: TypeAlias = Callable[[Connection], Wire]
"""What makes a wire for a connection that begins."""


class Remote:
    """A peer to call. One that was dialled is dialled again when it is lost; calls under way then fail, later ones wait for it.

    `name` is the address until the peer has said its name.
    """

    def __init__(
        self,
        owner: "Fabric",
        address: str | None,
        backoff: Backoff,
        *,
        expected_name: str | None = None,
        expected_role: str | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.address = address  # None: the peer dialled us, and comes back by itself or not at all
        self._expected = expected_name, expected_role
        self.dial = dial  # how to get there, where that is not the carrier's own way
        self.name = address or ""
        self.role = ""
        self.state: PeerState = "dead"
        self.lost_because = "not connected yet"
        self._owner = owner
        self._backoff = backoff
        self._services: dict[str, Smoothed] = {}  # how long its methods take
        self._link: FabricLink | None = None
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
        method: Callable[[Service, Request, CallingPeer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> Reply: ...
    @overload
    async def call(
        self,
        method: Callable[[Service, AsyncIterator[Request], CallingPeer], Coroutine[Any, Any, Reply]],
        request: AsyncIterable[Request],
        *,
        timeout_seconds: float | None = None,
    ) -> Reply: ...
    async def call(self, method: Callable[..., Any], request: object, *, timeout_seconds: float | None = None) -> Any:
        """Calls a method and returns its reply. Without `timeout_seconds` the deadline follows from what was measured.

        Tensors of the request must not change until the reply is there. PeerLostError: whether the method ran is not known.
        """
        link = await self._connected(timeout_seconds)
        one = self._begin(link, self._owner.method(method), request, timeout_seconds)
        try:
            value = await one.next()
            if value is _END:
                raise FabricError(f"{self._owner.method(method).name} of {link.peer_name} ended without a reply")
            return value
        finally:
            one.close()

    @overload
    def stream(
        self,
        method: Callable[[Service, Request, CallingPeer], AsyncIterator[Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Reply]: ...
    @overload
    def stream(
        self,
        method: Callable[[Service, AsyncIterator[Request], CallingPeer], AsyncIterator[Reply]],
        request: AsyncIterable[Request],
        *,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Reply]: ...
    async def stream(self, method: Callable[..., Any], request: object, *, timeout_seconds: float | None = None) -> AsyncIterator[Any]:
        """Calls a method and gives its replies as they come; the deadline is for each. Closing the iterator cancels the call."""
        link = await self._connected(timeout_seconds)
        many = self._begin(link, self._owner.method(method), request, timeout_seconds)
        try:
            while (value := await many.next()) is not _END:
                yield value
        finally:
            many.close()

    def _begin(self, link: FabricLink, method: Method, request: object, timeout_seconds: float | None) -> _Call:
        return _Call(self._services.setdefault(method.name, Smoothed()), link, method, request, timeout_seconds)

    async def connected(self, timeout_seconds: float | None = None) -> None:
        """Waits until the peer is there; PeerLostError if it was given up, DeadlineError if it takes too long."""
        await self._connected(timeout_seconds)

    # ---- the same for code without a loop

    def call_sync(
        self,
        method: Callable[[Service, Request, CallingPeer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> Reply:
        """As `call`, for code outside the loop: waits for the reply."""
        assert threading.current_thread() is not self._owner.thread, "call_sync would wait for itself; use `await remote.call` in the loop"
        return self._owner.result_of(self.call_soon(method, request, timeout_seconds=timeout_seconds))

    def call_soon(
        self,
        method: Callable[[Service, Request, CallingPeer], Coroutine[Any, Any, Reply]],
        request: Request,
        *,
        timeout_seconds: float | None = None,
    ) -> "concurrent.futures.Future[Reply]":
        """As `call`, without waiting: a future of the reply. Cancelling it cancels the call."""
        return self._owner.submit(self.call(method, request, timeout_seconds=timeout_seconds))

    # ---- the connection

    async def _connected(self, timeout_seconds: float | None) -> FabricLink:
        if self._link is not None:
            return self._link
        limit = _DEADLINES.unknown_service_seconds if timeout_seconds is None else timeout_seconds
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
            delay = None if refused else self._backoff.delay_seconds(failures, random.random())
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

    def attach(self, link: FabricLink) -> None:
        """The peer is there over this link."""
        self._link = link
        self._changed.set()

    def detach(self, link: FabricLink, reason: str) -> None:
        """That link is over."""
        self.lost_because = reason
        if self._link is link:
            self._link = None

    def check_expected(self, name: str, role: str) -> None:
        """RefusedError if somebody else was to be at the other end of the connection this side makes."""
        expected_name, expected_role = self._expected
        if expected_name not in (None, name):
            raise RefusedError(f"{expected_name} was to be reached there, but it is {name}")
        if expected_role not in (None, role):
            raise RefusedError(f"the {expected_role} was to be reached there, but it is {name} ({role})")

    def holds(self, link: FabricLink) -> bool:
        """Whether this is the link its calls go over."""
        return self._link is link

    def close(self, reason: str) -> None:
        """Ends the link, if there is one."""
        if self._link is not None:
            self._link.close(reason)

    def _give_up(self, error: FabricError) -> None:
        self._given_up = error
        self._changed.set()
