"""The typed headers of frames, in msgpack. They travel as arrays: fields may be added at the end, never moved."""

from typing import Annotated, TypeVar

import msgspec

from atoll.errors import FrameError
from atoll.fabric.frame import Kind, pack_prefix

__all__ = [
    "LATE",
    "LONGEST_SECONDS",
    "Credit",
    "Failure",
    "Goodbye",
    "Hello",
    "Message",
    "Open",
    "Ping",
    "Pong",
    "TensorHeader",
    "decode_header",
    "encode_frame",
]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes follow."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message: its payload (msgpack), then its tensors. `end`: the sender says nothing more on this stream."""

    payload_bytes: Count
    tensors: tuple[TensorHeader, ...] = ()
    end: bool = True


LONGEST_SECONDS = 1e9  # that a caller may wait


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A call: the method, how long the caller waits, and the first message."""

    method: Text
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_SECONDS)]
    message: Message


LATE = "late"  # the kind of a failure: whoever serves the call saw its deadline pass


class Failure(msgspec.Struct, frozen=True, array_like=True):
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
