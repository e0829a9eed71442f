"""Codec: what a tensor looks like on a link.

Here is what codecs promise to the cost model: how small they make a tensor, what that costs and what it loses. Planning needs only these
statements, and no PyTorch; the codecs themselves are in `atoll.codec.registry` and what it names. A codec with a strength
(`top-k:0.01`) makes its own: `make_codec(text).spec`.
"""

import math
from statistics import NormalDist
from typing import Literal, TypeAlias

import msgspec

__all__ = ["CODECS", "CodecChoice", "CodecSpec", "codec_spec", "sparse_two_bit_spec"]

CodecChoice: TypeAlias = Literal["none", "auto", "bf16", "fp16", "int8", "int4"]
"""What `--codec` may say of activations and their gradients; `auto`: what fits each link.

None of them can make a small message into a large tensor."""


class CodecSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` per element on the wire (scales of blocks included) and how often encoding plus decoding pass over the tensor in memory.

    `relative_error` is the root mean square error over the root mean square of normally distributed values.
    """

    name: str
    bits: float  # 0: as the tensor is
    memory_passes: float
    relative_error: float

    def ratio(self, element_bytes: float) -> float:
        """Bytes on the wire over bytes in memory."""
        return min(1.0, self.bits / (8 * element_bytes)) if self.bits else 1.0


# Block-wise integers carry one fp32 scale for 256 elements; errors are those of rounding a normal distribution whose largest magnitude in
# 256 (3.05 standard deviations in root mean square) maps to the largest integer: step / sqrt(12).
# Passes were measured on a CPU by benchmarks/codecs.py, a plain copy being two.
CODECS = {
    "none": CodecSpec(name="none", bits=0, memory_passes=0, relative_error=0.0),
    "bf16": CodecSpec(name="bf16", bits=16, memory_passes=6, relative_error=0.0017),
    "fp16": CodecSpec(name="fp16", bits=16, memory_passes=6, relative_error=0.0002),
    "int8": CodecSpec(name="int8", bits=8.125, memory_passes=7, relative_error=0.0069),
    "int4": CodecSpec(name="int4", bits=4.125, memory_passes=11, relative_error=0.126),
    "2-bit": CodecSpec(name="2-bit", bits=2.125, memory_passes=30, relative_error=0.341),
}


def sparse_two_bit_spec(kept: int) -> CodecSpec:
    """The statement of `top-k-2-bit:KEPT`: of every 4,096 values so many are sent, as the mean of those above or below their mean.

    For normally distributed values: the share of their energy that these means have is what arrives.
    """
    normal, share = NormalDist(), kept / 4096
    threshold = normal.inv_cdf(1 - share / 2)
    split = 2 * normal.pdf(threshold) / share  # the mean of what is sent
    high = 1 - normal.cdf(split)
    low = share / 2 - high
    arrived = 2 * ((normal.pdf(threshold) - normal.pdf(split)) ** 2 / low + normal.pdf(split) ** 2 / high)
    return CodecSpec(
        name=f"top-k-2-bit:{kept}", bits=14 * share + 32 / 4096, memory_passes=62 + 300 * share, relative_error=math.sqrt(1 - arrived)
    )


def codec_spec(name: str) -> CodecSpec:
    """The statement of a codec; `"none"` for links no codec was chosen for."""
    return CODECS[name]
