"""A connection as the event loop sees it: its streams as inboxes, its events as callbacks in the loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.errors import FabricError, FrameError, RefusedError
from atoll.fabric.carrier import Wire
from atoll.fabric.connection import Connection, ConnectionSettings
from atoll.fabric.frame import Hello
from atoll.fabric.liveness import Verdict
from atoll.fabric.payload import Payload
from atoll.fabric.stream import Inbox, IncomingMessage
from atoll.privacy.border import Content

if TYPE_CHECKING:
    from atoll.fabric.fabric import Fabric

__all__ = ["FabricLink"]


class FabricLink:
    """One connection and its wire, for use in the event loop. Implements ConnectionEvents.

    Its fabric's `check_*` run in the thread that drives the connection, all else it is told in the loop.
    """

    def __init__(self, settings: ConnectionSettings, owner: "Fabric", loop: asyncio.AbstractEventLoop, *, dialled: bool) -> None:
        self.loop = loop
        self.connection = Connection(settings, self, loop.time, dialled=dialled)
        self.wire: Wire | None = None  # set before anything moves
        self.opened: asyncio.Future[Hello] = loop.create_future()  # the peer's HELLO, or why there is none
        self.over: asyncio.Future[FabricError] = loop.create_future()  # why the link ended
        self.overdue_at: dict[object, float] = {}  # calls under way, and when each takes longer than its like did
        self._overdue = 0
        self._timer: asyncio.TimerHandle | None = None
        self._owner = owner
        self._read: list[IncomingMessage] = []  # whose credit goes back with what is done next
        self._read_cost = 0
        self._posts: deque[tuple[Callable[..., Any], tuple[object, ...]]] = deque()  # for the loop, told by whoever drives the connection

    def start(self, wire: Wire) -> None:
        """Begins."""
        self.wire = wire
        wire.start()

    @property
    def peer_name(self) -> str:
        """Who is at the other end."""
        if self.connection.peer is not None:
            return self.connection.peer.name
        return (self.wire.address if self.wire is not None else "") or "a peer that has not said its name"

    def close(self, reason: str) -> None:
        """Says goodbye and ends; `over` tells when."""
        self.submit(lambda: self.connection.finish(reason))

    def refuse(self, error: RefusedError) -> None:
        """Ends it because of the peer, which is told why."""

        def refuse() -> None:
            if self.connection.ended is None:
                raise error

        self.submit(refuse)

    # ---- streams

    def submit(self, action: Callable[[], None]) -> None:
        """Has the connection's owner do something."""
        assert self.wire is not None
        if self._read:
            read, self._read, self._read_cost = self._read, [], 0
            action = partial(self._give_back, read, action)
        self.wire.submit(action)

    def open(self, method: str, timeout_seconds: float, payload: Payload, *, end: bool) -> Inbox:
        """Begins a call; returns where its answers come. RefusedError where its request must not leave."""
        self._owner.check_leaving(self, payload)
        inbox = Inbox(self.loop, self._post, self.taken)

        def begin() -> None:
            try:
                inbox.stream = self.connection.open(method, timeout_seconds, payload, inbox, end=end)
            except FabricError as error:
                inbox.on_failed(error)

        self.submit(begin)
        return inbox

    async def send(self, inbox: Inbox, payload: Payload) -> None:
        """Sends one more message and waits until it is on the wire. Never returns when the stream fails: its inbox says so."""
        sent: asyncio.Future[None] = self.loop.create_future()
        self._send(inbox, payload, False, lambda: self._post(_resolve, sent))
        await sent

    def send_last(self, inbox: Inbox, payload: Payload) -> None:
        """Sends a message and then no more."""
        self._send(inbox, payload, True, None)

    def arrived(self, message: IncomingMessage, content: Content | None) -> None:
        """A message was decoded, and carries this; RefusedError where it must not be taken."""
        self._owner.check_arrived(self, message, content)

    def _send(self, inbox: Inbox, payload: Payload, end: bool, on_sent: Callable[[], None] | None) -> None:
        self._owner.check_leaving(self, payload)  # every message passes here or `open`: a tensor that must not leave meets no connection

        def go() -> None:
            try:
                self.connection.send(inbox.stream, payload, end=end, on_sent=on_sent)
            except FrameError:
                raise
            except FabricError as error:
                self.connection.fail(inbox.stream, type(error).__name__, str(error))
                inbox.on_failed(error)

        self.submit(go)

    def end(self, inbox: Inbox) -> None:
        """Says nothing more on a stream."""
        self.submit(lambda: self.connection.end(inbox.stream))

    def fail(self, inbox: Inbox, kind: str, text: str) -> None:
        """Ends a stream with an error."""
        self.submit(lambda: self.connection.fail(inbox.stream, kind, text))

    def cancel(self, inbox: Inbox, reason: str) -> None:
        """Ends a stream that is no longer wanted."""
        self.submit(lambda: self.connection.cancel(inbox.stream, reason))

    def taken(self, message: IncomingMessage) -> None:
        """A message is in its reader's hands. Small ones that end their streams are given back together: nobody waits for their credit."""
        if message.taken:
            return
        if message.end and not message.bulk and self._read_cost + message.cost <= self.connection.settings.control_window_bytes // 8:
            self._read.append(message)
            self._read_cost += message.cost
        else:
            self.submit(lambda: self.connection.taken(message))

    def _give_back(self, messages: list[IncomingMessage], then: Callable[[], None]) -> None:
        for message in messages:
            self.connection.taken(message)
        then()

    def let_go(self, inbox: Inbox) -> None:
        """Gives back the credit of what nobody reads any more."""
        for message in inbox.unread():
            self.taken(message)

    # ---- ConnectionEvents, in whatever thread drives the connection

    def on_greeted(self, hello: Hello) -> None:
        """The peer said who it is."""
        self._owner.check_peer(self, hello)
        self._post(self._greeted, hello)

    def on_opened(self, stream: int, method: str, timeout_seconds: float) -> Inbox:
        """The peer calls."""
        try:
            self._owner.check_call(self, method)
        except RefusedError as error:
            self._post(self._owner.refused, self, method, str(error))
            raise
        inbox = Inbox(self.loop, self._post, self.taken)
        inbox.stream = stream
        inbox.begin = lambda: self._owner.called(self, inbox, method, timeout_seconds)
        return inbox

    def on_state(self, verdict: Verdict) -> None:
        """The peer is judged otherwise."""
        self._post(self._owner.judged, self, verdict)

    def on_closed(self, error: FabricError) -> None:
        """The connection is over."""
        self._post(self._closed, error)

    def _greeted(self, hello: Hello) -> None:
        if not self.opened.done():
            self.opened.set_result(hello)
        self._owner.greeted(self)
        self._count_overdue()

    def _count_overdue(self) -> None:
        """Tells the detector how many calls are late, once a heart-beat."""
        if self.over.done():
            return
        if self._read:
            self.submit(lambda: None)  # nothing else was done since: their credit goes back now
        now = self.loop.time()
        late = sum(when < now for when in self.overdue_at.values())
        if late != self._overdue:
            self._overdue = late
            self.submit(lambda: setattr(self.connection.detector, "overdue_calls", late))
        self._timer = self.loop.call_later(self.connection.settings.liveness.heartbeat_seconds, self._count_overdue)

    def _closed(self, error: FabricError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # nobody need have waited
        if not self.over.done():
            self.over.set_result(error)
        if self._timer is not None:
            self._timer.cancel()
        self._owner.closed(self, error)

    def on_settled(self, at_once: bool) -> None:
        """Wakes the loop once for all that happened, as the last thing before whoever drives the connection sleeps."""
        if at_once:
            self._pass_on()
        elif self._posts:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                (self.loop.call_soon if self._in_loop() else self.loop.call_soon_threadsafe)(self._pass_on)

    def _in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _post(self, function: Callable[..., Any], *arguments: object) -> None:
        self._posts.append((function, arguments))

    def _pass_on(self) -> None:
        while self._posts:
            function, arguments = self._posts.popleft()
            function(*arguments)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
