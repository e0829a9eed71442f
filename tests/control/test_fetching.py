"""A state is fetched from several donors; over a slow link nothing is asked for twice only because it takes its time."""

from atoll.control.checks import ALL_CHECKS
from atoll.control.fetching import WINDOW, Fetch
from atoll.control.messages import FetchState, StateChunk
from atoll.control.patience import Patience

POSITION = (0, 3, 1)
CHUNKS = 12


class Slow:
    """Donors behind one link that takes so many seconds for a chunk, one after another."""

    def __init__(self, fetch: Fetch, donors: tuple[str, ...], seconds: float) -> None:
        self.fetch, self.donors, self.seconds = fetch, donors, seconds
        self.asked: list[tuple[str, FetchState]] = []
        self._free_at = 0.0
        self._arrivals: list[tuple[float, FetchState]] = []

    def send(self, donor: str, message: FetchState) -> None:
        self.asked.append((donor, message))
        if donor in self.donors:
            self._free_at = max(self._free_at, self.now) + self.seconds
            self._arrivals.append((self._free_at, message))

    def run(self, tick: float = 0.5, until: float = 500.0) -> float:
        """Until the state is whole: when that was."""
        self.now = 0.0
        while self.now < until:
            self.fetch.ask(self.now, self.donors, self.send)
            self.now += tick
            while self._arrivals and self._arrivals[0][0] <= self.now:
                at, message = self._arrivals.pop(0)
                whole = self.fetch.on_chunk(StateChunk(message.nonce, *POSITION, message.chunk, "bytes"), at)
                if whole:
                    return at
                self.fetch.ask(at, self.donors, self.send)
        raise AssertionError(f"not whole after {until} s")


def fetch(patience: Patience) -> Fetch:
    return Fetch("w", 1, POSITION, CHUNKS, ALL_CHECKS, patience)


def test_a_slow_link_is_not_filled_with_doubles() -> None:
    patience = Patience(10.0, 1.0)
    slow = Slow(fetch(patience), ("a", "b"), 3.0)  # four are under way, so each takes twelve seconds: longer than the first patience
    assert slow.run() < 1.5 * CHUNKS * 3.0
    assert len(slow.asked) <= CHUNKS + 2 * WINDOW
    again = Slow(fetch(patience), ("a", "b"), 3.0)  # and what was learnt stays
    assert again.run() == CHUNKS * 3.0
    assert len(again.asked) == CHUNKS


def test_another_donor_is_asked_at_once_when_one_is_gone() -> None:
    it = fetch(Patience(10.0, 1.0))
    asked: list[tuple[str, FetchState]] = []
    it.ask(0.0, ("a", "b"), lambda donor, message: asked.append((donor, message)))
    assert {donor for donor, _ in asked} == {"a", "b"}
    lost = {message.chunk for donor, message in asked if donor == "a"}
    other = next(message.chunk for donor, message in asked if donor == "b")
    asked.clear()
    it.on_chunk(StateChunk(1, *POSITION, other, "bytes"), 0.2)
    it.ask(0.2, ("b",), lambda donor, message: asked.append((donor, message)))  # `a` never answered, and no deadline has passed
    assert [(donor, message.chunk) for donor, message in asked] == [("b", min(lost))]
