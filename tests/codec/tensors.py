"""Tensors that try codecs: every float type, shapes from empty to several chunks, values from denormal to huge, NaN and Inf."""

import torch
from hypothesis import strategies as st

from atoll.codec.base import Encoded

__all__ = ["CODEC_TEXTS", "FLOATS", "body_of", "tensors"]

CODEC_TEXTS = ("none", "bf16", "fp16", "int8", "int4", "2-bit", "top-k:0.05", "top-k:0.5", "top-k-2-bit:64", "top-k-2-bit:1500")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((), (1,), (0,), (3, 0), (7,), (255,), (256,), (257,), (1000,), (16, 16), (33, 65), (5, 4, 129), (1, 700), (700, 1), (64, 64))


@st.composite
def tensors(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = FLOATS, finite: bool = True) -> torch.Tensor:
    """A tensor whose rows have very different magnitudes, zeros, equal values and perhaps what is not finite."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = draw(st.sampled_from([0.0, 1.0, 10.0, 40.0]))
    tensor = tensor * torch.pow(10.0, spread * torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-3, 3))
    tensor = tensor * 10.0 ** draw(st.sampled_from([0, -3, 4, -38, -44, 38, 300, -310]))
    if draw(st.booleans()):
        tensor = torch.where(torch.rand(shape, generator=generator) < 0.3, 0.0, tensor)
    if draw(st.booleans()):
        tensor = tensor.sign() * torch.finfo(dtype).max / 3
    limit = torch.finfo(dtype).max
    tensor = tensor.clamp(-limit, limit).to(dtype)
    if not finite and tensor.numel():
        for value in draw(st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=3)):
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    return tensor.t().contiguous().t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


def body_of(encoded: Encoded) -> bytes:
    """All bytes that follow the header."""
    return b"".join(map(bytes, encoded.buffers()))
