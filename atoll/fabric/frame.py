"""Frames: what travels on a connection, their typed headers, and the parser that takes them apart. No sockets here.

A frame is a prefix of 20 bytes, a header (msgpack) and a body (raw bytes):

```
 0  2 bytes  b"At"            8  4 bytes  length of the body
 2  1 byte   version          12 8 bytes  stream
 3  1 byte   kind             20 …        header, then body
 4  4 bytes  length of the header         (little endian)
```

`FrameParser` never holds more than one header: bodies are written where its handler says, straight from the socket when the carrier
reads into `buffers()`. Lengths are checked against `FrameLimits` before anything is set aside for them. Headers travel as arrays: fields
may be added at the end, never moved.
"""

import enum
import struct
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec

from atoll.errors import FrameError

__all__ = [
    "LATE",
    "LONGEST_SECONDS",
    "PREFIX_BYTES",
    "CallMessage",
    "Credit",
    "FrameLimits",
    "FrameParser",
    "Goodbye",
    "Hello",
    "Kind",
    "Open",
    "Ping",
    "Pong",
    "Prefix",
    "StreamFailure",
    "TensorHeader",
    "decode_header",
    "encode_frame",
    "pack_prefix",
]

MAGIC = b"At"
VERSION = 1
_PREFIX = struct.Struct("<2sBBIIQ")
PREFIX_BYTES = _PREFIX.size
_SCRATCH_BYTES = 64 * 1024


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1  # the first frame each way: who speaks and what it accepts
    OPEN = 2  # a call begins: its method and its first message
    MESSAGE = 3  # a message of a stream; its bytes are the body, or follow in chunks
    CHUNK = 4  # more bytes of the stream's message; no header
    END = 5  # this side says nothing more on the stream
    FAIL = 6  # the stream ends with an error
    CANCEL = 7  # the stream is no longer wanted
    CREDIT = 8  # bytes of messages were taken by their reader: as many may follow
    PING = 9  # a heart-beat
    PONG = 10  # its answer
    GOODBYE = 11  # the connection ends on purpose


class Prefix(NamedTuple):
    """The fixed part of a frame."""

    kind: int
    stream: int
    header_bytes: int
    body_bytes: int


class FrameLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a parser accepts before it sets memory aside."""

    header_bytes: int = 1 << 20
    body_bytes: int = 4 << 20


class FrameHandler(Protocol):
    """Who is told about frames as they arrive."""

    def begin_frame(self, prefix: Prefix, header: bytes) -> list[memoryview] | None:
        """A frame's prefix and header are here. Returns where its body goes (exactly its length), or None to let it pass unseen."""

    def finish_frame(self, prefix: Prefix) -> None:
        """The frame's body is where it belongs."""


def pack_prefix(kind: int, stream: int, header_bytes: int, body_bytes: int) -> bytes:
    """The fixed part of a frame as it travels."""
    return _PREFIX.pack(MAGIC, VERSION, kind, header_bytes, body_bytes, stream)


_KINDS = frozenset(Kind)


class FrameParser:
    """Bytes in, frames out, without copying bodies.

    A carrier reads into `buffers()` (as many of them as it likes, in order) and says with `filled(count)` how much arrived. What is wrong
    with the bytes raises FrameError; the parser is then of no further use.
    """

    def __init__(self, handler: FrameHandler, limits: FrameLimits) -> None:
        self.limits = limits
        self._handler = handler
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # of what is in the scratch and not yet looked at
        self._end = 0
        self._prefix: Prefix | None = None  # of the frame whose body is arriving
        self._sinks: list[memoryview] = []  # where the rest of that body goes, in order
        self._skip = 0  # bytes of that body that go nowhere
        self._after_chunk = False  # the frame before was a chunk: another is likely, so read no further than its prefix

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go: never empty, never of length zero."""
        if self._prefix is not None:
            if self._skip:
                return [self._view[: min(self._skip, len(self._view))]]
            return [*self._sinks, self._view[:PREFIX_BYTES]]
        if self._start:
            self._scratch[: self._end - self._start] = self._scratch[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        limit = max(PREFIX_BYTES, self._end + 1) if self._after_chunk else len(self._view)
        return [self._view[self._end : min(limit, len(self._view))]]

    @property
    def body_bytes_due(self) -> int:
        """Bytes that are still to come of a body that began to arrive."""
        return self._skip + sum(map(len, self._sinks)) if self._prefix is not None else 0

    def filled(self, count: int) -> None:
        """`count` bytes were written to what `buffers()` returned last."""
        if self._prefix is not None:
            count = self._body_filled(count)
            if self._prefix is not None:
                return
            self._start, self._end = 0, count
        else:
            self._end += count
        while self._next_frame():
            pass

    def _body_filled(self, count: int) -> int:
        """Takes what of `count` bytes belongs to the body; returns how many lie beyond it, in the scratch."""
        if self._skip:
            self._skip -= count
            count = 0
        while count and self._sinks:
            first = self._sinks[0]
            if count < len(first):
                self._sinks[0] = first[count:]
                return 0
            count -= len(first)
            del self._sinks[0]
        if not self._sinks and not self._skip:
            self._finish()
        return count

    def _finish(self) -> None:
        prefix, self._prefix = self._prefix, None
        assert prefix is not None
        self._after_chunk = prefix.kind == Kind.CHUNK
        self._handler.finish_frame(prefix)

    def _next_frame(self) -> bool:
        """Looks at what is in the scratch; says whether there may be more to see."""
        available = self._end - self._start
        if self._prefix is not None or available < PREFIX_BYTES:
            return False
        prefix = self._unpack()
        needed = PREFIX_BYTES + prefix.header_bytes
        if available < needed:
            self._make_room(needed)
            self._after_chunk = False
            return False
        header = bytes(self._view[self._start + PREFIX_BYTES : self._start + needed]) if prefix.header_bytes else b""
        self._start += needed
        self._prefix = prefix
        sinks = self._handler.begin_frame(prefix, header)
        if sinks is None:
            self._skip = prefix.body_bytes
        else:
            self._sinks = [sink for sink in sinks if len(sink)]
            assert sum(map(len, self._sinks)) == prefix.body_bytes, "a handler must place the whole body"
        self._take_from_scratch()
        return True

    def _take_from_scratch(self) -> None:
        """The part of a body that was read together with its prefix."""
        if self._skip:
            size = min(self._skip, self._end - self._start)
            self._skip -= size
            self._start += size
        while self._sinks and self._start < self._end:
            sink = self._sinks[0]
            size = min(len(sink), self._end - self._start)
            sink[:size] = self._view[self._start : self._start + size]
            self._start += size
            if size == len(sink):
                del self._sinks[0]
            else:
                self._sinks[0] = sink[size:]
        if not self._sinks and not self._skip:
            self._finish()

    def _unpack(self) -> Prefix:
        magic, version, kind, header_bytes, body_bytes, stream = _PREFIX.unpack_from(self._scratch, self._start)
        if magic != MAGIC:
            raise FrameError(f"not a frame of Atoll: it begins with {magic!r}; is something else talking to this port?")
        if version != VERSION:
            raise FrameError(f"a frame of protocol version {version}, but this is version {VERSION}; run the same Atoll on both sides")
        if kind not in _KINDS:
            raise FrameError(f"a frame of unknown kind {kind}")
        if header_bytes > self.limits.header_bytes:
            raise FrameError(f"a header of {header_bytes} bytes; at most {self.limits.header_bytes} are accepted")
        if body_bytes > self.limits.body_bytes:
            raise FrameError(f"a body of {body_bytes} bytes; at most {self.limits.body_bytes} are accepted")
        return Prefix(kind, stream, header_bytes, body_bytes)

    def _make_room(self, needed: int) -> None:
        """A longer header than the scratch holds (but within the limits): the scratch grows to it."""
        if needed > len(self._scratch):
            grown = bytearray(needed)
            grown[: self._end - self._start] = self._scratch[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
            self._scratch = grown
            self._view = memoryview(grown)


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes follow."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class CallMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message: its payload (msgpack), then its tensors. `end`: the sender says nothing more on this stream."""

    payload_bytes: Count
    tensors: tuple[TensorHeader, ...] = ()
    end: bool = True


LONGEST_SECONDS = 1e9  # that a caller may wait


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A call: the method, how long the caller waits, and the first message."""

    method: Text
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_SECONDS)]
    message: CallMessage


LATE = "late"  # the kind of a failure: whoever serves the call saw its deadline pass


class StreamFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a stream ends: the kind of error by its class's name, and its text. The header of FAIL and CANCEL."""

    kind: Text
    text: str


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of messages that were taken, of those that count as bulk or of the others."""

    size_bytes: Count
    bulk: bool


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, and what it accepts."""

    name: Text
    role: Text
    bulk_window_bytes: Count
    control_window_bytes: Count
    stream_window_bytes: Count
    message_bytes: Count
    heartbeat_seconds: Annotated[float, msgspec.Meta(ge=0.001, le=3600)]  # more would be a promise never to be missed
    fingerprint: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)] = {}  # of the job; empty: it has none


class Ping(msgspec.Struct, frozen=True, array_like=True):
    """A heart-beat, with the throughput this side measured on what it received (0: not yet)."""

    number: Count
    incoming_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0.0


class Pong(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a ping."""

    number: Count


class Goodbye(msgspec.Struct, frozen=True, array_like=True):
    """Why the connection ends on purpose; `refused`: because of something the other side did."""

    reason: str
    refused: bool = False


Header = TypeVar("Header", bound=msgspec.Struct)


def decode_header(data: bytes, type_: type[Header]) -> Header:
    """The header as its type; FrameError says what is wrong with it."""
    try:
        return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise FrameError(f"a header that is no {type_.__name__}: {error}") from None


def encode_frame(kind: Kind, stream: int, header: msgspec.Struct | None = None, body: bytes = b"") -> bytes:
    """A whole small frame."""
    encoded = b"" if header is None else msgspec.msgpack.encode(header)
    return pack_prefix(kind, stream, len(encoded), len(body)) + encoded + body
