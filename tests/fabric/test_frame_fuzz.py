"""A small share of `python -m tests.fabric.frame_fuzz`: bytes from anybody are taken or refused, and nothing else."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.errors import FrameError
from atoll.fabric.frame import CallMessage, Hello, Kind, Open, TensorHeader, encode_frame
from tests.fabric.frame_fuzz import run_input
from tests.fabric.parsing import feed_in_pieces, listening_connection


@given(st.binary(max_size=600))
@example(b"")
@example(b"\x03" + bytes(599))
def test_bytes_from_anybody_are_taken_or_refused(data: bytes) -> None:
    run_input(data)


def test_more_of_them_drawn_at_random() -> None:
    draw = random.Random(7)
    refused = sum(run_input(draw.randbytes(draw.randrange(1, 600))) for _ in range(1500))
    assert 0 < refused < 1500, "some are taken and some are refused, or it tests nothing"


def test_a_message_larger_than_any_number_of_the_protocol_is_refused() -> None:
    """Found by the fuzzer: the credit to give back for it could not be written."""
    connection, _ = listening_connection()
    feed_in_pieces(connection, encode_frame(Kind.HELLO, 0, Hello("mallory", "worker", 1, 1, 1, 1, 1.0)))
    endless = CallMessage(0, (TensorHeader("float32", (2**40, 2**40)),))
    with pytest.raises(FrameError, match="which no memory holds"):
        feed_in_pieces(connection, encode_frame(Kind.OPEN, 1, Open("Store.echo", 1.0, endless)))
