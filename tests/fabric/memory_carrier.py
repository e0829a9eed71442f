"""Wires in memory: the same connections without sockets, driven by the event loops at their ends."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from atoll.errors import FabricError, FrameError, PeerLostError, RefusedError
from atoll.fabric.carrier import Accept, Listener, Wire
from atoll.fabric.connection import Connection
from atoll.fabric.shaped import ShapedLink, ShapedOutlet
from tests.fabric.parsing import feed_in_pieces

__all__ = ["MemoryCarrier"]

_PIPE_BYTES = 1 << 20  # on their way between two ends


class MemoryCarrier:
    """A world of its own: whoever shares this object can dial whoever listens in it."""

    def __init__(self, link: ShapedLink | None = None) -> None:
        self._listening: dict[str, tuple[Accept, asyncio.AbstractEventLoop]] = {}
        self._link = link

    def dial(self, address: str, connection: Connection, loop: asyncio.AbstractEventLoop) -> Wire:
        """A wire to whoever listens there when it is started."""
        return _MemoryWire(connection, loop, self._link, dial=lambda wire: self._connect(address, wire))

    def listen(self, address: str, accept: Accept, loop: asyncio.AbstractEventLoop) -> Listener:
        """Accepts at any name."""
        if address in self._listening:
            raise FabricError(f"cannot listen at {address}: somebody does already")
        self._listening[address] = (accept, loop)
        return _MemoryListener(address, lambda: self._listening.pop(address, None))

    def _connect(self, address: str, wire: "_MemoryWire") -> None:
        if address not in self._listening:
            wire.connection.lost(PeerLostError("Connection refused"))
            wire.connection.settle()
            return
        accept, loop = self._listening[address]

        def join(connection: Connection) -> Wire:
            other = _MemoryWire(connection, loop, self._link)
            wire.other, other.other = other, wire
            wire.submit(lambda: None)
            return other

        def offer() -> None:
            if not accept(join):
                wire.submit(lambda: wire.connection.lost(PeerLostError("Connection refused")))

        loop.call_soon_threadsafe(offer)


class _MemoryListener:
    def __init__(self, address: str, remove: Callable[[], object]) -> None:
        self.address = address
        self._remove = remove

    def close(self) -> None:
        """Accepts no more."""
        self._remove()


class _MemoryWire:
    """One end; its event loop owns the connection."""

    certificate: bytes | None = None
    address = ""

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        link: ShapedLink | None,
        dial: Callable[["_MemoryWire"], None] | None = None,
    ) -> None:
        self.connection = connection
        self.other: _MemoryWire | None = None
        self._loop = loop
        self._outlet = connection if link is None else ShapedOutlet(connection, link, loop.time)
        self._dial = dial
        self._actions: deque[Callable[[], None]] = deque()
        self._on_the_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins."""
        if self._dial is not None:
            self._dial(self)
        self.submit(lambda: None)

    def submit(self, action: Callable[[], None]) -> None:
        """Has the loop do something with the connection."""
        self._actions.append(action)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everybody who could care
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        try:
            while self._actions:
                self._actions.popleft()()
        except (FrameError, RefusedError) as error:
            self.connection.refuse(error)
        now = self._loop.time()
        next_tick = self.connection.tick(now)
        self._send()
        if self.connection.ended is not None and not self._outlet.waiting and self.other is not None:
            other, self.other = self.other, None
            other.submit(lambda: other.connection.lost(PeerLostError("the other side closed the connection")))
        self.connection.settle()
        if self._timer is not None:
            self._timer.cancel()
        if self.connection.ended is None:
            due = self._outlet.due_seconds(now) if self._on_the_way < _PIPE_BYTES and self.other is not None else None
            self._timer = self._loop.call_later(max(0.0, min(next_tick - now, next_tick if due is None else due)), self._turn)

    def _send(self) -> None:
        """Hands bytes to the other end, which says when it has taken them."""
        while self.other is not None and self._on_the_way < _PIPE_BYTES and (parts := self._outlet.outgoing(_PIPE_BYTES)):
            data = b"".join(parts)[:_PIPE_BYTES]
            self._outlet.sent(len(data))
            self._on_the_way += len(data)
            self.other.submit(lambda data=data, other=self.other: other._take(data))  # type: ignore[misc]
        if self.connection.finishing and self.connection.ended is None and self._outlet.due_seconds(self._loop.time()) is None:
            self.connection.lost(PeerLostError("the connection was closed"))

    def _take(self, data: bytes) -> None:
        sender = self.other
        if sender is not None:
            sender.submit(lambda: sender._taken(len(data)))
        if self.connection.ended is None:
            feed_in_pieces(self.connection, data)

    def _taken(self, count: int) -> None:
        self._on_the_way -= count
