"""Device: what the workers of one process compute on, one kernel at a time.

Whoever shares a device is rated at its share: a kernel counts as having taken as many times as long as there are workers. So what a swarm's
workers add up to is what its devices can do, however many stages each hosts, and routing, which goes by the same numbers, fits.
"""

from collections import deque

from atoll.control.world import Clock, Mailbox

__all__ = ["Device"]


class Device:
    """Taken in turns, in the order it was asked for."""

    def __init__(self, clock: Clock) -> None:
        self.workers = 0
        self._clock = clock
        self._taken = False
        self._waiting: deque[Mailbox] = deque()

    async def take(self) -> None:
        """Comes back when nobody else computes."""
        if self._taken:
            turn = self._clock.mailbox()
            self._waiting.append(turn)
            await turn.take()
        self._taken = True

    def give(self) -> None:
        """To whoever waited longest."""
        if self._waiting:
            self._waiting.popleft().put(None)  # it stays taken: nobody comes in between
        else:
            self._taken = False
