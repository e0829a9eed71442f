"""Fetching: a stage's state from several donors at once, all chunks of one (epoch, version)."""

from collections.abc import Callable
from typing import Any

from atoll.control.checks import Checks
from atoll.control.messages import FetchState, StateChunk
from atoll.control.patience import Patience

__all__ = ["Fetch"]

WINDOW = 4  # chunks asked of each donor at once: the next is on its way while one arrives, and a busy donor is not drowned


class Fetch:
    """One attempt at one (epoch, version, stage). A new version is a new attempt, with a new nonce."""

    def __init__(
        self, worker: str, nonce: int, position: tuple[int, int, int], chunks: int, checks: Checks, patience: Patience | None = None
    ) -> None:
        self.nonce = nonce
        self.position = position
        self._worker = worker
        self._chunks = chunks
        self._checks = checks
        self._patience = patience or Patience(1.0, 0.0)  # kept over attempts: what a chunk takes on these links is learnt once
        self._asked: dict[int, tuple[float, str]] = {}  # when and whom
        self._turn = nonce
        self.received: dict[int, Any] = {}
        self.givers: set[str] = set()  # who has sent some of it

    def ask(self, now: float, donors: tuple[str, ...], send: Callable[[str, FetchState], None]) -> None:
        """Asks donors in turn, a few chunks of each at a time; another donor when one is gone or an answer is late.

        Late is what takes longer than chunks have taken so far: over a slow link, asking again too soon would fill it with doubles.
        """
        window = WINDOW * len(donors)
        late = self.late(now)
        if late:
            self._patience.failed()
        for chunk in {*late, *(chunk for chunk, (_, donor) in self._asked.items() if donor not in donors)}:
            del self._asked[chunk]
        for chunk in range(self._chunks):
            if len(self._asked) >= window:
                return
            if chunk not in self.received and chunk not in self._asked:
                donor = donors[self._turn % len(donors)]
                self._asked[chunk] = now, donor
                send(donor, FetchState(self.nonce, *self.position, chunk, self._worker))
                self._turn += 1

    def late(self, now: float) -> list[int]:
        """Chunks that take longer than others did."""
        return [chunk for chunk, (at, _) in self._asked.items() if now - at >= self._patience.seconds()]

    def on_chunk(self, message: StateChunk, now: float) -> bool:
        """Takes a chunk; True when it was the last one missing."""
        exact = message.nonce == self.nonce and (message.epoch, message.version, message.stage) == self.position
        if (self._checks.fetch_version and not exact) or message.stage != self.position[2] or message.chunk in self.received:
            return False
        self.received[message.chunk] = message.payload
        at, donor = self._asked.pop(message.chunk, (None, ""))
        if at is not None:
            self.givers.add(donor)
            self._patience.measured(now - at)
        return len(self.received) == self._chunks

    def chunks(self) -> list[Any]:
        """All of them, in order."""
        return [self.received[chunk] for chunk in range(self._chunks)]
