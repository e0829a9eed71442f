"""How fast a peer sends and receives, from transfers that overlap. Pure: no clock."""

import math
from collections import deque

__all__ = ["BusyRate", "RateWindow"]

_BIN_SECONDS = 0.05
_WINDOW_BINS = 8
_RECENT_SECONDS = 1.0
_NO_SECONDS, _FILLED_SECONDS = 0.0015, 1.0
_SAMPLE_SECONDS, _SAMPLE_BYTES = 0.05, 2_000_000


class RateWindow:
    """The highest rate over 0.4 s among transfers that ran at the same time: what the interface can do, once something filled it.

    A transfer's bytes count evenly over its time. Each round the peak is forgotten a little, so that a link that got slower is believed.
    """

    def __init__(self) -> None:
        self.bytes_seen = 0  # in all
        self._bins: dict[int, float] = {}
        self._rounds: deque[float] = deque(maxlen=8)

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: nothing measured yet."""
        return max(self._rounds, default=0.0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Bytes that travelled between two times."""
        self.bytes_seen += nbytes
        first, last = int(begin / _BIN_SECONDS), max(int(begin / _BIN_SECONDS), int(end / _BIN_SECONDS))
        if last - first > 400:
            return  # it stood still most of the time, which says nothing of the interface
        length = max(end - begin, 1e-9)
        for bin_ in range(first, last + 1):
            inside = min(end, (bin_ + 1) * _BIN_SECONDS) - max(begin, bin_ * _BIN_SECONDS)
            self._bins[bin_] = self._bins.get(bin_, 0.0) + (nbytes * inside / length if last > first else nbytes)

    def end_round(self) -> None:
        """A round is over: its peak counts for the next eight, ten per cent less each time it is not reached again."""
        peak = 0.0
        for bin_ in self._bins:
            total = sum(self._bins.get(bin_ + offset, 0.0) for offset in range(_WINDOW_BINS))
            peak = max(peak, total / (_WINDOW_BINS * _BIN_SECONDS))
        self._bins.clear()
        self._rounds = deque((0.9 * before for before in self._rounds), maxlen=8)
        if peak:
            self._rounds.append(peak)


class BusyRate:
    """The throughput of one link: bytes over the time in which some were on their way, of the last second. Transfers may overlap.

    Where less than a sample went in that second, older transfers count too. A transfer that took no time went into buffers and says nothing
    of the link, unless all do: then the link is faster than what is sent.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._filled_at = -math.inf  # when buffers were last seen to be full
        self._transfers: deque[tuple[float, float, int]] = deque()  # when each ended, the time that only it was busy, bytes
        self._busy_seconds, self._bytes = 0.0, 0

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: too little was measured yet."""
        return self._bytes / max(self._busy_seconds, 1e-6) if self._enough(self._busy_seconds, self._bytes) else 0.0

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """A transfer ended."""
        busy = max(0.0, end - max(begin, self._until))
        self._until = max(self._until, end)
        if end - begin >= _NO_SECONDS:
            self._filled_at = end
        elif end - self._filled_at < _FILLED_SECONDS:
            return
        self._transfers.append((end, busy, nbytes))
        self._busy_seconds += busy
        self._bytes += nbytes
        while self._transfers[0][0] < end - _RECENT_SECONDS:
            _, busy, nbytes = self._transfers[0]
            if not self._enough(self._busy_seconds - busy, self._bytes - nbytes):
                break
            self._transfers.popleft()
            self._busy_seconds -= busy
            self._bytes -= nbytes

    @staticmethod
    def _enough(busy_seconds: float, nbytes: int) -> bool:
        return nbytes >= _SAMPLE_BYTES or (busy_seconds >= _SAMPLE_SECONDS and nbytes > 0)
