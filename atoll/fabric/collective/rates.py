"""How fast a peer sends and receives, from transfers that overlap. Pure: no clock."""

from collections import deque

__all__ = ["BusyRate", "RateWindow"]

_BIN_SECONDS = 0.05
_WINDOW_BINS = 8
_SAMPLE_SECONDS, _SAMPLE_BYTES = 0.1, 4_000_000


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
    """The throughput of one link: bytes over the time in which some were on their way, of late. Transfers may overlap."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: nothing measured yet
        self._until = 0.0
        self._busy_seconds, self._bytes = 0.0, 0

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """A transfer ended."""
        self._busy_seconds += max(0.0, end - max(begin, self._until))
        self._until = max(self._until, end)
        self._bytes += nbytes
        if self._bytes >= _SAMPLE_BYTES or (self._busy_seconds >= _SAMPLE_SECONDS and self._bytes):
            sample = self._bytes / max(self._busy_seconds, 1e-6)
            self.bytes_per_s = sample if not self.bytes_per_s else 0.5 * (self.bytes_per_s + sample)
            self._busy_seconds, self._bytes = 0.0, 0
