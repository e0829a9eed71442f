"""What a gateway has of updates and of the common state: chunks that came, whom to ask for those that did not."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from atoll.control.rounds.messages import Offer, Position, UpdateId

__all__ = ["GlobalFetch", "UpdateStore"]


class _Chunks:
    """Chunks on their way, each asked of one process at a time."""

    def __init__(self, count: int) -> None:
        self.found: list[Any] = [None] * count
        self._asked: list[float | None] = [None] * count
        self._turn = 0

    @property
    def complete(self) -> bool:
        return all(chunk is not None for chunk in self.found)

    def ask(self, processes: Sequence[str], now: float, patience: float, room: int, send: Callable[[str, int], None]) -> int:
        """Asks for what is missing; returns for how many there is still room. A chunk that does not come is asked of the next process."""
        for number, chunk in enumerate(self.found):
            if chunk is not None:
                continue
            asked = self._asked[number]
            if asked is not None and now - asked < patience:
                room -= 1
                continue
            if room > 0 and processes:
                self._asked[number] = now
                send(processes[(number + self._turn) % len(processes)], number)
                self._turn += asked is not None
                room -= 1
        return room

    def put(self, number: int, chunk: Any) -> None:
        """What came first stays."""
        if self.found[number] is None:
            self.found[number] = chunk

    def clear(self) -> None:
        """What came cannot be used: all is asked for again, of others."""
        self.found = [None] * len(self.found)
        self._asked = [None] * len(self.found)
        self._turn += 1


class UpdateStore:
    """The updates of others that are wanted, and those that came whole."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chunks: dict[UpdateId, _Chunks] = {}
        self._digests: dict[UpdateId, str] = {}
        self._whole: set[UpdateId] = set()

    def keep(self, wanted: Iterable[Offer]) -> None:
        """These are wanted; all others are forgotten."""
        self._digests = {offer.update: offer.digest for offer in wanted}
        self._chunks = {update: self._chunks.get(update) or _Chunks(self._count) for update in self._digests}
        self._whole &= self._digests.keys()

    @property
    def whole(self) -> frozenset[UpdateId]:
        """Updates with all chunks, which have the digest they were offered with."""
        return frozenset(self._whole)

    def chunks(self, update: UpdateId) -> Sequence[Any]:
        """Of an update that is whole."""
        assert update in self._whole
        return self._chunks[update].found

    def chunk(self, update: UpdateId, number: int) -> Any:
        """To give to others: only of an update that is whole."""
        return self._chunks[update].found[number] if update in self._whole else None

    def put(self, update: UpdateId, number: int, payload: Any, digest: Callable[[Sequence[Any]], str]) -> bool:
        """A chunk came. Whether its update is whole by it; one whose digest is another is asked for again."""
        chunks = self._chunks.get(update)
        if chunks is None or update in self._whole:
            return False
        chunks.put(number, payload)
        if not chunks.complete:
            return False
        if not self._is_as_offered(digest(chunks.found), self._digests[update]):
            chunks.clear()
            return False
        self._whole.add(update)
        return True

    def _is_as_offered(self, digest: str, offered: str) -> bool:
        return digest == offered

    def ask(
        self,
        updates: Collection[UpdateId],
        holders: Callable[[UpdateId], Sequence[str]],
        now: float,
        patience: float,
        room: int,
        send: Callable[[str, UpdateId, int], None],
    ) -> None:
        """Asks for chunks of these updates, not of more at once than there is room for."""
        for update in updates:
            if update not in self._whole and update in self._chunks:
                room = self._chunks[update].ask(holders(update), now, patience, room, lambda to, n, it=update: send(to, it, n))  # type: ignore[misc]


class GlobalFetch:
    """The common state of one position on its way from several who have it. `named`: the site's own last update in it."""

    def __init__(self, position: Position, named: Offer | None, count: int, now: float) -> None:
        self.position, self.named = position, named
        self.came_at = now
        self._chunks = _Chunks(count)

    @property
    def chunks(self) -> Sequence[Any] | None:
        """All of them, once they are there."""
        return self._chunks.found if self._chunks.complete else None

    def put(self, position: Position, number: int, payload: Any, now: float) -> None:
        """A chunk came: it counts only where it is of the same state."""
        if self._is_of_this(position):
            self._chunks.put(number, payload)
            self.came_at = now

    def _is_of_this(self, position: Position) -> bool:
        return position == self.position

    def ask(self, donors: Sequence[str], now: float, patience: float, room: int, send: Callable[[str, int], None]) -> None:
        """Asks for chunks, in turn of all who have the state."""
        self._chunks.ask(donors, now, patience, room, send)
