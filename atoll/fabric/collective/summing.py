"""The arithmetic of a reduction: weighted sums in fp32, in a fixed order. Pure; runs in whatever thread calls it."""

import hashlib
from collections.abc import Sequence

import msgspec
import torch

from atoll.codec import Codec, Encoded, decode
from atoll.errors import CodecError
from atoll.fabric.collective.messages import Chunk

__all__ = ["ACCUMULATED", "Term", "chunk_digest", "make_chunk", "open_chunk", "weighted_sum"]

ACCUMULATED = (torch.float32, torch.bfloat16, torch.float16)
"""What is summed, in fp32. Anything else travels only where there is nothing to sum."""


class Term(msgspec.Struct, frozen=True):
    """Something to add: values or an encoding of them, times a weight."""

    value: torch.Tensor | Encoded
    weight: float = 1.0


def weighted_sum(terms: Sequence[Term], divisor: float = 1.0) -> torch.Tensor:
    """The sum in the order given, divided. One term of weight 1 is itself, whatever its type, not a copy."""
    assert terms
    if len(terms) == 1 and terms[0].weight == 1.0 and divisor == 1.0:
        only = terms[0].value
        return decode(only) if isinstance(only, Encoded) else only
    total: torch.Tensor | None = None
    for term in terms:
        value = decode(term.value) if isinstance(term.value, Encoded) else term.value
        if value.dtype not in ACCUMULATED:
            raise CodecError(f"values of {value.dtype} cannot be summed; send float32, bfloat16 or float16")
        if total is not None:
            total.add_(value, alpha=term.weight)
        elif value.dtype == torch.float32 and isinstance(term.value, Encoded):  # ours alone: no copy
            total = value if term.weight == 1.0 else value.mul_(term.weight)
        else:
            total = torch.mul(value.to(torch.float32), term.weight)
    assert total is not None
    return total if divisor == 1.0 else total.div_(divisor)


def make_chunk(index: int, contributors: tuple[int, ...], codec: Codec, value: torch.Tensor) -> Chunk:
    """A sum as it travels."""
    encoded = codec.encode(value)
    return Chunk(index, contributors, encoded.header, encoded.parts)


def open_chunk(chunk: Chunk, out: torch.Tensor) -> str:
    """Decodes a chunk into its place and returns its digest; CodecError if it is not that shape and type."""
    decode(chunk.encoded(), out)
    return chunk_digest(chunk)


def chunk_digest(chunk: Chunk) -> str:
    """Of the bytes that travelled and of whose contributions they are: equal digests decode to equal values."""
    found = hashlib.sha256(msgspec.msgpack.encode((chunk.index, chunk.contributors, chunk.header)))
    for buffer in chunk.encoded().buffers():
        found.update(buffer)
    return found.hexdigest()
