"""Pulse: a line on standard error every few seconds, so that what runs long is seen to run."""

import sys
import time

__all__ = ["Pulse"]

SECONDS = 5.0


class Pulse:
    """Called as often as one likes; says something at most every `seconds`. Answers stay alone on standard output."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._began = self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        """What is being done, if it is time to say so."""
        now = time.monotonic()
        if now - self._said >= self._seconds:
            self._said = now
            print(text, file=sys.stderr, flush=True)

    def count(self, what: str, done: int, total: int) -> None:
        """So many of so many, and how long the rest will take at this rate."""
        left = (time.monotonic() - self._began) / max(done, 1) * (total - done)
        self(f"{what}: {done:,} of {total:,}, about {_clock(left)} left")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
