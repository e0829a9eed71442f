"""Streams that leave one interface at the same time end at the same time.

Left alone, a stream to a near peer takes most of the interface and ends early; the far ones then have it to themselves, but congestion
control (BBR: a quarter more every eight round trips) takes seconds to notice. So no stream runs far ahead of the others.
"""

import asyncio

__all__ = ["Lane", "Pacing"]

_SLACK = 0.08  # how far a stream may be ahead of the last one, as a share of the whole
_PATIENCE_SECONDS = 0.3


class Lane:
    """One stream: what of it was sent, from 0 to 1; whether it stands still, so that nobody waits for it until it moves again."""

    def __init__(self) -> None:
        self.fraction = 0.0
        self.still = False


class Pacing:
    """All streams of one kind of one round that share an interface."""

    def __init__(self) -> None:
        self._lanes: set[Lane] = set()
        self._changed = asyncio.Event()

    def begin(self, fraction: float = 0.0) -> Lane:
        """A stream begins."""
        lane = Lane()
        lane.fraction = fraction
        self._lanes.add(lane)
        return lane

    def advanced(self, lane: Lane, fraction: float) -> None:
        """More of it was sent."""
        lane.fraction, lane.still = fraction, False
        self._tell()

    def end(self, lane: Lane) -> None:
        """A stream is over, one way or the other."""
        self._lanes.discard(lane)
        self._tell()

    async def turn(self, lane: Lane) -> None:
        """Waits while the stream is too far ahead; never for one that does not move."""
        while behind := [other for other in self._lanes if not other.still and other.fraction < lane.fraction - _SLACK]:
            changed = self._changed
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await changed.wait()
            except TimeoutError:
                for other in behind:
                    other.still = True

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
