"""A stage's state as bytes."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import JobFailedError
from atoll.runtime.swarm.packing import Packing, chunk_range, pack, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex128)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3).to(draw(st.sampled_from(DTYPES)))
    return value.t() if value.dim() == 2 and draw(st.booleans()) else value


PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
STATES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(STATES, st.integers(1, 9))
def test_what_is_unpacked_from_chunks_is_what_was_packed(value: Any, chunks: int) -> None:
    packing = Packing(value)
    found = torch.cat([packing.read(*chunk_range(packing.length, chunks, chunk)) for chunk in range(chunks)])
    assert torch.equal(found, pack(value))
    assert same(value, unpack(found))
    assert same(value, unpack(torch.cat([torch.zeros(3, dtype=torch.uint8), found])[3:]))  # wherever in memory it begins


def test_a_snapshot_and_what_is_unpacked_are_copies() -> None:
    weights = torch.zeros(3)
    packed = pack([weights])
    weights += 1.0
    (first,) = unpack(packed)
    first += 2.0
    assert unpack(packed)[0].tolist() == [0.0, 0.0, 0.0]


def test_what_cannot_be_packed_or_read_is_told() -> None:
    with pytest.raises(JobFailedError, match="a set in the state of the optimizer"):
        pack({"a": {1, 2}})
    packed = bytearray(pack([torch.zeros(2)]).numpy().tobytes()).replace(b"float32", b"float99")
    with pytest.raises(JobFailedError, match="tensors of float99"):
        unpack(torch.frombuffer(packed, dtype=torch.uint8))


def test_numbers_that_are_a_view_of_their_conjugates_are_packed() -> None:
    value = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(unpack(pack([value]))[0], value)


VALID = bytes(pack({"a": [torch.arange(9.0), 1.5, None], "b": (torch.zeros(0), "x")}).numpy().tobytes())


CHANGED = st.builds(lambda at, new: VALID[:at] + new + VALID[at + len(new) :], st.integers(0, 300), st.binary(max_size=4))


@given(st.binary(max_size=64) | CHANGED)
def test_bytes_that_are_no_state_are_refused_and_nothing_else(content: bytes) -> None:
    with suppress(JobFailedError):
        unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize("left", [0, 8, 20, len(VALID) - 1, len(VALID) - 40])
def test_a_state_that_is_cut_is_refused(left: int) -> None:
    content = bytearray(VALID[:left]) or bytearray(1)
    with pytest.raises(JobFailedError, match="cannot be read"):
        unpack(torch.frombuffer(content, dtype=torch.uint8))
