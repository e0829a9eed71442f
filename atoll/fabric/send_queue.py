"""What goes out next: control first, then streams in turn, a chunk each, within the credit the peer has given. No sockets here."""

from collections import deque
from collections.abc import Callable, Sequence

from atoll.fabric.frame import Kind, pack_prefix
from atoll.fabric.stream import FlowWindow, cost_of

__all__ = ["CHUNK_BYTES", "INLINE_BYTES", "OutgoingFrame", "OutgoingMessage", "SendQueue"]

CHUNK_BYTES = 256 * 1024
"""What a stream sends before it is the next one's turn, until the link's throughput is known."""

INLINE_BYTES = 64 * 1024
"""Messages up to this travel whole in one frame and before bulk."""


class OutgoingFrame:
    """A frame handed out for sending, and whom to tell once it is sent."""

    __slots__ = ("bulk", "first", "message", "on_sent", "parts", "size_bytes", "touched")

    def __init__(
        self,
        parts: Sequence[bytes | memoryview],
        on_sent: Callable[[], None] | None = None,
        *,
        message: "OutgoingMessage | None" = None,
        first: bool = False,
    ) -> None:
        self.message = message  # whose bytes these are; None: the protocol's own
        self.first = first  # of the message's frames
        self.bulk = message is not None and message.bulk
        self.parts = [memoryview(part) for part in parts]
        self.size_bytes = sum(map(len, parts))
        self.on_sent = on_sent
        self.touched = False  # a part of it is on the wire: nothing may come before the rest

    def sent(self, count: int) -> int:
        """So many bytes went, of this frame first; returns how many were not its own."""
        self.touched = True
        whole = 0
        while whole < len(self.parts) and count >= len(self.parts[whole]):
            count -= len(self.parts[whole])
            whole += 1
        del self.parts[:whole]
        if self.parts and count:
            self.parts[0] = self.parts[0][count:]
            return 0
        return count


class OutgoingMessage:
    """A message on its way out. `head` is its first frame; bytes of bulk follow in chunks from `buffers`."""

    __slots__ = ("buffers", "bulk", "cost", "head", "on_sent", "stream")

    def __init__(
        self,
        stream: int,
        head: bytes,
        buffers: list[memoryview],
        size_bytes: int,
        on_sent: Callable[[], None] | None = None,
        *,
        tensors: int = 0,
        free: bool = False,
    ) -> None:
        self.stream = stream
        self.head = head
        self.buffers = [buffer for buffer in buffers if len(buffer)]
        self.bulk = bool(self.buffers)
        self.cost = 0 if free else cost_of(size_bytes, tensors)  # free: the protocol's own, which no reader gives back
        self.on_sent = on_sent

    def take_chunk(self, size_bytes: int) -> list[bytes | memoryview]:
        """The next frame: prefix and up to `size_bytes` of what is left, across buffers."""
        parts: list[bytes | memoryview] = []
        taken = 0
        while self.buffers and taken < size_bytes:
            first = self.buffers[0]
            part = first[: size_bytes - taken]
            taken += len(part)
            parts.append(part)
            if len(part) == len(first):
                del self.buffers[0]
            else:
                self.buffers[0] = first[len(part) :]
        prefix = pack_prefix(Kind.CHUNK, self.stream, 0, taken)
        if self.head:
            prefix, self.head = self.head + prefix, b""
        return [prefix, *parts]


class _Stream:
    """What one stream still has to say."""

    __slots__ = ("queue", "sending", "window")

    def __init__(self, window_bytes: int) -> None:
        self.queue: deque[OutgoingMessage] = deque()
        self.window = FlowWindow(window_bytes)
        self.sending: OutgoingMessage | None = None  # bulk that was begun: later messages of the stream wait for its last byte


class SendQueue:
    """Messages of many streams, and the order in which their bytes leave.

    Small messages pass bulk of other streams, never of their own. Every class has its own credit, so that small messages pass even
    when a slow reader has used up the credit for bulk.
    """

    def __init__(self, bulk_window_bytes: int, control_window_bytes: int, stream_window_bytes: int) -> None:
        self.chunk_bytes = CHUNK_BYTES
        self._windows = {True: FlowWindow(bulk_window_bytes), False: FlowWindow(control_window_bytes)}
        self._stream_window_bytes = stream_window_bytes
        self._streams: dict[int, _Stream] = {}
        self._ready: dict[bool, deque[int]] = {True: deque(), False: deque()}  # streams whose next message only waits for the connection
        self._urgent: deque[bytes] = deque()  # frames of the protocol itself
        self._small: deque[OutgoingMessage] = deque()  # admitted, whole
        self._turns: deque[OutgoingMessage] = deque()  # admitted bulk, in turn

    @property
    def small_waiting(self) -> bool:
        """Whether there is something that passes bulk."""
        return bool(self._urgent or self._small)

    @property
    def bulk_waiting(self) -> bool:
        """Whether there is bulk that may go now."""
        return bool(self._turns)

    @property
    def waiting(self) -> bool:
        """Whether anything can be sent now."""
        return bool(self._urgent or self._small or self._turns)

    @property
    def urgent_frames(self) -> int:
        """Frames of the protocol itself that wait."""
        return len(self._urgent)

    def urgent(self, frame: bytes) -> None:
        """A frame of the protocol itself: it goes before all messages."""
        self._urgent.append(frame)

    def add(self, message: OutgoingMessage) -> None:
        """A message: it goes when its stream, its class and those before it let it."""
        stream = self._streams.get(message.stream)
        if stream is None:
            stream = self._streams[message.stream] = _Stream(self._stream_window_bytes)
        stream.queue.append(message)
        if len(stream.queue) == 1:
            self._list(message.stream, stream)
            self._admit()

    def credit(self, stream_id: int, cost: int, bulk: bool) -> None:
        """The reader took messages of a stream; FrameError if there were none."""
        self._windows[bulk].give(cost)
        stream = self._streams.get(stream_id)
        if stream is not None:
            blocked = bool(stream.queue) and stream.sending is None and not stream.window.admits(stream.queue[0].cost)
            stream.window.give(min(cost, stream.window.used_bytes))
            if blocked:
                self._list(stream_id, stream)
        self._admit()

    def drop(self, stream_id: int) -> None:
        """The stream is over: nothing more of it is handed out. What was begun is forgotten; the reader gives its credit back."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        begun = stream.sending
        if begun is not None:
            if begun in self._turns:
                self._turns.remove(begun)
            if begun.head:  # not a byte of it went out, so its reader knows nothing of it
                self._windows[True].give(begun.cost)
        for ready in self._ready.values():
            while stream_id in ready:
                ready.remove(stream_id)
        self._admit()

    def withdraw(self, stream_id: int) -> None:
        """Small messages of a stream that was given up are not sent: its end would pass its beginning."""
        for message in [message for message in self._small if message.stream == stream_id]:
            self._small.remove(message)
            self.unsent(message)

    def unsent(self, message: OutgoingMessage) -> None:
        """A message that was admitted is not sent after all: its credit is free again."""
        self._windows[message.bulk].give(message.cost)

    def take_small(self) -> OutgoingFrame | None:
        """The next frame that passes bulk."""
        if self._urgent:
            return OutgoingFrame([self._urgent.popleft()])
        if self._small:
            message = self._small.popleft()
            return OutgoingFrame([message.head], message.on_sent, message=message, first=True)
        return None

    def take_bulk(self) -> OutgoingFrame | None:
        """The next chunk: of each stream in turn."""
        if not self._turns:
            return None
        message = self._turns.popleft()
        first = bool(message.head)
        parts = message.take_chunk(self.chunk_bytes)
        if message.buffers:
            self._turns.append(message)
            return OutgoingFrame(parts, message=message, first=first)
        return OutgoingFrame(parts, lambda: self._bulk_sent(message), message=message, first=first)

    def _bulk_sent(self, message: OutgoingMessage) -> None:
        """The last byte of a message is on the wire: only now may its stream go on, as small messages pass what is handed out."""
        if message.on_sent is not None:
            message.on_sent()
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.sending = None
            self._list(message.stream, stream)
            self._admit()

    def _list(self, stream_id: int, stream: _Stream) -> None:
        """Puts a stream whose next message its own window admits in line for the connection's."""
        if stream.sending is None and stream.queue and stream.window.admits(stream.queue[0].cost):
            self._ready[stream.queue[0].bulk].append(stream_id)

    def _admit(self) -> None:
        """Lets messages go while there is credit, first come first served, so that large ones do not starve."""
        for bulk, ready in self._ready.items():
            window = self._windows[bulk]
            while ready and window.admits(self._streams[ready[0]].queue[0].cost):
                stream = self._streams[ready.popleft()]
                message = stream.queue.popleft()
                window.take(message.cost)
                stream.window.take(message.cost)
                if bulk:
                    stream.sending = message
                    self._turns.append(message)
                else:
                    self._small.append(message)
                    self._list(message.stream, stream)
