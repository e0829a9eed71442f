"""Pipeline schedules, played task by task: when every micro-batch is where, and how long the step is.

Two engines give the same answer where both apply. `column_seconds` walks the recurrences of 1F1B and GPipe through one column of stages and
leaps over the steady part once it repeats exactly; `simulate` plays any plan — unequal replicas, any routing, virtual stages, links shared
by several boundaries — in order of time. Its policy is 1F1B's: a forward while there is room, else a backward, waiting for either if need
be (taking whatever is ready proved up to 10% slower). Of several inputs a replica takes the earliest micro-batch that has arrived; a device
with virtual stages keeps to Megatron-LM's order. Should all wait in a circle, whoever has another task ready takes it. A runtime can follow
the order it finds.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

__all__ = ["NO_HOP", "Hop", "Timeline", "Worker", "column_seconds", "route", "simulate"]


class Hop(NamedTuple):
    """A transfer between two replicas: how long it holds its link, and how long after that it arrives."""

    occupancy: float
    latency: float
    link: int  # transfers on the same link queue for it; -1 for none


NO_HOP = Hop(0.0, 0.0, -1)
_ROUNDS_BETWEEN_LOOKS = 4  # looking whether a column has come to its steady state costs as much as a third of a round
_Row = tuple[int, float, float, float, float, float, float]  # stage; its forward, backward; queue and delay of the links onward and back


class Worker(NamedTuple):
    """A replica of a stage as the simulator sees it."""

    forward: float
    backward: float
    device: int  # replicas of several virtual stages may share one


class Timeline(NamedTuple):
    """The end of all forwards and backwards, and what each worker did (indexed as given, stage by stage)."""

    seconds: float
    finish: list[list[float]]  # when each worker ended its last backward
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: list[list[float]]  # seconds of transfers on the chain of waits that led to its last backward


@lru_cache(maxsize=1024)
def route(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Which replica takes each micro-batch, in order: every replica gets its count, and at any moment is less than one off its share.

    The j-th micro-batch of a replica has to come after `(j - 1) / share` were routed and no later than `j / share`; giving each turn to
    the earliest of those deadlines meets them all, as for periodic tasks on one processor.
    """
    total = sum(counts)
    if len(set(counts)) == 1:
        return tuple(range(len(counts))) * counts[0]
    windows = sorted(((j * total // n, -(-(j + 1) * total // n), r) for r, n in enumerate(counts) for j in range(n)), reverse=True)
    due: list[tuple[int, int]] = []  # deadline, replica
    order = []
    for turn in range(total):
        while windows and windows[-1][0] <= turn:
            heappush(due, windows.pop()[1:])
        order.append(heappop(due)[1])
    return tuple(order)


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


def simulate(
    workers: Sequence[Sequence[Worker]],
    routes: Sequence[Sequence[int]],
    onward: Sequence[Sequence[Hop]],
    back: Sequence[Sequence[Hop]],
    schedule: str,
    limits: Sequence[int],
) -> Timeline:
    """Plays a step. `routes[s][m]` is the worker of stage s for micro-batch m, `onward[s][m]` leads it from stage s to s+1 and `back[s][m]`
    the other way; `limits[d]` bounds the micro-batches device d may hold. A link carries one transfer at a time, in order of sending."""
    # GPipe holds everything: its limit is never reached before the last forward
    bounds = [len(routes[0]) * len(workers) + 1] * len(limits) if schedule == "gpipe" else limits
    return _Simulation(workers, routes, onward, back, bounds).run()


_Input = tuple[int, int, int, float, float]  # preference, micro-batch, stage, arrival, seconds of transfer on the chain of waits behind it
_STRICT, _BACKWARD_OUT_OF_TURN, _BEYOND_LIMIT = range(3)  # what a free device may do: each only where nobody could do the one before


class _Simulation:
    """The state of a step being played: what each device holds, does and has been sent."""

    def __init__(
        self,
        workers: Sequence[Sequence[Worker]],
        routes: Sequence[Sequence[int]],
        onward: Sequence[Sequence[Hop]],
        back: Sequence[Sequence[Hop]],
        limits: Sequence[int],
    ) -> None:
        self.routes, self.limits, self.stages = routes, limits, len(workers)
        chosen = [[row[choice] for choice in choices] for row, choices in zip(workers, routes, strict=True)]
        # the first index of what follows is the kind of a task: 0 forward, 1 backward
        self.seconds = tuple([[worker[kind] for worker in row] for row in chosen] for kind in (0, 1))
        self.hops = (onward, ((), *back))  # what a task makes leaves along these
        self.device_of = [[worker[2] for worker in row] for row in chosen]
        # a device with several stages turns to the next one after as many micro-batches as the pipeline is deep, as in Megatron-LM
        self.depth = len({row[0] for row in self.device_of})
        self.forwards_left = [0] * len(limits)
        for row in self.device_of:
            for device in row:
                self.forwards_left[device] += 1
        self.inbox: tuple[list[list[_Input]], ...] = ([[] for _ in limits], [[] for _ in limits])  # heaps, by kind and device
        for m, device in enumerate(self.device_of[0]):
            self.inbox[0][device].append((m // self.depth * self.stages, m, 0, 0.0, 0.0))
        # what devices with several stages do in turn, last first; others take what comes
        self.turns = self._turns() if self.depth < self.stages else None
        self.finish, self.transfer = ([[0.0] * len(row) for row in workers] for _ in (0, 1))
        self.holding, self.most_held = ([[0] * len(row) for row in workers] for _ in (0, 1))

    def _turns(self) -> tuple[list[list[tuple[int, int]]], ...]:
        turns: tuple[list[list[tuple[int, int]]], ...] = ([[] for _ in self.limits], [[] for _ in self.limits])
        for stage, row in enumerate(self.device_of):
            for m, device in enumerate(row):
                for kind, order in enumerate((stage, -stage)):
                    turns[kind][device].append((m // self.depth * self.stages + order, m))
        for rows in turns:
            for turn in rows:
                turn.sort(reverse=True)
        return turns

    def run(self) -> Timeline:
        """Takes the ends of tasks in order of time: what a task made is sent, and whoever is free then and has an input begins a task."""
        (forwards, backwards), forwards_left, limits, seconds, turns = self.inbox, self.forwards_left, self.limits, self.seconds, self.turns
        free, held = [True] * len(limits), [0] * len(limits)
        free_since, transfer = [0.0] * len(limits), [0.0] * len(limits)
        ends: list[tuple[float, int, int, int, int]] = []  # time, device, kind, stage, micro-batch
        link_free: dict[int, float] = {}
        looking: Iterable[int] = range(len(limits))
        now, patience = 0.0, _STRICT
        while True:
            for device in looking:
                if forwards_left[device] and (held[device] < limits[device] or patience == _BEYOND_LIMIT):
                    kind, inbox = 0, forwards[device]
                    if not inbox and patience:
                        kind, inbox = 1, backwards[device]
                else:
                    kind, inbox = 1, backwards[device]
                if not inbox or (turns and not patience and inbox[0][:2] != turns[kind][device][-1]):
                    continue
                start = now if patience else free_since[device]
                order, m, stage, arrival, behind = heappop(inbox) if turns or inbox[0][3] <= start else _take(inbox, start)
                if turns:
                    turn = turns[kind][device]
                    turn.pop(-1 if turn[-1] == (order, m) else turn.index((order, m)))
                if arrival > start:
                    start, transfer[device] = arrival, behind
                if kind:
                    held[device] -= 1
                else:
                    held[device] += 1
                    forwards_left[device] -= 1
                free[device] = False
                heappush(ends, (start + seconds[kind][stage][m], device, kind, stage, m))
            if ends:
                now, device, kind, stage, m = heappop(ends)
                patience = _STRICT
                free[device] = True
                free_since[device] = now
                receiver = self._end(kind, stage, m, now, transfer[device], link_free)
                looking = (device, receiver) if free[receiver] and receiver != device else (device,)
            elif patience < _BEYOND_LIMIT:
                looking, patience = range(len(limits)), patience + 1
            else:
                return Timeline(now, self.finish, self.most_held, self.transfer)

    def _end(self, kind: int, stage: int, m: int, now: float, transfer: float, link_free: dict[int, float]) -> int:
        """Books the end of a task: who holds what, and when what it made arrives where. Returns the device that gets it."""
        choice, holding = self.routes[stage][m], self.holding[stage]
        if kind:
            holding[choice] -= 1
            self.finish[stage][choice] = now
            self.transfer[stage][choice] = transfer
            if not stage:
                return self.device_of[stage][m]
            to = stage - 1
            preference = m // self.depth * self.stages - to
        else:
            holding[choice] += 1
            if holding[choice] > self.most_held[stage][choice]:
                self.most_held[stage][choice] = holding[choice]
            to = stage + 1
            preference = m // self.depth * self.stages + to
            if to == self.stages:  # the loss: its gradient is here at once
                device = self.device_of[stage][m]
                heappush(self.inbox[1][device], (preference - 2 * to + 1, m, stage, now, transfer))
                return device
        occupancy, latency, link = self.hops[kind][stage][m]
        sent = now
        if link >= 0:
            queued = link_free.get(link, 0.0)
            if queued > now:
                sent = queued
            link_free[link] = sent + occupancy
        arrival = sent + occupancy + latency
        device = self.device_of[to][m]
        heappush(self.inbox[kind][device], (preference, m, to, arrival, transfer + arrival - now))
        return device


def _take(inbox: list[_Input], now: float) -> _Input:
    """Removes the preferred of the inputs that have arrived, or the one that will arrive first."""
    if len(inbox) == 1:
        return inbox.pop()
    here = [item for item in inbox if item[3] <= now]
    taken = min(here) if here else min(inbox, key=lambda item: item[3])
    inbox.remove(taken)
    heapify(inbox)
    return taken
