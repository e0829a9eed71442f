"""Patience: time-outs that follow what is measured, grow while nothing works, and are kept across steps."""

__all__ = ["Patience"]


class Patience:
    """How long to wait for something that usually takes as long as before.

    Smoothed mean plus four smoothed deviations, as TCP does for retransmission (RFC 6298); doubled at every failure and halved again by
    success, so that one slow peer does not make every later step wait.
    """

    __slots__ = ("_mean", "_deviation", "_first", "_floor", "_factor")

    def __init__(self, first_seconds: float, floor_seconds: float) -> None:
        self._mean = 0.0
        self._deviation = 0.0
        self._first = first_seconds
        self._floor = floor_seconds
        self._factor = 1.0

    def measured(self, seconds: float) -> None:
        """It worked, and took so long."""
        if self._mean == 0.0:
            self._mean, self._deviation = seconds, seconds / 2
        else:
            self._deviation += 0.25 * (abs(seconds - self._mean) - self._deviation)
            self._mean += 0.125 * (seconds - self._mean)
        self._factor = max(1.0, self._factor / 2)

    def failed(self) -> None:
        """It did not work in time."""
        self._factor = min(64.0, self._factor * 2)

    def seconds(self) -> float:
        """How long to wait now."""
        expected = self._mean + 4 * self._deviation if self._mean else self._first
        return self._factor * (self._floor + expected)
