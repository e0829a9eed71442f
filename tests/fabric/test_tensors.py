"""Tensors of every kind as bytes and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FabricError, FrameError
from atoll.fabric.frame import TensorHeader
from atoll.fabric.payload import DTYPES, allocate, encode_payload, tensor_bytes, tensor_header, tensor_size


def travel(tensor: torch.Tensor) -> torch.Tensor:
    header = tensor_header(tensor)
    copy, view = allocate(header)
    data = tensor_bytes(tensor)
    assert len(data) == len(view) == tensor_size(header)
    view[:] = data
    return copy


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 5), max_size=5),
    st.booleans(),
)
def test_every_dtype_shape_and_stride(dtype: str, shape: list[int], strided: bool) -> None:
    raw = torch.randint(0, 256, (*shape, DTYPES[dtype].itemsize * 2), dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype == "bool" else raw.view(DTYPES[dtype])
    if strided:
        tensor = tensor.transpose(0, -1)[..., ::2] if tensor.dim() > 1 else tensor[::2]
    copy = travel(tensor)
    assert copy.shape == tensor.shape
    assert copy.dtype == tensor.dtype
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert torch.equal(copy.reshape(-1).view(torch.uint8), dense.reshape(-1).view(torch.uint8))


def test_views_that_only_claim_their_values() -> None:
    complex_numbers = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(travel(complex_numbers.conj()), complex_numbers.conj())
    assert torch.equal(travel(complex_numbers.conj().imag), complex_numbers.conj().imag)
    assert torch.equal(travel(torch.ones(1).expand(5)), torch.ones(5))
    parameter = torch.nn.Parameter(torch.randn(3))
    assert torch.equal(travel(parameter), parameter.detach())


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(100)
    view = tensor_bytes(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


def test_what_cannot_travel_is_refused() -> None:
    for tensor in torch.zeros(3, device="meta"), torch.zeros(3).to_sparse():
        with pytest.raises(FabricError, match=r"cannot be sent|no values to send"):
            encode_payload([tensor])
    with pytest.raises(FrameError, match="unknown dtype 'float7'"):
        tensor_size(TensorHeader("float7", (1,)))
    with pytest.raises(FrameError, match="cannot be made"):
        allocate(TensorHeader("float32", (0, 2**62, 2**62)))
