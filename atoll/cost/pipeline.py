"""Pipeline schedules, played task by task: when every micro-batch is where, and how long the step is.

Two engines give the same answer where both apply. `column_seconds` walks the recurrences of 1F1B and GPipe through one column of stages and
leaps over the steady part once it repeats exactly; `simulate` plays any plan — unequal replicas, any routing, virtual stages, links shared
by several boundaries — in order of time. Its policy is 1F1B's: a forward while there is room, else a backward, waiting for either if need
be (taking whatever is ready proved up to 10% slower). Of several inputs a replica takes the earliest micro-batch that has arrived; a device
with virtual stages keeps to Megatron-LM's order. Should all wait in a circle, whoever has another task ready takes it. A runtime can follow
the order it finds.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

__all__ = ["NO_HOP", "Hop", "Timeline", "Worker", "column_seconds", "route", "simulate"]


_T = TypeVar("_T")


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


_Input = tuple[int, float, float]  # task, arrival, seconds of transfer on the chain of waits behind it
_Inboxes = tuple[list[list[_Input]], list[list[_Input]]]  # heaps of forwards and of backwards, by device
_STRICT, _BACKWARD_OUT_OF_TURN, _BEYOND_LIMIT = range(3)  # what a free device may do: each only where nobody could do the one before
_BUSY = -1.0


class _Simulation:
    """A step to be played.

    Tasks are numbered as a device prefers them: forwards by (block of micro-batches, stage, micro-batch), then backwards by (block, stage
    from the last, micro-batch). A block has as many micro-batches as the pipeline has devices: a device with several stages turns to the
    next one after a block, as in Megatron-LM; for one with a single stage this is the order of micro-batches. What follows a task on the
    next stage is numbered a block further on.
    """

    def __init__(
        self,
        workers: Sequence[Sequence[Worker]],
        routes: Sequence[Sequence[int]],
        onward: Sequence[Sequence[Hop]],
        back: Sequence[Sequence[Hop]],
        limits: Sequence[int],
    ) -> None:
        self.limits, self.stages = limits, len(workers)
        flat = [worker for row in workers for worker in row]
        self.firsts = list(accumulate([len(row) for row in workers], initial=0))  # workers are numbered stage by stage
        self.home = [worker.device for worker in flat]
        chosen = [[first + choice for choice in row] for first, row in zip(self.firsts, routes, strict=False)]
        self.block = len({self.home[row[0]] for row in chosen})
        self.worker = _numbered(chosen, self.block) + _numbered(chosen[::-1], self.block)
        self.backwards = len(self.worker) // 2  # where their numbers begin
        forth, back_again = [worker.forward for worker in flat], [worker.backward for worker in flat]
        self.seconds = [forth[w] for w in self.worker[: self.backwards]] + [back_again[w] for w in self.worker[self.backwards :]]
        stays: list[Hop | None] = [None] * len(chosen[0])  # after the last forward and the last backward
        self.hops = _numbered([*onward, stays], self.block) + _numbered([*back[::-1], stays], self.block)
        self.forwards_left = [0] * len(limits)
        for row in chosen:
            for w, count in Counter(row).items():
                self.forwards_left[self.home[w]] += count
        self.tasks = [_numbers(len(chosen[0]), self.stages, self.block, s) for s in range(self.stages)]  # forwards, by stage

    def _first_inputs(self) -> _Inboxes:
        """Every micro-batch is at the first stage."""
        forwards: list[list[_Input]] = [[] for _ in self.limits]
        for task in self.tasks[0]:
            forwards[self.home[self.worker[task]]].append((task, 0.0, 0.0))
        return forwards, [[] for _ in self.limits]

    def _turns(self) -> tuple[list[list[int]], list[list[int]]] | None:
        """What devices with several stages do in turn, forwards and backwards, last first; others take what comes."""
        if self.block == self.stages:
            return None
        turns: tuple[list[list[int]], list[list[int]]] = ([[] for _ in self.limits], [[] for _ in self.limits])
        for task in sorted([task for row in self.tasks for task in row], reverse=True):
            turns[0][self.home[self.worker[task]]].append(task)
            turns[1][self.home[self.worker[task + self.backwards]]].append(task + self.backwards)
        return turns

    def run(self) -> Timeline:
        """Takes the ends of tasks in order of time: what a task made is sent, and whoever is free then and has an input begins a task."""
        forwards_left, limits, seconds, hops = self.forwards_left, self.limits, self.seconds, self.hops
        worker, home, block, backwards_begin = self.worker, self.home, self.block, self.backwards
        (forwards, backwards), turns = self._first_inputs(), self._turns()
        log = _Log(len(home)) if turns else None
        held, most_held = [0] * len(limits), [0] * len(limits)
        free_since, transfer = [0.0] * len(limits), [0.0] * len(limits)  # busy devices: since _BUSY
        ends: list[tuple[float, int, int]] = []  # time, device, task
        link_free: dict[int, float] = {}
        looking: Iterable[int] = range(len(limits))
        now, patience = 0.0, _STRICT
        while True:
            for device in looking:
                is_forward = forwards_left[device] > 0 and (held[device] < limits[device] or patience == _BEYOND_LIMIT)
                inbox = forwards[device] if is_forward else backwards[device]
                if not inbox:
                    if not (patience and is_forward and backwards[device]):
                        continue
                    is_forward, inbox = False, backwards[device]
                start = now if patience else free_since[device]
                if turns:
                    turn = turns[not is_forward][device]
                    if inbox[0][0] != turn[-1] and not patience:
                        continue
                    task, arrival, behind = heappop(inbox)
                    turn.remove(task) if task != turn[-1] else turn.pop()
                elif inbox[0][1] <= start or len(inbox) == 1:
                    task, arrival, behind = heappop(inbox)
                else:
                    task, arrival, behind = _take(inbox, start)
                if arrival > start:
                    start, transfer[device] = arrival, behind
                if is_forward:
                    forwards_left[device] -= 1
                    held[device] = holding = held[device] + 1
                    if holding > most_held[device]:
                        most_held[device] = holding
                else:
                    held[device] -= 1
                free_since[device] = _BUSY
                heappush(ends, (start + seconds[task], device, task))
            if not ends:
                if patience == _BEYOND_LIMIT:
                    break
                looking, patience = range(len(limits)), patience + 1
                continue
            now, device, task = heappop(ends)
            patience = _STRICT
            free_since[device] = now
            behind = transfer[device]
            if log:
                log.note(worker[task], task < backwards_begin, now, behind)
            hop = hops[task]
            looking = (device,)
            if hop is not None:
                occupancy, latency, link = hop
                sent = now
                if link >= 0:
                    queued = link_free.get(link, 0.0)
                    if queued > now:
                        sent = queued
                    link_free[link] = sent + occupancy
                arrival = sent + occupancy + latency
                inboxes = forwards if task < backwards_begin else backwards
                task += block
                receiver = home[worker[task]]
                heappush(inboxes[receiver], (task, arrival, behind + arrival - now))
                if free_since[receiver] != _BUSY and receiver != device:
                    looking = (device, receiver)
            elif task < backwards_begin:  # the loss: its gradient is here at once
                heappush(backwards[device], (task + block - self.stages * block + backwards_begin, now, behind))
        if log:
            return Timeline(now, self._by_stage(log.finish), self._by_stage(log.most_held), self._by_stage(log.transfer))
        # where a device has one stage, what it did last was its last backward
        finish, behind_finish = ([row[device] for device in home] for row in (free_since, transfer))
        most = [most_held[device] for device in home]
        return Timeline(now, self._by_stage(finish), self._by_stage(most), self._by_stage(behind_finish))

    def _by_stage(self, row: list[_T]) -> list[list[_T]]:
        return [row[first:end] for first, end in pairwise(self.firsts)]


class _Log:
    """What workers that share devices did."""

    def __init__(self, workers: int) -> None:
        self.finish, self.transfer = [0.0] * workers, [0.0] * workers
        self.most_held, self._holding = [0] * workers, [0] * workers

    def note(self, who: int, is_forward: bool, now: float, transfer: float) -> None:
        """A worker ended a task."""
        if is_forward:
            self._holding[who] += 1
            self.most_held[who] = max(self.most_held[who], self._holding[who])
        else:
            self._holding[who] -= 1
            self.finish[who], self.transfer[who] = now, transfer


def _numbers(micro_batches: int, stages: int, block: int, stage: int) -> list[int]:
    """The tasks of a stage, micro-batch by micro-batch."""
    return [(m // block * stages + stage) * block + m % block for m in range(micro_batches)]


def _numbered(rows: Sequence[Sequence[_T]], block: int) -> list[_T]:
    """What belongs to each task, from rows by stage and micro-batch; numbers that the last block leaves over have what comes first."""
    spare = -len(rows[0]) % block
    padded = [[*row, *[row[0]] * spare] for row in rows]
    return [item for begin in range(0, len(padded[0]), block) for row in padded for item in row[begin : begin + block]]


def _take(inbox: list[_Input], now: float) -> _Input:
    """Removes the preferred of the inputs that have arrived, or the one that will arrive first."""
    here = [item for item in inbox if item[1] <= now]
    taken = min(here) if here else min(inbox, key=lambda item: item[1])
    inbox.remove(taken)
    heapify(inbox)
    return taken
