"""A connection without its wire: bytes in, bytes out, streams between. Whoever drives it (a carrier) is its only user at any time.

The carrier reads into `buffers()` and says `filled`; it sends what `outgoing` gives and says `sent`; it calls `tick` at the times it
returns, and `lost` when the wire ends. The layer above opens streams and sends messages; it is told through `StreamHandler`s and
`ConnectionEvents`. The same class runs over TCP, in memory, through shaped links and under a virtual clock.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.errors import DeadlineError, FabricError, FrameError, PeerLostError, RefusedError, RemoteError
from atoll.fabric.deadline import LinkEstimate
from atoll.fabric.frame import (
    LATE,
    CallMessage,
    Credit,
    FrameLimits,
    FrameParser,
    Goodbye,
    Hello,
    Kind,
    Open,
    Ping,
    Pong,
    Prefix,
    StreamFailure,
    decode_header,
    encode_frame,
)
from atoll.fabric.liveness import Detector, LivenessRule, Verdict
from atoll.fabric.payload import Payload
from atoll.fabric.send_queue import INLINE_BYTES, OutgoingFrame, OutgoingMessage, SendQueue
from atoll.fabric.stream import FlowWindow, IncomingMessage, Stream, StreamHandler, cost_of, message_size
from atoll.units import format_bytes

__all__ = ["Connection", "ConnectionEvents", "ConnectionSettings"]

_MOST_URGENT = 100_000  # frames of the protocol that wait because the peer does not read
_MOST_CALLS = 1 << 16  # of one side, those that wait for credit included
_MOST_SMALL_IN_A_ROW = 1 << 20
_SMALLEST_CHUNK, _LARGEST_CHUNK = 16 * 1024, 4 << 20
_BEFORE_HELLO = FrameLimits(header_bytes=16 * 1024, body_bytes=0)
_MANY_TENSORS = 1000  # beyond which it is looked at whether their headers fit a frame
_CHUNK_SECONDS = 0.01  # what a chunk may hold up a control message on a slow link


class ConnectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who this side is and what it accepts. The peer learns the windows with HELLO and never sends more unread bytes than they say."""

    name: str
    role: str = "worker"
    bulk_window_bytes: int = 256 << 20
    control_window_bytes: int = 16 << 20
    stream_window_bytes: int = 64 << 20
    message_bytes: int = 64 << 30
    streams: int = 4096
    frames: FrameLimits = FrameLimits()
    fingerprint: dict[str, str] = {}  # of the job, by part: peers of another job are refused
    liveness: LivenessRule = LivenessRule()

    def hello(self) -> Hello:
        """The first thing this side says."""
        return Hello(
            self.name,
            self.role,
            self.bulk_window_bytes,
            self.control_window_bytes,
            self.stream_window_bytes,
            self.message_bytes,
            self.liveness.heartbeat_seconds,
            self.fingerprint,
        )


class ConnectionEvents(Protocol):
    """Who is told about the connection as a whole. Called by whoever drives it: must be quick; may raise FabricError to refuse."""

    def on_greeted(self, hello: Hello) -> None:
        """The peer said who it is; RefusedError ends the connection and tells it why."""

    def on_opened(self, stream: int, method: str, timeout_seconds: float) -> StreamHandler:
        """The peer began a call; RefusedError fails that call alone."""

    def on_state(self, verdict: Verdict) -> None:
        """The peer is judged otherwise than before."""

    def on_closed(self, error: FabricError) -> None:
        """The connection is over; its streams were told."""

    def on_settled(self, at_once: bool) -> None:
        """Nothing more happens for now: what was told since the last time can be passed on together, or now if the loop itself settles."""


class Connection:
    """One end. `dialled`: this side began it (its streams have odd numbers)."""

    def __init__(self, settings: ConnectionSettings, events: ConnectionEvents, clock: Callable[[], float], *, dialled: bool) -> None:
        self.settings = settings
        self.peer: Hello | None = None
        self.estimate = LinkEstimate()
        self.ended: FabricError | None = None
        self.finishing = False  # a goodbye was said: nothing is read any more, and the wire ends once all is sent
        self.received_bytes = 0
        self.message_bytes = settings.message_bytes  # the longest message this peer may send; less for some than what all are told
        self._events = events
        self._clock = clock
        self._parser = FrameParser(self, _BEFORE_HELLO)  # whoever it is must not be able to ask for much
        self._queue = SendQueue(0, 0, 0)  # nothing but the protocol's own frames until the peer has said what it accepts
        self._queue.urgent(encode_frame(Kind.HELLO, 0, settings.hello()))
        self._pending: list[OutgoingFrame] = []  # handed out, not sent
        self._pending_bytes = 0
        self._small_in_a_row = 0  # bytes of small frames since a frame of bulk went
        self._streams: dict[int, Stream] = {}
        self._next_local, self._next_remote = (1, 2) if dialled else (2, 1)
        self._passed: set[int] = set()  # numbers of the peer's below `_next_remote` that it has not used yet
        self._unread = {True: FlowWindow(settings.bulk_window_bytes), False: FlowWindow(settings.control_window_bytes)}
        self._owed = 0  # credit for small messages that is not given back yet
        self._arriving = 0  # messages of bulk on their way in
        self._inline: IncomingMessage | None = None  # whose bytes are in the frame being read
        self._pings: dict[int, float] = {}
        self._told_rate = 0.0
        self._pings_sent = 0
        self._now = now = clock()  # when bytes last arrived
        self.detector = Detector(settings.liveness, now)
        self._verdict: Verdict = Verdict("alive", "")
        self._next_ping = now + settings.liveness.heartbeat_seconds

    # ---- for the carrier

    def buffers(self) -> list[memoryview]:
        """Where the next bytes from the wire go."""
        return self._parser.buffers()

    @property
    def body_bytes_due(self) -> int:
        """Bytes that are still to come of the frame that is arriving: the peer sends them before anything else."""
        return self._parser.body_bytes_due

    def filled(self, count: int) -> None:
        """So many bytes were read into `buffers()`. FrameError: call `refuse` with it."""
        self.received_bytes += count
        self._now = self._clock()
        self.detector.heard(self._now)
        self._parser.filled(count)

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._pending) or self._queue.waiting

    @property
    def bulk_waiting(self) -> bool:
        """Whether what is to be sent is more than a few small frames."""
        return self._queue.bulk_waiting or any(frame.bulk for frame in self._pending)

    @property
    def bulk_arriving(self) -> bool:
        """Whether a message of bulk is on its way in."""
        return self._arriving > 0

    def due_seconds(self, now: float) -> float | None:
        """In how long something can be sent: at once, or not before something happens."""
        return 0.0 if self.waiting else None

    def outgoing(self, size_bytes: int) -> list[memoryview]:
        """What to send next, about so much of it; say with `sent` how much went. Empty: nothing to send.

        What was handed out before and not sent is in it again, but control passes whatever bulk is not yet begun.
        """
        if self._queue.small_waiting:
            self._hand_out_small()
        while self._pending_bytes < size_bytes and (frame := self._queue.take_bulk()) is not None:
            self._pending.append(frame)
            self._pending_bytes += frame.size_bytes
        if len(self._pending) == 1:
            return self._pending[0].parts
        return [part for frame in self._pending for part in frame.parts]

    def _hand_out_small(self) -> None:
        """Puts small frames before bulk that is not begun, but not for ever: between them bulk makes progress too."""
        place = 0
        while place < len(self._pending) and (self._pending[place].touched or not self._pending[place].bulk):
            place += 1
        while self._queue.small_waiting and self._small_in_a_row < _MOST_SMALL_IN_A_ROW:
            frame = self._queue.take_small()
            assert frame is not None
            self._pending.insert(place, frame)
            self._small_in_a_row += frame.size_bytes
            self._pending_bytes += frame.size_bytes
            place += 1
        if place == len(self._pending) and not self._queue.bulk_waiting:
            self._small_in_a_row = 0

    def sent(self, count: int) -> None:
        """The wire took so many bytes."""
        self._pending_bytes -= count
        while self._pending:
            frame = self._pending[0]
            count = frame.sent(count)
            if frame.parts:
                return
            del self._pending[0]
            if frame.bulk:
                self._small_in_a_row = 0
            if frame.on_sent is not None:
                frame.on_sent()

    def commit(self, count: int) -> None:
        """So many of the bytes handed out last will go before anything else, as the wire holds them already."""
        for frame in self._pending:
            if count <= 0:
                return
            frame.touched = True
            count -= sum(map(len, frame.parts))

    def tick(self, now: float, acknowledged: bool | None = None) -> float:
        """Heart-beats and judgement; returns when to call again at the latest."""
        if self.ended is None and not self.finishing and now >= self._next_ping:
            self._next_ping = now + self.settings.liveness.heartbeat_seconds
            self._pay()
            self._ping(now)
        verdict = self.detector.judge(now, acknowledged)
        if verdict.state != self._verdict.state:
            self._events.on_state(verdict)
        self._verdict = verdict
        return self._next_ping

    def refuse(self, error: FrameError | RefusedError) -> None:
        """The peer did what it may not: tell it, then end. Send what is outgoing as far as the wire takes it, then close the wire."""
        self.finish(str(error), refused=True)
        self.lost(type(error)(f"{self._peer_name()}: {error}"))

    def lost(self, error: FabricError) -> None:
        """The wire ended. Every stream fails; later calls of this do nothing."""
        if self.ended is not None:
            return
        self.ended = error
        self.detector.ended(str(error))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._drop_unsent(stream)
            stream.handler.on_failed(error)
        if self._verdict.state != "dead":
            self._verdict = Verdict("dead", str(error))
            self._events.on_state(self._verdict)
        self._events.on_closed(error)

    def settle(self, at_once: bool = False) -> None:
        """The carrier is about to sleep or to let go of the connection. `at_once`: it is the event loop, with nothing of its own to end."""
        self._events.on_settled(at_once)

    # ---- for the layer above

    def open(self, method: str, timeout_seconds: float, payload: Payload, handler: StreamHandler, *, end: bool) -> int:
        """Begins a call; returns its stream. FabricError if the message cannot go."""
        if self.ended is not None:
            raise self.ended
        self._check_sendable(payload)
        buffers = _bytes_of(payload)
        if len(self._streams) >= _MOST_CALLS:
            raise RefusedError(f"{len(self._streams)} calls are under way with {self._peer_name()}; wait for some of them")
        stream = Stream(self._next_local, handler, self.settings.stream_window_bytes)
        self._next_local += 2
        self._streams[stream.id] = stream
        self._send_message(Kind.OPEN, stream, Open(method, timeout_seconds, payload.header(end)), payload, buffers, end, None)
        return stream.id

    def send(self, stream_id: int, payload: Payload, *, end: bool, on_sent: Callable[[], None] | None = None) -> None:
        """Sends one more message on a stream. Nothing happens if it is over already: its handler was told."""
        self._check_sendable(payload)
        stream = self._streams.get(stream_id)
        if stream is not None:
            assert not stream.local_done, "a message after the end"
            self._send_message(Kind.MESSAGE, stream, payload.header(end), payload, _bytes_of(payload), end, on_sent)

    def end(self, stream_id: int) -> None:
        """Says nothing more on a stream; call it only after the last message was sent."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return

        def sent() -> None:
            stream.local_done = True
            self._close_if_done(stream)

        # in line with the stream's messages: what opens it may still wait for credit
        self._queue.add(OutgoingMessage(stream_id, encode_frame(Kind.END, stream_id), [], 0, sent, free=True))

    def fail(self, stream_id: int, kind: str, text: str) -> None:
        """Ends a stream with an error; the other side is told."""
        self._abandon(stream_id, Kind.FAIL, StreamFailure(kind, text[:100_000]))

    def cancel(self, stream_id: int, reason: str) -> None:
        """Ends a stream that is no longer wanted; the other side is told."""
        self._abandon(stream_id, Kind.CANCEL, StreamFailure("CancelledError", reason))

    def taken(self, message: IncomingMessage) -> None:
        """The reader has a message: its sender may send as much again. Once for each."""
        if message.taken:
            return
        message.taken = True
        self._unread[message.bulk].give(message.cost)
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.window.give(message.cost)
        if self.ended is None and (stream is not None or message.bulk):
            self._urgent(encode_frame(Kind.CREDIT, message.stream, Credit(message.cost, message.bulk)))
        else:
            self._owed += message.cost
            if self._owed >= self.settings.control_window_bytes // 4:
                self._pay()

    def _pay(self) -> None:
        """Gives back the credit of small messages whose calls are over, many at a time: a frame for each would double a call's cost."""
        if self._owed and self.ended is None:
            self._urgent(encode_frame(Kind.CREDIT, 0, Credit(self._owed, False)))
            self._owed = 0

    def finish(self, reason: str, *, refused: bool = False) -> None:
        """Says goodbye and nothing after it; the carrier ends the wire once that is sent. Calls under way fail then."""
        if not self.finishing:
            for stream in self._streams.values():
                self._drop_unsent(stream)
            self._pending = [frame for frame in self._pending if frame.touched or not frame.bulk]
            self._pending_bytes = sum(len(part) for frame in self._pending for part in frame.parts)
            self._urgent(encode_frame(Kind.GOODBYE, 0, Goodbye(reason[:4000], refused)))
            self.finishing = True

    # ---- frames: what the parser calls

    def begin_frame(self, prefix: Prefix, header: bytes) -> list[memoryview] | None:
        """A frame begins (for the parser)."""
        if self.peer is None and prefix.kind not in (Kind.HELLO, Kind.GOODBYE):
            raise FrameError(f"a frame of kind {Kind(prefix.kind).name} before HELLO")
        if prefix.kind == Kind.CHUNK:
            return self._begin_chunk(prefix)
        if prefix.kind in (Kind.OPEN, Kind.MESSAGE):
            return self._begin_message(prefix, header)
        if prefix.body_bytes:
            raise FrameError(f"a frame of kind {Kind(prefix.kind).name} with a body")
        self._control(prefix, header)
        return None

    def finish_frame(self, prefix: Prefix) -> None:
        """A frame is complete."""
        if prefix.kind == Kind.CHUNK:
            stream = self._streams.get(prefix.stream)
            if stream is None or stream.arriving is None:
                return
            self._measure(prefix.body_bytes)
            if stream.arriving.complete:
                message, stream.arriving = stream.arriving, None
                self._bulk_arrived()
                self._deliver(stream, message)
        elif self._inline is not None:
            message, self._inline = self._inline, None
            stream = self._streams.get(message.stream)
            if stream is not None:
                self._deliver(stream, message)
            else:  # given up while its message was arriving
                self.taken(message)

    # ---- receiving

    def _control(self, prefix: Prefix, header: bytes) -> None:
        match prefix.kind:
            case Kind.HELLO:
                self._greet(decode_header(header, Hello))
            case Kind.CREDIT:
                credit = decode_header(header, Credit)
                self._queue.credit(prefix.stream, credit.size_bytes, credit.bulk)
            case Kind.PING:
                self._pinged(decode_header(header, Ping))
            case Kind.PONG:
                self._ponged(decode_header(header, Pong))
            case Kind.END:
                self._remote_end(self._known(prefix))
            case Kind.FAIL | Kind.CANCEL:
                self._remote_failed(self._stopped(prefix), decode_header(header, StreamFailure), prefix.kind)
            case Kind.GOODBYE:
                goodbye = decode_header(header, Goodbye)
                self.finishing = True
                if goodbye.refused:
                    self.lost(RefusedError(f"{self._peer_name()} ended the connection: {goodbye.reason}"))
                else:
                    self.lost(PeerLostError(f"{self._peer_name()} left: {goodbye.reason}"))

    def _greet(self, hello: Hello) -> None:
        if self.peer is not None:
            raise FrameError("a second HELLO")
        self.peer = hello
        queue = SendQueue(hello.bulk_window_bytes, hello.control_window_bytes, hello.stream_window_bytes)
        while (frame := self._queue.take_small()) is not None:  # a HELLO or a ping of our own that is not yet on its way
            queue.urgent(b"".join(frame.parts))
        self._queue = queue
        self._parser.limits = self.settings.frames
        self.detector.rule = msgspec.structs.replace(self.detector.rule, heartbeat_seconds=hello.heartbeat_seconds)
        self._events.on_greeted(hello)

    def _begin_message(self, prefix: Prefix, encoded: bytes) -> list[memoryview] | None:
        header: CallMessage
        stream: Stream | None
        opened = decode_header(encoded, Open) if prefix.kind == Kind.OPEN else None
        header = opened.message if opened else decode_header(encoded, CallMessage)
        size_bytes = message_size(header)
        bulk = not prefix.body_bytes and size_bytes > 0
        if prefix.body_bytes not in (0, size_bytes):
            raise FrameError(f"stream {prefix.stream}: a message of {size_bytes} bytes with a body of {prefix.body_bytes}")
        try:
            stream = self._opened(prefix.stream, opened) if opened else self._known(prefix)
            if stream is not None and size_bytes > self.message_bytes:
                limit = format_bytes(self.message_bytes)
                raise RefusedError(f"a message of {format_bytes(size_bytes)}; {self.settings.name} accepts at most {limit}")
        except RefusedError as error:
            self._refuse_stream(prefix.stream, error)
            stream = None
        cost = cost_of(size_bytes, len(header.tensors))
        self._unread[bulk].receive(cost)
        if stream is None:
            self._unread[bulk].give(cost)
            self._urgent(encode_frame(Kind.CREDIT, prefix.stream, Credit(cost, bulk)))
            return None
        return self._receive(stream, header, size_bytes, bulk)

    def _receive(self, stream: Stream, header: CallMessage, size_bytes: int, bulk: bool) -> list[memoryview]:
        """Sets memory aside for a message; everything about it was checked but its place in the stream."""
        if stream.remote_done or stream.arriving is not None:
            raise FrameError(f"stream {stream.id}: a message {'after the end' if stream.remote_done else 'inside another'}")
        stream.window.receive(cost_of(size_bytes, len(header.tensors)))
        message = IncomingMessage(stream.id, header, size_bytes, bulk)
        if bulk:
            stream.arriving = message
            self._arriving += 1
            stream.handler.on_announced(size_bytes)
            return []
        self._inline = message
        return message.take_sinks(size_bytes)

    def _opened(self, stream_id: int, opened: Open) -> Stream:
        self._claim(stream_id)
        if len(self._streams) >= self.settings.streams:
            raise RefusedError(f"{self.settings.name} has {len(self._streams)} calls under way with this peer and accepts no more")
        handler = self._events.on_opened(stream_id, opened.method, opened.timeout_seconds)
        stream = self._streams[stream_id] = Stream(stream_id, handler, self.settings.stream_window_bytes)
        return stream

    def _claim(self, stream_id: int) -> None:
        """Marks a stream of the peer's as begun. Small calls pass large ones that wait for credit, so numbers may come out of order."""
        if stream_id in self._passed:
            self._passed.remove(stream_id)
            return
        if stream_id % 2 != self._next_remote % 2 or stream_id < self._next_remote:
            raise FrameError(f"stream {stream_id} cannot be opened: it was already, or is not the peer's to open")
        if len(self._passed) + (stream_id - self._next_remote) // 2 > _MOST_CALLS:
            raise FrameError(f"stream {stream_id} cannot be opened: too many before it were not")
        self._passed.update(range(self._next_remote, stream_id, 2))
        self._next_remote = stream_id + 2

    def _begin_chunk(self, prefix: Prefix) -> list[memoryview] | None:
        stream = self._streams.get(prefix.stream) or self._known(prefix)
        if stream is None:
            return None
        if stream.arriving is None:
            raise FrameError(f"stream {prefix.stream}: a chunk outside a message")
        return stream.arriving.take_sinks(prefix.body_bytes)

    def _known(self, prefix: Prefix) -> Stream | None:
        """The stream of a frame; None if it is over here, which the peer may not know yet; FrameError if it never was."""
        stream = self._streams.get(prefix.stream)
        following = self._next_remote if prefix.stream % 2 == self._next_remote % 2 else self._next_local
        if stream is None and (not 0 < prefix.stream < following or prefix.stream in self._passed):
            raise FrameError(f"a frame of kind {Kind(prefix.kind).name} for stream {prefix.stream}, which was never opened")
        return stream

    def _stopped(self, prefix: Prefix) -> Stream | None:
        """As `_known`, for the end of a call that may never have been begun because it waited for credit."""
        theirs = prefix.stream % 2 == self._next_remote % 2
        if theirs and (prefix.stream in self._passed or prefix.stream >= self._next_remote):
            self._claim(prefix.stream)
        return self._known(prefix)

    def _deliver(self, stream: Stream, message: IncomingMessage) -> None:
        stream.remote_done = message.end
        stream.handler.on_message(message)
        if message.end:
            self._close_if_done(stream)

    def _remote_end(self, stream: Stream | None) -> None:
        if stream is not None and not stream.remote_done:
            if stream.arriving is not None:
                raise FrameError(f"stream {stream.id}: an end inside a message")
            stream.remote_done = True
            stream.handler.on_end()
            self._close_if_done(stream)

    def _remote_failed(self, stream: Stream | None, failure: StreamFailure, kind: int) -> None:
        if stream is None:
            return
        self._forget(stream)
        stream.handler.on_failed(_error_of(failure, kind, self._peer_name()))

    def _refuse_stream(self, stream_id: int, error: RefusedError) -> None:
        """Fails one stream because of what the peer sent on it; the others go on."""
        stream = self._streams.get(stream_id)
        self._urgent(encode_frame(Kind.FAIL, stream_id, StreamFailure("RefusedError", str(error))))
        if stream is not None:
            self._forget(stream)
            stream.handler.on_failed(error)

    def _measure(self, size_bytes: int) -> None:
        """Throughput of what arrives; the peer is told with heart-beats, and at once when it is far from what it was told."""
        meter = self.estimate.incoming
        meter.arrived(self._now, size_bytes)
        if not self._told_rate / 2 <= meter.bytes_per_s <= self._told_rate * 2:
            self._ping(self._now)

    def _bulk_arrived(self) -> None:
        self._arriving -= 1
        if not self._arriving:
            self.estimate.incoming.pause()

    # ---- sending

    def _check_sendable(self, payload: Payload) -> None:
        assert self.peer is not None, "nothing is sent before the peer has said what it accepts"
        if payload.size_bytes > self.peer.message_bytes:
            limit = format_bytes(self.peer.message_bytes)
            raise RefusedError(f"a message of {format_bytes(payload.size_bytes)}; {self.peer.name} accepts at most {limit}")
        if len(payload.headers) > _MANY_TENSORS:
            size = len(msgspec.msgpack.encode(payload.headers)) + 8192  # the rest of the header, a method's name included
            if size > self.settings.frames.header_bytes:
                raise RefusedError(f"a message of {len(payload.headers)} tensors is too many for one header; send it in parts")

    def _send_message(
        self,
        kind: Kind,
        stream: Stream,
        header: CallMessage | Open,
        payload: Payload,
        buffers: list[memoryview],
        end: bool,
        on_sent: Callable[[], None] | None,
    ) -> None:
        size_bytes = payload.size_bytes
        inline = size_bytes <= INLINE_BYTES
        head = encode_frame(kind, stream.id, header, b"".join(buffers) if inline else b"")
        self.estimate.queued_bytes += size_bytes

        def sent() -> None:
            counted = min(size_bytes, stream.unsent_bytes)  # nothing, where the stream was given up meanwhile
            self.estimate.queued_bytes -= counted
            stream.unsent_bytes -= counted
            if on_sent is not None:
                on_sent()
            if end:
                stream.local_done = True
                self._close_if_done(stream)

        stream.unsent_bytes += size_bytes
        self._queue.add(OutgoingMessage(stream.id, head, [] if inline else buffers, size_bytes, sent, tensors=len(payload.tensors)))

    def _urgent(self, frame: bytes) -> None:
        if self._queue.urgent_frames >= _MOST_URGENT:
            raise FrameError(f"{self._peer_name()} does not read: {_MOST_URGENT} answers wait")
        self._queue.urgent(frame)

    def _abandon(self, stream_id: int, kind: Kind, failure: StreamFailure) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)
            self._urgent(encode_frame(kind, stream_id, failure))

    def _forget(self, stream: Stream) -> None:
        """The stream ended before its end: nothing more is sent, what was arriving is let go of."""
        del self._streams[stream.id]
        self._drop_unsent(stream)
        if stream.arriving is not None:
            message, stream.arriving = stream.arriving, None
            self._bulk_arrived()
            self.taken(message)

    def _withdraw(self, stream_id: int) -> None:
        """Takes back what of a stream was handed out and not begun: what ends the stream goes first, and must not pass what opens it."""
        back = {id(frame.message): frame.message for frame in self._pending if frame.first and not frame.touched}
        messages = {key: message for key, message in back.items() if message is not None and message.stream == stream_id}
        if messages:
            self._pending = [frame for frame in self._pending if id(frame.message) not in messages]
            self._pending_bytes = sum(len(part) for frame in self._pending for part in frame.parts)
            for message in messages.values():
                self._queue.unsent(message)
        self._queue.withdraw(stream_id)

    def _drop_unsent(self, stream: Stream) -> None:
        if stream.unsent_bytes:
            self._withdraw(stream.id)
        self._queue.drop(stream.id)
        self.estimate.queued_bytes -= stream.unsent_bytes
        stream.unsent_bytes = 0

    def _close_if_done(self, stream: Stream) -> None:
        if stream.local_done and stream.remote_done and self._streams.pop(stream.id, None) is not None:
            self._queue.drop(stream.id)

    # ---- heart-beats

    def _ping(self, now: float) -> None:
        self._pings_sent += 1
        if len(self._pings) >= 64:
            del self._pings[next(iter(self._pings))]
        self._pings[self._pings_sent] = now
        if self._queue.urgent_frames < 64:  # a peer that does not read needs no more of them
            self._told_rate = self.estimate.incoming.bytes_per_s
            self._urgent(encode_frame(Kind.PING, 0, Ping(self._pings_sent, self._told_rate)))

    def _pinged(self, ping: Ping) -> None:
        self._urgent(encode_frame(Kind.PONG, 0, Pong(ping.number)))
        if ping.incoming_bytes_per_s:
            rate = self.estimate.outgoing_bytes_per_s = ping.incoming_bytes_per_s
            self._queue.chunk_bytes = int(min(max(rate * _CHUNK_SECONDS, _SMALLEST_CHUNK), _LARGEST_CHUNK))

    def _ponged(self, pong: Pong) -> None:
        sent_at = self._pings.pop(pong.number, None)
        if sent_at is not None:
            now = self._clock()
            self.estimate.answered(now - sent_at)
            self.detector.answered(now, now - sent_at)

    def _peer_name(self) -> str:
        return self.peer.name if self.peer is not None else "the peer"


def _bytes_of(payload: Payload) -> list[memoryview]:
    """RefusedError for a tensor that has no bytes, such as one of a subclass that only pretends to."""
    try:
        return payload.buffers()
    except Exception as error:
        raise RefusedError(f"a tensor that cannot be read as bytes: {type(error).__name__}: {error}") from None


def _error_of(failure: StreamFailure, kind: int, peer: str) -> FabricError:
    if kind == Kind.CANCEL:
        return RefusedError(f"{peer} cancelled the call: {failure.text}")
    if failure.kind == "RefusedError":
        return RefusedError(f"{peer} refused the call: {failure.text}")
    if failure.kind == LATE:
        return DeadlineError(f"{peer}: {failure.text}")
    return RemoteError(f"{peer}: {failure.kind}: {failure.text}", failure.kind)
