"""One column of stages: the recurrences of 1F1B and GPipe, walked round by round; the steady part is leapt over once it repeats exactly."""

from collections.abc import Sequence

from atoll.cost.workers import NO_HOP, Hop

__all__ = ["column_seconds"]

_ROUNDS_BETWEEN_LOOKS = 4  # looking whether a column has come to its steady state costs as much as a third of a round
_Row = tuple[int, float, float, float, float, float, float]  # stage; its forward, backward; queue and delay of the links onward and back


def column_seconds(
    forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop], micro_batches: int, schedule: str
) -> tuple[float, list[float]]:
    """Step of one column of stages, and when each stage ends. `onward[s]` leads from stage s to s+1, `back[s]` the other way."""
    if schedule == "gpipe":
        return _gpipe(forward, backward, onward, back, micro_batches)
    return _one_forward_one_backward(forward, backward, onward, back, micro_batches)


def _gpipe(
    forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop], micro_batches: int
) -> tuple[float, list[float]]:
    ready = [0.0] * micro_batches
    free: list[float] = []
    for s, seconds in enumerate(forward):
        ready, end = _through(ready, seconds, 0.0, onward[s] if s < len(onward) else NO_HOP)
        free.append(end)
    ready = [free[-1]] * micro_batches
    for s in range(len(backward) - 1, -1, -1):
        ready, free[s] = _through(ready, backward[s], free[s], back[s - 1] if s else NO_HOP)
    return max(free), free


def _through(ready: list[float], seconds: float, free: float, hop: Hop) -> tuple[list[float], float]:
    """Micro-batches through one server and then one link, in order."""
    arrivals = []
    link_free = 0.0
    for when in ready:
        free = (free if free > when else when) + seconds
        link_free = (link_free if link_free > free else free) + hop.occupancy
        arrivals.append(link_free + hop.latency)
    return arrivals, free


def _one_forward_one_backward(
    forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop], micro_batches: int
) -> tuple[float, list[float]]:
    """Round m computes, on each stage s in turn, the forward of micro-batch m and then the backward of micro-batch m - (S - s) + 1.

    In that order all that a task waits for has been computed: the forward before it in this round, the gradient in the round before. A
    round maps the times by maxima and sums, so once a round moves all of them by the same step, every later one does.
    """
    stages = len(forward)
    walk = _Walk(forward, backward, onward, back)
    first = min(stages - 1, micro_batches)
    for m in range(first):  # the stages before the last m have no gradient to go back with yet
        walk.turn_round(walk.forth_only(walk.rows[: stages - 1 - m]), walk.rows[stages - 1 - m :])
    left = micro_batches - first
    while left > _ROUNDS_BETWEEN_LOOKS + 1:
        for _ in range(_ROUNDS_BETWEEN_LOOKS - 1):
            walk.turn_round(0.0, walk.rows)
        before = walk.times()
        walk.turn_round(0.0, walk.rows)
        left -= _ROUNDS_BETWEEN_LOOKS
        if step := _common_step(before, walk.times()):
            walk.leap(step * (left - 1))
            left = 1
    for _ in range(left):
        walk.turn_round(0.0, walk.rows)
    for m in range(micro_batches, micro_batches + stages - 1):
        walk.back_only(walk.rows[max(0, stages - 1 - m) : micro_batches + stages - 1 - m])
    return max(walk.free), walk.free


class _Walk:
    """The times of a column of stages, round by round."""

    def __init__(self, forward: Sequence[float], backward: Sequence[float], onward: Sequence[Hop], back: Sequence[Hop]) -> None:
        stages = len(forward)
        self.free = [0.0] * stages  # when each stage ends what was given to it so far
        self.came_back = [0.0] * (stages + 1)  # when the gradient of the next backward arrives, from stage s + 1
        self.links, self.back_links = [0.0] * stages, [0.0] * stages  # when each link ends what was given to it so far
        self.rows = [
            (s, forth_seconds, back_seconds, *_queue_and_delay(hop, forth_seconds), *_queue_and_delay(back_hop, back_seconds))
            for s, forth_seconds, back_seconds, hop, back_hop in zip(
                range(stages), forward, backward, (*onward, NO_HOP), (NO_HOP, *back), strict=True
            )
        ]

    def forth_only(self, rows: list[_Row]) -> float:
        """Takes a micro-batch forward through stages; returns when it arrives after them."""
        free, links = self.free, self.links
        arrival = 0.0
        for s, seconds, _, queue, delay, _, _ in rows:
            end = free[s]
            end = free[s] = (end if end > arrival else arrival) + seconds
            if queue:
                start = links[s]
                end = links[s] = (start if start > end else end) + queue
            arrival = end + delay
        return arrival

    def turn_round(self, arrival: float, rows: list[_Row]) -> None:
        """Takes the micro-batch that arrives forward through stages, each of which then goes back with an earlier one."""
        free, came_back, links, back_links = self.free, self.came_back, self.links, self.back_links
        for s, seconds, back_seconds, queue, delay, back_queue, back_delay in rows:
            end = free[s]
            end = (end if end > arrival else arrival) + seconds
            if queue:
                start = links[s]
                start = links[s] = (start if start > end else end) + queue
                arrival = start + delay
            else:
                arrival = end + delay
            gradient = came_back[s]
            end = free[s] = (end if end > gradient else gradient) + back_seconds
            if back_queue:
                start = back_links[s]
                end = back_links[s] = (start if start > end else end) + back_queue
            came_back[s - 1] = end + back_delay

    def back_only(self, rows: list[_Row]) -> None:
        """Each stage goes back with a micro-batch."""
        free, came_back, back_links = self.free, self.came_back, self.back_links
        for s, _, seconds, _, _, queue, delay in rows:
            end, gradient = free[s], came_back[s]
            end = free[s] = (end if end > gradient else gradient) + seconds
            if queue:
                start = back_links[s]
                end = back_links[s] = (start if start > end else end) + queue
            came_back[s - 1] = end + delay

    def times(self) -> list[float]:
        """What decides over the next round; of links, only those that can make a transfer wait."""
        return self.free + self.links + self.back_links

    def leap(self, seconds: float) -> None:
        """Moves all times; those of links on which nothing waits stay zero."""
        self.free = [value + seconds for value in self.free]
        self.came_back = [value + seconds for value in self.came_back]
        self.came_back[len(self.free) - 1] = 0.0  # the last stage waits for no gradient
        self.links = [value + seconds if value else 0.0 for value in self.links]
        self.back_links = [value + seconds if value else 0.0 for value in self.back_links]


def _queue_and_delay(hop: Hop, seconds: float) -> tuple[float, float]:
    """Transfers of a stage whose tasks are further apart than the link needs for each never wait: they are a delay alone."""
    return (hop.occupancy, hop.latency) if hop.occupancy > seconds else (0.0, hop.occupancy + hop.latency)


def _common_step(before: list[float], after: list[float]) -> float:
    """By how much every time grew, or 0 where they grew differently; a time that is zero is of a link on which nothing waits."""
    step = after[0] - before[0]
    slack = 1e-12 + 1e-9 * step
    for was, value in zip(before, after, strict=True):
        if value and not -slack <= value - was - step <= slack:
            return 0.0
    return step
