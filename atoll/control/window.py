"""Window: how many micro-batches a feeder has under way at once, from how long they take and how many come back in a second."""

import math
from collections import deque

__all__ = ["Window"]


class Window:
    """One waiting at every process, and those in hand or on their way: by Little's law the rate at which micro-batches come back, times
    what one takes when nothing is queued. More would only queue, and hide who is slow.

    `given` is three for every process and the least there is: enough where ways are short. What one takes unqueued is told by the quickest
    of a RUN, as that begins with nothing queued anywhere.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.given = 1
        self._under_way = 0.0
        self._quickest = math.inf  # of this RUN
        self._ends: deque[float] = deque()  # of the last ones of this RUN

    def begin(self) -> None:
        """A RUN opens."""
        self._quickest = math.inf
        self._ends.clear()

    def measured(self, now: float, seconds: float) -> None:
        """A micro-batch came back at the first try, after so long."""
        self._quickest = min(self._quickest, seconds)
        self._ends.append(now)
        while len(self._ends) > self.given + 1:
            self._ends.popleft()
        elapsed = now - self._ends[0]
        if len(self._ends) > self.given and elapsed > 0:
            self._under_way = self.given / elapsed * self._quickest

    @property
    def size(self) -> int:
        """Of the window."""
        return max(1, min(self._most, max(self.given, math.ceil(self._under_way + self.given / 3))))
