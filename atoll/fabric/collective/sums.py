"""The arithmetic of a reduction: weighted sums in fp32, in a fixed order, in whatever thread calls it; and the cells of the result."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence

import msgspec
import torch

from atoll.codec.base import Codec
from atoll.codec.encoded import Encoded
from atoll.codec.registry import decode
from atoll.errors import CodecError
from atoll.fabric.collective.messages import CellProgress, EncodedChunk, Failed
from atoll.fabric.collective.plan import Cell, RoundPlan
from atoll.fabric.collective.result import PartOutcome

__all__ = ["ACCUMULATED", "ReducedCell", "Scratch", "Summand", "chunk_digest", "make_chunk", "open_chunk", "weighted_sum"]

ACCUMULATED = (torch.float32, torch.bfloat16, torch.float16)
"""What is summed, in fp32. Anything else travels only where there is nothing to sum."""


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
        if header.dtype != "float32":
            return decode(encoded)
        if self._decoded.numel() < header.elements:
            self._decoded = torch.empty(header.elements)
        return decode(encoded, self._decoded[: header.elements].view(header.shape))


def weighted_sum(terms: Sequence[Summand], divisor: float = 1.0, scratch: Scratch | None = None) -> torch.Tensor:
    """The sum in the order given, divided, in fp32. One term of weight 1 is itself, whatever its type, not a copy.

    With `scratch` the result is valid until the same thread's next sum.
    """
    assert terms
    memory = scratch or Scratch()
    if len(terms) == 1 and terms[0].weight == 1.0 and divisor == 1.0:
        only = terms[0].value
        return memory.decoded(only) if isinstance(only, Encoded) else only
    total: torch.Tensor | None = None
    for term in terms:
        value = memory.decoded(term.value) if isinstance(term.value, Encoded) else term.value
        if value.dtype not in ACCUMULATED:
            raise CodecError(f"values of {value.dtype} cannot be summed; send float32, bfloat16 or float16")
        if total is None:
            total = memory.total(value.numel()).copy_(value)
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
    """Decodes a chunk into its place and returns its digest; CodecError if it is not that shape and type."""
    decode(chunk.encoded(), out)
    return chunk_digest(chunk)


def chunk_digest(chunk: EncodedChunk) -> str:
    """Of the bytes that travelled and of whose contributions they are: equal digests decode to equal values."""
    found = hashlib.sha256(msgspec.msgpack.encode((chunk.index, chunk.contributors, chunk.header)))
    for buffer in chunk.encoded().buffers():
        found.update(buffer)
    return found.hexdigest()


class ReducedCell:
    """Chunks are added in order and never change: whoever holds one holds the same bytes."""

    def __init__(self, plan: RoundPlan, cell: Cell) -> None:
        self.cell = cell
        self.spans = plan.chunks(cell)
        self.failure: Failed | None = None
        self.salvaging = False  # its source is lost: more comes only from members that have it
        self._names = [member.name for member in plan.members]
        self._chunks: list[EncodedChunk] = []
        self._digests: list[str] = []
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """How many chunks are here."""
        return len(self._chunks)

    @property
    def complete(self) -> bool:
        """Whether all are."""
        return self.held == len(self.spans)

    @property
    def over(self) -> bool:
        """Whether nothing changes any more."""
        return self.complete or self.failure is not None

    @property
    def progress(self) -> CellProgress:
        """What others may know."""
        return CellProgress(self.held, self.over or self.salvaging)

    def add(self, chunk: EncodedChunk, digest: str) -> None:
        """The next chunk."""
        assert chunk.index == self.held
        assert not self.over
        self._chunks.append(chunk)
        self._digests.append(digest)
        self._tell()

    def fail(self, failure: Failed) -> None:
        """No more will come."""
        if not self.over:
            self.failure = failure
            self._tell()

    async def wait(self, index: int) -> EncodedChunk | Failed:
        """A chunk when it is here, or why it never will be."""
        while self.held <= index:
            if self.failure is not None:
                return self.failure
            changed = self._changed
            await changed.wait()
        return self._chunks[index]

    def outcomes(self) -> list[PartOutcome]:
        """Runs of chunks with the same contributions in them, and what is missing."""
        found: list[PartOutcome] = []
        for (start, stop), chunk, digest in zip(self.spans, self._chunks, self._digests, strict=False):
            names = tuple(self._names[place] for place in chunk.contributors)
            found.append(PartOutcome(start=start, stop=stop, owner=self.cell.owner, contributors=names, digest=digest))
        if self.held < len(self.spans):
            failure = self.failure or Failed((self.cell.owner,), "the round ended first")
            start = self.spans[self.held][0]
            part = PartOutcome(
                start=start, stop=self.cell.stop, owner=self.cell.owner, contributors=(), blamed=failure.blamed, reason=failure.reason
            )
            found.append(part)
        return found

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
