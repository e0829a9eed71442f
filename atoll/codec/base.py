"""Codec: the interface all codecs share, and the one that leaves tensors as they are."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

from atoll.codec.chunks import one_thread
from atoll.codec.codec import CODECS, CodecSpec
from atoll.codec.encoded import DTYPES, Encoded, Header, Part, dtype_of
from atoll.codec.feedback import ErrorFeedback
from atoll.errors import CodecError

__all__ = ["Codec", "Given", "NoCodec", "Parts"]

Parts = Mapping[str, torch.Tensor]

_NARROWED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The element types codecs change; integers, booleans, complex numbers and fp8 always travel as they are."""


class Given(NamedTuple):
    """What an encoder works on: a contiguous tensor, the caller's feedback if any, and memory that may be written again."""

    tensor: torch.Tensor
    feedback: ErrorFeedback | None
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
    local: ClassVar[bool] = True  # a part of a tensor is encoded much like the whole

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
                return self._encode_one(tensor.contiguous(), feedback, reuse)
            total = feedback.total(tensor)
            encoded = self._encode_one(_as_dtype(total, tensor.dtype).contiguous(), feedback, reuse)
            feedback.keep(total, self.decode(encoded).to(total.device))
            return encoded

    def decode(self, encoded: Encoded, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor, in `out` if given: `atoll.codec.decode`. Decodes what any codec made."""
        from atoll.codec.decoding import decode  # it knows all codecs, which are made of this class

        return decode(encoded, out)

    def ratio(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        """Bytes on the wire over bytes in memory for an ordinary (finite) tensor of this shape."""
        header = self._header(tuple(shape), dtype)
        nbytes = sum(part.nbytes for part in self.parts(header)) if header else 0
        return nbytes / header.decoded_bytes if header else 1.0

    def _header(self, shape: tuple[int, ...], dtype: torch.dtype) -> Header | None:
        """The header an ordinary tensor gets; None where it would travel as it is."""
        if dtype not in _NARROWED or 0 in shape:
            return None
        header = self._ordinary_header(shape, str(dtype).removeprefix("torch."))
        return header if header and sum(part.nbytes for part in self.parts(header)) < header.decoded_bytes else None

    def _encode_one(self, tensor: torch.Tensor, feedback: ErrorFeedback | None, reuse: Encoded | None) -> Encoded:
        header = self._header(tuple(tensor.shape), tensor.dtype)
        if header is None:
            return _encode_exactly(tensor)
        header, found = self._encode(header, Given(tensor, feedback, reuse.parts if reuse else ()))
        return Encoded(header, [found[part.name].reshape(-1).cpu() for part in self.parts(header)])

    @abstractmethod
    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header | None:
        """The header a finite tensor gets, or None if this codec has nothing to say about such tensors."""

    @abstractmethod
    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        """The final header and its parts by name, for a contiguous tensor this codec makes smaller."""

    @classmethod
    @abstractmethod
    def parts(cls, header: Header) -> tuple[Part, ...]:
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
    def parts(cls, header: Header) -> tuple[Part, ...]:
        return (Part("values", dtype_of(header), header.elements),)

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
