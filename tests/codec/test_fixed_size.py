"""Messages of known length: always as long as the shape says, and as near to the tensor as the codec is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.registry import FixedSizeCodec, decode, make_codec
from atoll.errors import CodecError
from tests.codec.tensors import tensors

NAMES = ("bf16", "fp16", "int8", "int4")


@given(tensors(finite=False), st.sampled_from(NAMES))
def test_length_follows_from_the_shape_and_values_are_those_of_the_codec(tensor: torch.Tensor, name: str) -> None:
    codec = FixedSizeCodec(name)
    nbytes = codec.message_bytes(tuple(tensor.shape), tensor.dtype)
    if nbytes is None:
        assert make_codec(name).encode(tensor).header.codec == "none"
        return
    message = codec.encode(tensor)
    assert message.dtype == torch.uint8
    assert message.numel() == nbytes < tensor.nbytes
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    codec.decode(message, out)
    by_codec = decode(make_codec(name).encode(tensor))
    for blocks in zip(*(value.reshape(-1).split(256) for value in (tensor, by_codec, out)), strict=True):
        true, near, own = (block.double() for block in blocks)
        if torch.equal(own, near):
            continue
        if name in ("int8", "int4"):  # a block that does not fit: NaN all over, or too small to matter
            vanishing = bool(true.abs().amax() < 2.0**-100)
            assert own.eq(0).all() if vanishing else own.isnan().all()
            assert vanishing or not bool(true.abs().amax() <= 2.0**126)
        else:
            torch.testing.assert_close(own, true.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name])).double(), equal_nan=True)


def test_what_is_not_finite_never_arrives_as_a_number() -> None:
    value = torch.randn(4, 512)
    value[2, 7] = float("inf")
    for name in NAMES:
        codec, out = FixedSizeCodec(name), torch.empty(4, 512)
        codec.decode(codec.encode(value), out)
        assert not out[2, 7].isfinite()
        assert out[:2].isfinite().all()


def test_codecs_whose_length_depends_on_values_are_refused() -> None:
    with pytest.raises(CodecError, match="known beforehand"):
        FixedSizeCodec("top-k:0.1")
