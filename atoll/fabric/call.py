"""Calls as their caller makes them: a request, a deadline from what was measured, and the reply or replies."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from atoll.errors import DeadlineError, FabricError
from atoll.fabric.deadline import DeadlineRule, Smoothed
from atoll.fabric.headers import LONGEST_SECONDS
from atoll.fabric.link import Link
from atoll.fabric.method import Method
from atoll.fabric.payload import Payload, decode_payload, encode_payload
from atoll.fabric.stream import IncomingMessage
from atoll.units import format_bytes, format_seconds

__all__ = ["Caller"]


class Caller:
    """Makes calls over links to one peer, and remembers how long its methods take."""

    def __init__(self, rule: DeadlineRule) -> None:
        self.rule = rule
        self._services: dict[str, Smoothed] = {}

    async def one(self, link: Link, method: Method, request: object, timeout_seconds: float | None) -> Any:
        """A call with one reply."""
        call = _Call(self, link, method, request, timeout_seconds)
        try:
            value = await call.next()
            if value is _END:
                raise FabricError(f"{method.name} of {link.peer_name} ended without a reply")
            return value
        finally:
            call.close()

    async def many(self, link: Link, method: Method, request: object, timeout_seconds: float | None) -> AsyncIterator[Any]:
        """A call with many replies. The deadline is for each of them."""
        call = _Call(self, link, method, request, timeout_seconds)
        try:
            while (value := await call.next()) is not _END:
                yield value
        finally:
            call.close()

    def service(self, method: str) -> Smoothed:
        """How long a method takes by itself."""
        return self._services.setdefault(method, Smoothed())


_END = object()


class _Call:
    """One call under way."""

    def __init__(self, caller: Caller, link: Link, method: Method, request: object, timeout_seconds: float | None) -> None:
        self._caller, self._link, self._method = caller, link, method
        self._fixed_seconds = None if timeout_seconds is None else min(timeout_seconds, LONGEST_SECONDS)
        self._service = caller.service(method.name)
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
            payload = encode_payload(request)
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

    def _value(self, message: IncomingMessage) -> object:
        self._link.taken(message)
        self._learn(message.size_bytes)
        return decode_payload(message.payload, message.tensors, self._method.reply_type)

    def _learn(self, size_bytes: int) -> None:
        """What of the time was neither the way there nor the way back was the method's own."""
        now, rule = self._link.loop.time(), self._caller.rule
        nothing = Smoothed()
        nothing.mean = 0.0
        estimate = self._link.connection.estimate
        measured = estimate.round_trip.mean is not None and (estimate.outgoing_bytes_per_s or not self._sent_bytes)
        travel = rule.expected_seconds(estimate, nothing, self._sent_bytes, size_bytes) if measured else 0.0
        self._service.add(max(0.0, now - self._started - travel))
        self._started, self._sent_bytes = now, 0

    def _timeout(self, incoming_bytes: int) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        estimate = self._link.connection.estimate
        return min(self._caller.rule.timeout_seconds(estimate, self._service, self._sent_bytes, incoming_bytes), LONGEST_SECONDS)

    def _expected(self) -> float:
        return self._caller.rule.expected_seconds(self._link.connection.estimate, self._service, self._sent_bytes)

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
                payload = encode_payload(request)
                self._flows(payload.size_bytes)
                await self._link.send(self._inbox, payload)
                self._flows(0)
            self._link.end(self._inbox)
        except Exception as error:  # the caller's own iterator failed: it is the caller who hears of it
            self._inbox.on_failed(error if isinstance(error, FabricError) else FabricError(f"{type(error).__name__}: {error}"))
            self._link.cancel(self._inbox, f"its caller failed: {type(error).__name__}: {error}")


_NOTHING = Payload(b"")
