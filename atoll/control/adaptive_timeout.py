"""Adaptive time-outs: they follow what is measured, grow while nothing works, and are kept across steps."""

__all__ = ["AdaptiveTimeout"]

SLOWLY = 1 / 128
MARGIN = 1.5


class AdaptiveTimeout:
    """How long to wait for something that usually takes as long as before.

    Follows the upper edge of what was measured: up at once, down slowly, since what a step begins with is quick and must not make the rest
    of it look late. Doubled at every failure and halved again by success, so that one slow peer does not make every later step wait.
    """

    __slots__ = ("_upper", "_floor", "_factor")

    def __init__(self, first_seconds: float, floor_seconds: float) -> None:
        self._upper = first_seconds / MARGIN
        self._floor = floor_seconds
        self._factor = 1.0

    def measured(self, seconds: float) -> None:
        """It worked, and took so long."""
        if seconds > self._upper:
            self._upper = seconds
        else:
            self._upper += SLOWLY * (seconds - self._upper)
        self._factor = max(1.0, self._factor / 2)

    def failed(self) -> None:
        """It did not work in time."""
        self._factor = min(64.0, self._factor * 2)

    def seconds(self) -> float:
        """How long to wait now."""
        return self._factor * (self._floor + MARGIN * self._upper)
