"""Codec: the interface all codecs share, what they make of a tensor, and feedback of what they left out.

A tensor travels as a small typed header and a few flat tensors whose bytes follow it. The header alone tells how many bytes follow and of
what kind, so that a receiver checks its limits before it allocates, and receives straight into the parts. Bytes are little-endian, as on
every processor PyTorch runs on.

Error feedback: what an encoding left out is added to the next tensor, so that over time everything arrives. Sums of gradients then converge
to the sums of what was computed, however coarse the codec (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al.,
"Error feedback fixes SignSGD", 2019).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import msgspec
import torch

from atoll.codec import CODECS, CodecSpec
from atoll.errors import CodecError

__all__ = [
    "DTYPES",
    "Codec",
    "Encoded",
    "EncodedPart",
    "ErrorFeedback",
    "Given",
    "Header",
    "NoCodec",
    "Parts",
    "Role",
    "dtype_of",
    "one_thread",
]

Role: TypeAlias = Literal["activation", "gradient", "parameter"]
"""What a tensor is for: gradients may be sent late (error feedback), activations and parameters are lost where they are not sent."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.complex128, torch.complex64, torch.complex32, torch.bool,
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


def dtype_of(header: Header) -> torch.dtype:
    """The element type of the tensor a header is about, after the header's own numbers were checked."""
    if header.dtype not in DTYPES:
        raise CodecError(f"a header names the element type {header.dtype!r}; known are {', '.join(DTYPES)}")
    if any(size < 0 for size in header.shape):
        raise CodecError(f"a header has the shape {list(header.shape)}: sizes must not be negative")
    if header.elements >= 2**62:
        raise CodecError(f"a header has the shape {list(header.shape)}: more values than any memory holds")
    return DTYPES[header.dtype]


class ErrorFeedback:
    """What one tensor still owes one peer. The sender holds one for each (peer, tensor) and gives it to every `encode` of them.

    An encode that raises leaves it as it was. NaN and Inf are never owed: where they were sent they arrived, and that debt is forgotten.
    """

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None  # in fp32, or fp64 for fp64 tensors
        self.relative_error = 0.0  # of the last encoding: root mean square of what stayed here over that of what was to be sent

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with what was left out before, in the residual's precision: a new tensor."""
        work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if self.residual is None:
            return tensor.to(work, copy=True)
        if self.residual.shape != tensor.shape or self.residual.dtype != work:
            raise CodecError(
                f"error feedback of a tensor {list(self.residual.shape)} was given one {list(tensor.shape)} of {tensor.dtype}; "
                "keep one ErrorFeedback for each peer and tensor"
            )
        return self.residual + tensor

    def keep(self, total: torch.Tensor, arrived: torch.Tensor) -> None:
        """What of the total did not arrive is owed from now on. Takes `arrived` over, never `total`: an encoding may share its memory."""
        out = arrived if arrived.dtype == total.dtype else None
        self.residual = torch.sub(total, arrived, out=out).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        norm = torch.linalg.vector_norm(total)
        self.relative_error = float(torch.linalg.vector_norm(self.residual) / norm) if norm else 0.0


Parts = Mapping[str, torch.Tensor]

_NARROWED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The element types codecs change; integers, booleans, complex numbers and fp8 always travel as they are."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, PyTorch's operators do not divide their work in this thread; afterwards they do as before.

    Dividing operators of a few microseconds makes threads wait for each other thousands of times a tensor: on two busy cores it was 25
    times slower. Whoever has cores to spare encodes several tensors, or parts of one, in threads of their own: operators let them run.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)  # of the calling thread; others keep theirs
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Given(NamedTuple):
    """What an encoder works on: a contiguous tensor, and memory that may be written again."""

    tensor: torch.Tensor
    spare: tuple[torch.Tensor, ...]

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to write a large part into."""
        for tensor in self.spare:
            if tensor.dtype == dtype and tensor.numel() == math.prod(shape) and tensor.device == self.tensor.device:
                return tensor.view(shape)
        return self.tensor.new_empty(shape, dtype=dtype)


class Codec(ABC):
    """One way to write a tensor on a link. Codecs hold settings and no state: any thread may use one, for any tensor.

    Where a codec would not make a tensor smaller (integers, few elements, already narrow types) it sends it exactly, as `none`.
    """

    name: ClassVar[str]  # the wire format's

    def __repr__(self) -> str:
        return f"<codec {self.text}>"

    @property
    def text(self) -> str:
        """How plans, options and events write this codec; `make_codec` reads it."""
        return self.name

    @property
    def spec(self) -> CodecSpec:
        """What the codec states to the cost model."""
        return CODECS[self.name]

    def encode(self, tensor: torch.Tensor, *, feedback: ErrorFeedback | None = None, reuse: Encoded | None = None) -> Encoded:
        """The tensor as it travels. With `feedback`, what earlier encodings left out goes with it, and what this one leaves out is kept.

        Any shape, strides and element type. The same values give the same bytes on every machine. `reuse` is an encoding nobody needs any
        more: its memory is written again where it fits, which spares large tensors the cost of new pages.
        """
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise CodecError(f"tensors of {tensor.dtype} cannot travel; known are {', '.join(DTYPES)}")
        with torch.no_grad(), one_thread():
            tensor = tensor.detach()
            if feedback is None or tensor.dtype not in _NARROWED:
                return self._encode_one(tensor.contiguous(), reuse)
            total = feedback.total(tensor)
            encoded = self._encode_one(_as_dtype(total, tensor.dtype).contiguous(), reuse)
            feedback.keep(total, self.decode(encoded).to(total.device))
            return encoded

    def decode(self, encoded: Encoded, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor, in `out` if given: `atoll.codec.decode`. Decodes what any codec made."""
        from atoll.codec.registry import decode  # it knows all codecs, which are made of this class

        return decode(encoded, out)

    def header_of(self, shape: tuple[int, ...], dtype: torch.dtype) -> Header | None:
        """The header an ordinary tensor gets; None where it would travel as it is."""
        if dtype not in _NARROWED or 0 in shape:
            return None
        header = self._ordinary_header(shape, str(dtype).removeprefix("torch."))
        return header if header and sum(part.nbytes for part in self.parts(header)) < header.decoded_bytes else None

    def _encode_one(self, tensor: torch.Tensor, reuse: Encoded | None) -> Encoded:
        header = self.header_of(tuple(tensor.shape), tensor.dtype)
        if header is None:
            return _encode_exactly(tensor)
        header, found = self._encode(header, Given(tensor, reuse.parts if reuse else ()))
        return Encoded(header, [found[part.name].reshape(-1).cpu() for part in self.parts(header)])

    @abstractmethod
    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header | None:
        """The header a finite tensor gets, or None if this codec has nothing to say about such tensors."""

    @abstractmethod
    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        """The final header and its parts by name, for a contiguous tensor this codec makes smaller."""

    @classmethod
    @abstractmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        """What follows a header, widest elements first. Raises CodecError for a header no encoder writes."""

    @classmethod
    @abstractmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        """Write the tensor into `flat`, contiguous and of the header's type and size. Parts have their type and size."""


class NoCodec(Codec):
    """`none`: the tensor's own bytes."""

    name = "none"

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> None:
        return None

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        raise AssertionError("tensors without a header travel as they are")

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        return (EncodedPart("values", dtype_of(header), header.elements),)

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        flat.copy_(parts["values"])


def _encode_exactly(tensor: torch.Tensor) -> Encoded:
    header = Header(codec="none", dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).cpu()
    return Encoded(header, [flat.as_strided(flat.shape, (1,))])  # a single element may have any stride and still be contiguous


def _as_dtype(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Narrow a sum; what lies beyond the narrow type's range is cut there (and the rest owed), but Inf stays Inf."""
    if total.dtype == dtype:
        return total
    limit = torch.finfo(dtype).max
    return torch.where(total.isfinite(), total.clamp(-limit, limit), total).to(dtype)
