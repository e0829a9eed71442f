"""Encoded: a tensor as it travels, a small typed header and a few flat tensors whose bytes follow it.

The header alone tells how many bytes follow and of what kind, so that a receiver checks its limits before it allocates, and receives
straight into the parts. Bytes are little-endian, as on every processor PyTorch runs on.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import torch

from atoll.errors import CodecError

__all__ = ["DTYPES", "Encoded", "EncodedPart", "Header", "Role", "dtype_of"]

Role: TypeAlias = Literal["activation", "gradient", "parameter"]
"""What a tensor is for: gradients may be sent late (error feedback), activations and parameters are lost where they are not sent."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex128, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    )
}  # fmt: skip
"""The element types that travel, by their name in headers."""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What was encoded, and how: enough to know the size and type of every part."""

    codec: str  # the wire format, such as "int8"; "none" where the codec asked for would not have helped
    dtype: str
    shape: tuple[int, ...]
    exact_blocks: int = 0  # blocks a block-wise codec sends as they are
    kept: int = 0  # values top-k sends
    rank: int = 0  # columns low-rank sends of either factor
    scale: float = 0.0  # of low-rank's product of integers

    @property
    def elements(self) -> int:
        """How many values the tensor has."""
        return math.prod(self.shape)

    @property
    def decoded_bytes(self) -> int:
        """What the tensor takes in memory: check it against a limit before decoding into a new tensor."""
        return self.elements * dtype_of(self).itemsize


class EncodedPart(msgspec.Struct, frozen=True):
    """One of the flat tensors that follow a header: what it holds, its element type and number of elements."""

    name: str
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        """Its bytes on the wire."""
        return self.elements * self.dtype.itemsize


class Encoded:
    """A header and its parts: contiguous one-dimensional CPU tensors, those with the widest elements first.

    Parts may share memory with the tensor that was encoded (codec `none`): send them before it changes.
    """

    def __init__(self, header: Header, parts: Sequence[torch.Tensor]) -> None:
        self.header = header
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"Encoded({self.header}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together; the header adds a few dozen."""
        return sum(part.nbytes for part in self.parts)

    @property
    def ratio(self) -> float:
        """Bytes on the wire over bytes in memory."""
        return self.nbytes / self.header.decoded_bytes if self.header.decoded_bytes else 1.0

    def buffers(self) -> list[memoryview]:
        """The bytes of every part without a copy: for a socket to send from, or to receive into."""
        return [part.view(torch.uint8).numpy().data for part in self.parts]

    def body(self) -> bytes:
        """All parts one after the other: a copy, for tests and small tensors."""
        return b"".join(bytes(buffer) for buffer in self.buffers())


def dtype_of(header: Header) -> torch.dtype:
    """The element type of the tensor a header is about, after the header's own numbers were checked."""
    if header.dtype not in DTYPES:
        raise CodecError(f"a header names the element type {header.dtype!r}; known are {', '.join(DTYPES)}")
    if any(size < 0 for size in header.shape):
        raise CodecError(f"a header has the shape {list(header.shape)}: sizes must not be negative")
    if header.elements >= 2**62:
        raise CodecError(f"a header has the shape {list(header.shape)}: more values than any memory holds")
    return DTYPES[header.dtype]
