"""Messages whose length follows from the tensor's shape: both ends know it beforehand, so a receive can be posted before anything is sent.

A block-wise codec sends blocks it cannot encode beside the others, which makes its messages longer by what the values are. Here they stay
in their place: integers write a block with NaN, Inf or values beyond 2¹²⁶ as NaN all over (whoever computes with it notices, as with the
values themselves) and one whose largest magnitude is below 2⁻¹⁰⁰ as zeros; halves write every value as their own type does.
"""

import math

import torch

from atoll.codec.blocks import BLOCK, BlockCodec
from atoll.codec.encoded import Header
from atoll.codec.registry import decode, encoded_from, make_codec, parts_of
from atoll.errors import CodecError

__all__ = ["FixedSizeCodec"]


class FixedSizeCodec:
    """A block-wise codec for messages of known length: `bf16`, `fp16`, `int8` or `int4`."""

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
            parts["scales"][index[~vanishing]] = math.nan
        else:
            parts["codes"].view(-1, BLOCK)[index] = values.to(self._codec.code_dtype)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write the tensor that a message of its shape and type holds into `out`."""
        header = Header(codec=self.name, dtype=str(out.dtype).removeprefix("torch."), shape=tuple(out.shape))
        decode(encoded_from(header, message.cpu()), out)
