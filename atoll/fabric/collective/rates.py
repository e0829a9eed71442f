"""How fast a peer sends and receives, from transfers that overlap. Pure: no clock."""

from collections import deque

__all__ = ["RateWindow"]

_BIN_SECONDS = 0.05
_WINDOW_BINS = 8


class RateWindow:
    """The highest rate over 0.4 s among transfers that ran at the same time: what the interface can do, once something filled it.

    A transfer's bytes count evenly over its time. Each round the peak is forgotten a little, so that a link that got slower is believed.
    """

    def __init__(self) -> None:
        self._peak = 0.0
        self._bins: dict[int, float] = {}
        self._rounds: deque[float] = deque(maxlen=8)

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: nothing measured yet."""
        return max([*self._rounds, self._peak], default=0.0)

    def add(self, begin: float, end: float, nbytes: float) -> None:
        """Bytes that travelled between two times."""
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
