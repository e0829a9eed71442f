"""Fetching: a stage's state from several donors at once, all chunks of one (epoch, version)."""

from collections.abc import Callable
from typing import Any

from atoll.control.checks import Checks
from atoll.control.messages import FetchState, StateChunk

__all__ = ["Fetch"]

WINDOW = 2  # chunks asked of each donor at once: the next is on its way while one arrives, and a busy donor is not drowned


class Fetch:
    """One attempt at one (epoch, version, stage). A new version is a new attempt, with a new nonce."""

    def __init__(self, worker: str, nonce: int, position: tuple[int, int, int], chunks: int, checks: Checks) -> None:
        self.nonce = nonce
        self.position = position
        self._worker = worker
        self._chunks = chunks
        self._checks = checks
        self._asked: dict[int, float] = {}
        self._turn = nonce
        self.received: dict[int, Any] = {}

    def ask(self, now: float, patience: float, donors: tuple[str, ...], send: Callable[[str, FetchState], None]) -> None:
        """Asks donors in turn, a few chunks of each at a time, and another donor when an answer is late."""
        window = WINDOW * len(donors)
        for chunk in [chunk for chunk, at in self._asked.items() if now - at >= patience]:
            del self._asked[chunk]
        for chunk in range(self._chunks):
            if len(self._asked) >= window:
                return
            if chunk not in self.received and chunk not in self._asked:
                self._asked[chunk] = now
                send(donors[self._turn % len(donors)], FetchState(self.nonce, *self.position, chunk, self._worker))
                self._turn += 1

    def on_chunk(self, message: StateChunk) -> bool:
        """Takes a chunk; True when it was the last one missing."""
        exact = message.nonce == self.nonce and (message.epoch, message.version, message.stage) == self.position
        if (self._checks.fetch_version and not exact) or message.stage != self.position[2] or message.chunk in self.received:
            return False
        self.received[message.chunk] = message.payload
        self._asked.pop(message.chunk, None)
        return len(self.received) == self._chunks

    def chunks(self) -> list[Any]:
        """All of them, in order."""
        return [self.received[chunk] for chunk in range(self._chunks)]
