"""Chunks: what members of a reduction say to each other, and the arithmetic of sums, in fp32, in a fixed order, in whatever thread."""

import hashlib
import threading
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import torch

from atoll.codec.base import Codec, Encoded, Header
from atoll.codec.registry import decode

__all__ = ["CellProgress", "EncodedChunk", "Failed", "Item", "PullChunks", "Scratch", "Summand", "make_chunk", "open_chunk", "weighted_sum"]


class PullChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for chunks of a cell of a round, from `first` on, up to but not including `until` (None: to the end)."""

    round: str
    cell: int
    first: int = 0
    until: int | None = None


class EncodedChunk(msgspec.Struct, frozen=True, tag="chunk", forbid_unknown_fields=True):
    """A sum over some elements, encoded; the places of those members in it."""

    index: int
    contributors: tuple[int, ...]
    header: Header
    parts: tuple[torch.Tensor, ...]

    def encoded(self) -> Encoded:
        """As codecs know it."""
        return Encoded(self.header, self.parts)


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """A cell cannot be reduced, and because of whom."""

    blamed: tuple[str, ...]
    reason: str


Item: TypeAlias = EncodedChunk | Failed


class CellProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many chunks of a reduced cell a member holds, and whether more may come to it without help."""

    held: int
    final: bool


class Summand(msgspec.Struct, frozen=True):
    """Something to add: values or an encoding of them, times a weight."""

    value: torch.Tensor | Encoded
    weight: float = 1.0


class Scratch(threading.local):
    """Memory that sums of one thread are made in, again and again: new pages for every chunk would cost as much as the sums."""

    def __init__(self) -> None:
        self._total = torch.empty(0)
        self._decoded = torch.empty(0)

    def total(self, elements: int) -> torch.Tensor:
        """Room for a sum that is encoded before the next one is made."""
        if self._total.numel() < elements:
            self._total = torch.empty(elements)
        return self._total[:elements]

    def decoded(self, encoded: Encoded) -> torch.Tensor:
        """The values of an encoding, until the next one is decoded. What travelled as it is, is there already."""
        header = encoded.header
        if header.codec == "none":
            return encoded.parts[0].view(header.shape)
        if self._decoded.numel() < header.elements:
            self._decoded = torch.empty(header.elements)
        return decode(encoded, self._decoded[: header.elements].view(header.shape))


def weighted_sum(terms: Sequence[Summand], divisor: float, scratch: Scratch) -> torch.Tensor:
    """The sum in the order given, divided, in fp32; valid until the same thread's next sum."""
    total: torch.Tensor | None = None
    for term in terms:
        value = scratch.decoded(term.value) if isinstance(term.value, Encoded) else term.value
        if total is None:
            total = scratch.total(value.numel()).copy_(value)
            total = total if term.weight == 1.0 else total.mul_(term.weight)
        else:
            total.add_(value, alpha=term.weight)
    assert total is not None
    return total if divisor == 1.0 else total.div_(divisor)


def make_chunk(index: int, contributors: tuple[int, ...], codec: Codec, value: torch.Tensor) -> EncodedChunk:
    """A sum as it travels: a copy, also where nothing is encoded, as what is on its way must not change."""
    encoded = codec.encode(value)
    shared = encoded.header.codec == "none"
    return EncodedChunk(index, contributors, encoded.header, tuple(part.clone() if shared else part for part in encoded.parts))


def open_chunk(chunk: EncodedChunk, out: torch.Tensor) -> str:
    """Decodes a chunk into its place; CodecError if it is not that shape and type.

    Returns a digest of the bytes that travelled and of whose contributions they are: equal digests decode to equal values.
    """
    decode(chunk.encoded(), out)
    found = hashlib.sha256(msgspec.msgpack.encode((chunk.index, chunk.contributors, chunk.header)))
    for buffer in chunk.encoded().buffers():
        found.update(buffer)
    return found.hexdigest()
