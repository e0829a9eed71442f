"""A cell of the result as one member holds it: its chunks in order, until it is whole or has failed."""

import asyncio

from atoll.fabric.collective.messages import Chunk, Failed, Progress
from atoll.fabric.collective.outcome import PartOutcome
from atoll.fabric.collective.plan import Cell, RoundPlan

__all__ = ["ReducedCell"]


class ReducedCell:
    """Chunks are added in order and never change: whoever holds one holds the same bytes."""

    def __init__(self, plan: RoundPlan, cell: Cell) -> None:
        self.cell = cell
        self.spans = plan.chunks(cell)
        self.failure: Failed | None = None
        self.salvaging = False  # its source is lost: more comes only from members that have it
        self._names = [member.name for member in plan.members]
        self._chunks: list[Chunk] = []
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
    def progress(self) -> Progress:
        """What others may know."""
        return Progress(self.held, self.over or self.salvaging)

    def add(self, chunk: Chunk, digest: str) -> None:
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

    async def wait(self, index: int) -> Chunk | Failed:
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
