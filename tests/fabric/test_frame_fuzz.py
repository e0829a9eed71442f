"""A small share of `python -m tests.fabric.frame_fuzz`: bytes from anybody are taken or refused, and nothing else."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from tests.fabric.frame_fuzz import run_input


@given(st.binary(max_size=600))
@example(b"")
@example(b"\x03" + bytes(599))
def test_bytes_from_anybody_are_taken_or_refused(data: bytes) -> None:
    run_input(data)


def test_more_of_them_drawn_at_random() -> None:
    draw = random.Random(7)
    refused = sum(run_input(draw.randbytes(draw.randrange(1, 600))) for _ in range(1500))
    assert 0 < refused < 1500, "some are taken and some are refused, or it tests nothing"
