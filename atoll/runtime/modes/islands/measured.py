"""What a site finds of its links and its steps while it trains: from it the coordinator chooses how later rounds are made.

A link is measured by what its gateway fetches of others' updates: from when it asks for chunks until all have come that it asked for.
"""

import statistics
import time
from collections import deque

import msgspec
from torch import Tensor

from atoll.control.messages import Message
from atoll.control.rounds.messages import FetchUpdate, UpdateChunk, UpdateId
from atoll.fabric import Remote
from atoll.fabric.security import RunMember
from atoll.runtime.modes.islands.transport import RoundTransport

__all__ = ["FetchMeter", "MeteredTransport", "SiteMeasured", "StepClock", "chunk_bytes"]

_STEPS = 31  # of which the median is taken
_LEAST_SHARE = 0.5  # of a fetch that counts as transfer, however much of it a round trip is


class SiteMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """What a site found by one exchange. `count` grows with every one."""

    count: int
    bytes_per_s: float  # of other sites' updates, as they came in
    round_trip_s: float
    step_s: float  # of late, without what was waited for rounds


class StepClock:
    """How long a site's steps are."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)

    def add(self, seconds: float) -> None:
        """A step was made."""
        self._seconds.append(seconds)

    @property
    def median(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(list(self._seconds)) if self._seconds else 0.0


class FetchMeter:
    """Bytes and seconds of fetches. A fetch lasts as long as there are chunks that were asked for and did not come.

    One in which a chunk does not come in time says nothing of a link: it is left out. Belongs to the gateway's loop.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._asked: dict[tuple[UpdateId, int], float] = {}
        self._began = self._bytes = 0.0
        self._spoilt = False
        self.count = 0  # of fetches that are whole
        self.last: tuple[float, float] | None = None  # bytes and seconds of the last one

    def asked(self, update: UpdateId, chunk: int, now: float) -> None:
        """A chunk is asked for, for the first time or again."""
        self._drop_lost(now)
        if not self._asked:
            self._began, self._bytes, self._spoilt = now, 0.0, False
        self._spoilt = self._spoilt or (update, chunk) in self._asked
        self._asked[update, chunk] = now

    def _drop_lost(self, now: float) -> None:
        lost = [key for key, at in self._asked.items() if now - at > self._patience]
        for key in lost:
            del self._asked[key]
        self._spoilt = self._spoilt or bool(lost)

    def came(self, update: UpdateId, chunk: int, size: int, now: float) -> None:
        """A chunk came."""
        if self._asked.pop((update, chunk), None) is None:
            return
        self._bytes += size
        if not self._asked and not self._spoilt and now > self._began:
            self.count += 1
            self.last = self._bytes, now - self._began

    def bytes_per_s(self, round_trip_s: float) -> float | None:
        """Of the last fetch, its first round trip left out; None before there was one."""
        if self.last is None:
            return None
        size, seconds = self.last
        return size / max(seconds - round_trip_s, _LEAST_SHARE * seconds)


def chunk_bytes(message: UpdateChunk) -> int:
    """Of what is in a chunk of an update."""
    return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in message.payload)


class MeteredTransport(RoundTransport):
    """Tells the meter what is asked for."""

    def __init__(self, member: RunMember, coordinator: Remote, meter: FetchMeter) -> None:
        super().__init__(member, coordinator)
        self._meter = meter

    def send(self, to: str, message: Message) -> None:
        """As ever."""
        if isinstance(message, FetchUpdate):
            self._meter.asked(message.update, message.chunk, time.monotonic())
        super().send(to, message)
