"""Frames come out as they went in, whatever pieces they arrive in; anything else is refused without harm."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameError
from atoll.fabric.frame import (
    PREFIX_BYTES,
    CallMessage,
    Credit,
    FrameLimits,
    FrameParser,
    Hello,
    Kind,
    Open,
    TensorHeader,
    encode_frame,
    pack_prefix,
)
from tests.fabric.parsing import Collector, feed_in_pieces, listening_connection

kinds = st.sampled_from(sorted(Kind))
frames = st.tuples(kinds, st.integers(0, 2**64 - 1), st.binary(max_size=80), st.binary(max_size=300))
pieces = st.lists(st.integers(1, 120), max_size=60)


def encoded(frame: tuple[Kind, int, bytes, bytes]) -> bytes:
    kind, stream, header, body = frame
    return pack_prefix(kind, stream, len(header), len(body)) + header + body


@given(st.lists(frames, max_size=8), pieces, st.booleans())
def test_frames_survive_any_division_into_pieces(sent: list[tuple[Kind, int, bytes, bytes]], sizes: list[int], discard: bool) -> None:
    collector = Collector(discard)
    feed_in_pieces(FrameParser(collector, FrameLimits()), b"".join(map(encoded, sent)), sizes)
    got = [(prefix.kind, prefix.stream, header, body) for prefix, header, body in collector.frames]
    assert got == [(kind, stream, header, bytes(len(body)) if discard else body) for kind, stream, header, body in sent]


@given(st.integers(0, 3 << 17), st.integers(0, 3 << 17), pieces)
def test_headers_and_bodies_larger_than_the_scratch(header_bytes: int, body_bytes: int, sizes: list[int]) -> None:
    collector = Collector()
    frame = (Kind.CHUNK, 1, b"h" * header_bytes, b"b" * body_bytes)
    feed_in_pieces(FrameParser(collector, FrameLimits()), encoded(frame) * 2, [size * 3001 for size in sizes])
    assert [(header, body) for _, header, body in collector.frames] == [frame[2:]] * 2


@given(st.binary(max_size=400), pieces)
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes, sizes: list[int]) -> None:
    with pytest.raises(FrameError) if not data.startswith(b"At"[: len(data)]) and len(data) >= PREFIX_BYTES else _either():
        feed_in_pieces(FrameParser(Collector(), FrameLimits(header_bytes=64, body_bytes=64)), data, sizes)


class _either:  # noqa: N801 - reads as a word
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, FrameError)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x", "not a frame of Atoll: it begins with b'GE'"),
        (b"At\x02\x01" + bytes(16), "protocol version 2, but this is version 1"),
        (b"At\x01\x63" + bytes(16), "unknown kind 99"),
        (pack_prefix(Kind.CHUNK, 1, 0, 2**32 - 1), "a body of 4294967295 bytes; at most 4194304"),
        (pack_prefix(Kind.OPEN, 1, 2**31, 0), "a header of 2147483648 bytes; at most 1048576"),
    ],
)
def test_what_is_wrong_is_said(prefix: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        feed_in_pieces(FrameParser(Collector(), FrameLimits()), prefix)


HELLO = encode_frame(Kind.HELLO, 0, Hello("oslo", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0))
typed = st.one_of(
    st.builds(
        lambda kind, stream, header, body: encode_frame(kind, stream, header, body),
        kinds,
        st.integers(0, 12),
        st.one_of(
            st.none(),
            st.builds(Credit, st.integers(0, 2**62), st.booleans()),
            st.builds(
                CallMessage,
                st.integers(0, 2**62),
                st.lists(
                    st.builds(
                        TensorHeader, st.sampled_from(["float32", "bool", "no"]), st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
                    ),
                    max_size=3,
                ).map(tuple),
                st.booleans(),
            ),
            st.builds(lambda size: Open("m", 1.0, CallMessage(size)), st.integers(0, 2**20)),
        ),
        st.binary(max_size=64),
    ),
    st.binary(max_size=64),
)


@given(st.booleans(), st.lists(typed, max_size=12), pieces)
def test_a_connection_survives_whatever_it_is_sent(greets: bool, sent: list[bytes], sizes: list[int]) -> None:
    connection, _ = listening_connection()
    with _either():
        feed_in_pieces(connection, (HELLO if greets else b"") + b"".join(sent), sizes)


def test_no_memory_is_set_aside_beyond_limits() -> None:
    """Announcements of terabytes, one after another: refused call by call, and hardly a byte is taken."""
    connection, events = listening_connection()
    huge = CallMessage(0, (TensorHeader("float64", (2**40,)),))
    tracemalloc.start()
    feed_in_pieces(connection, HELLO)
    for i in range(50):
        feed_in_pieces(connection, encode_frame(Kind.OPEN, 1 + 2 * i, Open("m", 1.0, huge)))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert not events.messages
    assert not connection._streams
    assert b"accepts at most 1.05 MB" in b"".join(connection.outgoing(1 << 20))
