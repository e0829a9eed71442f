"""What a round gives one member, chunk by chunk and in the end, and error feedback from one round to the next.

What a member's encodings left out of one sum goes into the next, so that sums of sums become exact. A member encodes every value once a
round: as its contribution, or as the result where it is the owner. What that leaves out is owed by the member, whatever it was and whoever
owns the value next time: all of it belongs to the same sum. So one row of values is enough, and at any time: the results so far + what
members owe = the sums so far (of weighted contributions; results of means count times their divisors).
"""

import asyncio
import hashlib
from collections.abc import Callable

import msgspec
import torch

from atoll.codec.registry import decode
from atoll.errors import CollectiveError, FabricError
from atoll.fabric.collective.chunk import CellProgress, EncodedChunk, Failed
from atoll.fabric.collective.plan import Cell, RoundPlan

__all__ = ["PartOutcome", "ReducedCell", "ReductionResult", "SumFeedback"]


class PartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Elements `start` to `stop` of the result: whose contributions are in them. None are: the part is missing, and why."""

    start: int
    stop: int
    owner: str
    contributors: tuple[str, ...]
    blamed: tuple[str, ...] = ()
    reason: str = ""
    digest: str = ""  # of the bytes everybody decoded


class ReductionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result at one member. Where a part is missing, `value` there is zero and must not be used.

    Members whose digests are equal hold bit-identical values with the same contributions in them. `digest` is None when parts are missing.
    """

    round: str
    value: torch.Tensor
    parts: tuple[PartOutcome, ...]
    expected: tuple[str, ...]  # whose contributions should be in it

    @property
    def missing(self) -> tuple[PartOutcome, ...]:
        """Parts nobody could give."""
        return tuple(part for part in self.parts if not part.contributors)

    @property
    def complete(self) -> bool:
        """Whether every contribution is in every part."""
        return all(set(part.contributors) == set(self.expected) for part in self.parts)

    @property
    def blamed(self) -> tuple[str, ...]:
        """Who was lost, or did not deliver, so that something is missing."""
        left_out = {name for part in self.parts for name in self.expected if part.contributors and name not in part.contributors}
        return tuple(sorted(left_out | {name for part in self.parts for name in part.blamed}))

    @property
    def digest(self) -> str | None:
        """Equal for members that hold the same values; None where some are missing."""
        if self.missing:
            return None
        found = hashlib.sha256(self.round.encode())
        for part in self.parts:
            found.update(msgspec.msgpack.encode((part.start, part.stop, part.contributors, part.digest)))
        return found.hexdigest()

    def require_complete(self) -> torch.Tensor:
        """The value, if every contribution is in every part; CollectiveError naming who is missing otherwise."""
        if self.complete:
            return self.value
        texts = [f"elements {part.start}–{part.stop}: {_shortage(part, self.expected)}" for part in self.parts]
        short = [text for text, part in zip(texts, self.parts, strict=True) if set(part.contributors) != set(self.expected)]
        more = f"; and {len(short) - 3} parts more" if len(short) > 3 else ""
        raise CollectiveError(f"round {self.round} is not complete: {'; '.join(short[:3])}{more}", self.blamed)


def _shortage(part: PartOutcome, expected: tuple[str, ...]) -> str:
    if not part.contributors:
        return f"missing, {part.reason}"
    return f"without {', '.join(name for name in expected if name not in part.contributors)}"


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


class SumFeedback:
    """What one member owes to one row of values that is reduced again and again. Give it to every `reduce` of that row.

    A round changes nothing by itself: `keep` the reduction once its result is used. A round that
    failed, or is repeated, is not kept, and the next one starts from the same debt. Takes twice the memory of the row in fp32.
    """

    def __init__(self, elements: int) -> None:
        self.owed = torch.zeros(elements)
        self._left = torch.zeros(elements)  # by the round under way, or the last one
        self._plan: RoundPlan | None = None  # of that round
        self._encoded: set[tuple[int, int]] = set()  # runs of elements it has written
        self._name = ""
        self._busy = False

    def begin(self, plan: RoundPlan, name: str) -> None:
        """A round begins; one that was not kept is forgotten."""
        if self._busy:
            raise FabricError(f"round {plan.id}: its error feedback is in use by another round; use one for each row of values")
        if plan.elements != self.owed.numel():
            raise FabricError(f"round {plan.id}: error feedback of {self.owed.numel()} values was given a round of {plan.elements}")
        self._plan, self._name, self._busy = plan, name, True
        self._encoded.clear()

    def end(self) -> None:
        """The round is over, one way or the other: nothing more is encoded in it."""
        self._busy = False

    def encode(
        self, span: tuple[int, int], value: torch.Tensor, divisor: float, encode: Callable[[torch.Tensor], EncodedChunk]
    ) -> EncodedChunk:
        """A sum, with what is owed to it and divided, as `encode` has it travel; what that leaves out is left here. NaN is never owed."""
        start, stop = span
        total = self.owed[start:stop] + value
        chunk = encode(total if divisor == 1.0 else total / divisor)
        left = torch.sub(total, decode(chunk.encoded()).mul_(divisor), out=self._left[start:stop])
        left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._encoded.add(span)
        return chunk

    def keep(self, reduction: ReductionResult) -> None:
        """The result is used: from now on what its encodings left out is owed, where this member's were in it. Once for a round."""
        if self._plan is None or reduction.round != self._plan.id or self._busy:
            raise FabricError(f"round {reduction.round} is not the one this error feedback was last used in, or is not over")
        for part in reduction.parts:
            span = (part.start, part.stop)
            if part.contributors and self._name in (part.owner, *part.contributors) and span in self._encoded:
                self.owed[slice(*span)] = self._left[slice(*span)]
        self._plan = None
