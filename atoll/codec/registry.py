"""The codecs by their names: from a text to a codec, from a header and bytes back to the tensor, and the error that was made."""

import math
from collections.abc import Callable, Mapping

import torch

from atoll.codec.base import Codec, Encoded, EncodedPart, Header, NoCodec, dtype_of, one_thread
from atoll.codec.blocks import BLOCK, Bf16, BlockCodec, Fp16, Int4, Int8
from atoll.codec.top_k import TopK
from atoll.codec.top_logits import TopLogits
from atoll.codec.two_bit import SparseTwoBit, TwoBit
from atoll.errors import CodecError

__all__ = ["FixedSizeCodec", "decode", "encoded_from", "make_codec", "parts_of", "relative_error"]

_FORMATS: Mapping[str, type[Codec]] = {
    codec.name: codec for codec in (NoCodec, Bf16, Fp16, Int8, Int4, TwoBit, TopK, SparseTwoBit, TopLogits)
}


def make_codec(text: str) -> Codec:
    """The codec a text names: `none`, `bf16`, `fp16`, `int8`, `int4`, `2-bit`, `top-k:0.01` (the share kept), `top-k-2-bit:64` (of every
    4,096) or `top-logits:16` (of every row)."""
    name, colon, strength = text.partition(":")
    if colon and name in _WITH_STRENGTH:
        return _WITH_STRENGTH[name](strength)
    if colon or name not in _FORMATS or name in _WITH_STRENGTH:
        known = "none, bf16, fp16, int8, int4, 2-bit, top-k:0.01, top-k-2-bit:64 or top-logits:16"
        raise CodecError(f"there is no codec {text!r}; write {known}")
    return _FORMATS[name]()


def _make_top_k(strength: str) -> Codec:
    try:
        share = float(strength)
    except ValueError:
        raise CodecError(f"codec 'top-k:{strength}': {strength!r} is not a number; write top-k:0.01") from None
    return TopK(share)


def _make_sparse_two_bit(strength: str) -> Codec:
    return SparseTwoBit(_whole("top-k-2-bit", strength, "64"))


def _make_top_logits(strength: str) -> Codec:
    return TopLogits(_whole("top-logits", strength, "16"))


def _whole(name: str, strength: str, example: str) -> int:
    if not (strength.isascii() and strength.isdecimal()):
        raise CodecError(f"codec '{name}:{strength}': {strength!r} is not a whole number; write {name}:{example}")
    return int(strength)


_WITH_STRENGTH: Mapping[str, Callable[[str], Codec]] = {
    "top-k": _make_top_k,
    "top-k-2-bit": _make_sparse_two_bit,
    "top-logits": _make_top_logits,
}


def parts_of(header: Header) -> tuple[EncodedPart, ...]:
    """What follows a header: check the sum of their bytes against a limit before making room for them."""
    if header.codec not in _FORMATS:
        raise CodecError(f"a header names the codec {header.codec!r}; known are {', '.join(_FORMATS)}")
    dtype_of(header)
    return _FORMATS[header.codec].parts(header)


def encoded_from(header: Header, body: torch.Tensor) -> Encoded:
    """Parts as views of one flat tensor of bytes that holds them one after the other, its memory aligned to 8 bytes."""
    layout = parts_of(header)
    if body.dtype != torch.uint8 or body.dim() != 1 or body.numel() != sum(part.nbytes for part in layout):
        raise CodecError(f"{body.numel()} values of {body.dtype} follow a header that announces {sum(p.nbytes for p in layout)} bytes")
    if body.data_ptr() % 8 or not body.is_contiguous():
        body = body.clone(memory_format=torch.contiguous_format)
    pieces = torch.split(body, [part.nbytes for part in layout])
    return Encoded(header, [piece.view(part.dtype) for piece, part in zip(pieces, layout, strict=True)])


def decode(encoded: Encoded, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that was encoded, exactly or nearly; written into `out` (same shape and type, any strides and device) if given.

    Raises CodecError, and leaves `out` in an unspecified but valid state, where header and parts are not what an encoder writes.
    """
    header = encoded.header
    layout, dtype = parts_of(header), dtype_of(header)
    _check_parts(encoded, layout)
    if out is None:
        out = torch.empty(header.shape, dtype=dtype)
    elif tuple(out.shape) != header.shape or out.dtype != dtype:
        raise CodecError(f"a tensor {list(header.shape)} of {dtype} cannot be decoded into one {list(out.shape)} of {out.dtype}")
    with torch.no_grad(), one_thread():
        straight = out.is_contiguous()
        flat = out.detach().view(-1) if straight else torch.empty(header.elements, dtype=dtype, device=out.device)
        parts = {part.name: tensor.to(flat.device) for part, tensor in zip(layout, encoded.parts, strict=True)}
        if header.elements:
            _FORMATS[header.codec].decode_flat(header, parts, flat)
        if not straight:
            out.copy_(flat.view(header.shape))
    return out


def _check_parts(encoded: Encoded, layout: tuple[EncodedPart, ...]) -> None:
    found = [(part.dtype, part.numel()) for part in encoded.parts]
    if found != [(part.dtype, part.elements) for part in layout]:
        raise CodecError(f"{encoded.header.codec}: the parts that arrived are not those of the header: {found}")


_CHUNK = 2**16


def relative_error(original: torch.Tensor, decoded: torch.Tensor) -> float:
    """Root mean square of the difference over that of the original, over finite elements; 0 where nothing differs."""
    if original.shape != decoded.shape:
        raise CodecError(f"a tensor {list(original.shape)} cannot be compared with one {list(decoded.shape)}")
    lost = whole = 0.0
    flat = (tensor.detach().reshape(-1) for tensor in (original, decoded))
    for before, after in zip(*(torch.split(tensor, _CHUNK) for tensor in flat), strict=True):
        exact = before.to(torch.float64)
        finite = exact.isfinite()
        whole += float(exact[finite].square().sum())
        lost += float((exact - after.to(torch.float64))[finite].square().sum())
    return math.sqrt(lost / whole) if whole else (0.0 if not lost else math.inf)


class FixedSizeCodec:
    """A block-wise codec (`bf16`, `fp16`, `int8` or `int4`) for messages whose length follows from the tensor's shape: both ends know it
    beforehand, so a receive can be posted before anything is sent.

    A block-wise codec sends blocks it cannot encode beside the others, which makes its messages longer by what the values are. Here they
    stay in their place: integers write a block with NaN, Inf or values beyond 2¹²⁶ as NaN all over (whoever computes with it notices, as
    with the values themselves) and one whose largest magnitude is below 2⁻¹⁰⁰ as zeros; halves write every value as their own type does.
    """

    def __init__(self, name: str) -> None:
        codec = make_codec(name)
        if not isinstance(codec, BlockCodec):
            raise CodecError(f"codec {name!r}: its messages have no length that is known beforehand; take bf16, fp16, int8 or int4")
        self.name = name
        self._codec = codec

    def message_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """How long the message of such a tensor is; None where it travels as it is, because the codec would not make it smaller."""
        header = self._codec.header_of(shape, dtype)
        return None if header is None else sum(part.nbytes for part in parts_of(header))

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """The message: a flat tensor of bytes on the CPU. Only for tensors that have one (`message_bytes`)."""
        encoded = self._codec.encode(tensor)
        parts = {part.name: piece for part, piece in zip(parts_of(encoded.header), encoded.parts, strict=True)}
        index, values = parts.pop("exact_index"), parts.pop("exact_values").view(-1, BLOCK)
        if index.numel():
            self._keep_in_place(parts, index, values)
        return torch.cat([piece.view(torch.uint8) for piece in parts.values()])

    def _keep_in_place(self, parts: dict[str, torch.Tensor], index: torch.Tensor, values: torch.Tensor) -> None:
        """Write the blocks that the codec would send beside the others."""
        if self._codec.scaled:  # their codes and scales are zeros
            vanishing = values.abs().amax(1).to(torch.float64) < self._codec.smallest  # not so where it is NaN
            parts["scales"].view(-1, self._codec.scales_per_block)[index[~vanishing]] = math.nan
        else:
            parts["codes"].view(-1, BLOCK)[index] = values.to(self._codec.code_dtype)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write the tensor that a message of its shape and type holds into `out`."""
        header = Header(codec=self.name, dtype=str(out.dtype).removeprefix("torch."), shape=tuple(out.shape))
        decode(encoded_from(header, message.cpu()), out)
