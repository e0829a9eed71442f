"""Pipeline schedules, played task by task: when every micro-batch is where, and how long the step is.

Both engines keep to the policy of `plan/schedule_policy.py`, as schedules do that runtimes follow: a forward while there is room, else a
backward, waiting for either if need be (taking whatever is ready proved up to 10% slower). Should all wait in a circle, whoever has another
task ready takes it. A link queues for one sender alone, so when a task begins, it is known when its output arrives.

`play_routes` is for micro-batches on any routes, where no device has two stages: of what has arrived a replica takes the earliest
micro-batch. `play_virtual_stages` is for devices with several stages each, which take their tasks in Megatron-LM's order. Where a plan is a
column of stages, `column_seconds` gives the same answer faster; a test compares them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, pairwise
from math import inf
from typing import TypeVar

from atoll.cost.workers import Hop, Hops, StageReplica, Timeline
from atoll.plan.schedule_policy import forward_next

__all__ = ["play_routes", "play_virtual_stages", "simulate"]

_T = TypeVar("_T")
_Input = tuple[int, float, float]  # micro-batch or task, arrival, seconds of transfer on the chain of waits behind it
_Way = tuple[float, float, int]  # how long a link is held, what passes after that until the arrival, the link; -1 where nothing ever queues


def play_routes(
    workers: Sequence[Sequence[StageReplica]],
    routes: Sequence[Sequence[int]],
    onward: Sequence[Hops],
    back: Sequence[Hops],
    limits: Sequence[Sequence[int]],
) -> Timeline:
    """Plays a step: `routes[s][m]` is the replica of stage s for micro-batch m, `limits[s][i]` bounds what replica i of stage s holds."""
    game = _Game(workers, routes, onward, back, limits)
    game.play()
    while game.break_circle():
        game.play()
    firsts = game.firsts
    return Timeline(max(game.free), _by_stage(firsts, game.free), _by_stage(firsts, game.most_held), _by_stage(firsts, game.transfer))


def _by_stage(firsts: list[int], row: list[_T]) -> list[list[_T]]:
    return [row[first:end] for first, end in pairwise(firsts)]


class _Game:
    """A step under way. Replicas are numbered stage by stage; replica r has two sides: 2r does its forwards, 2r + 1 its backwards."""

    def __init__(
        self,
        workers: Sequence[Sequence[StageReplica]],
        routes: Sequence[Sequence[int]],
        onward: Sequence[Hops],
        back: Sequence[Hops],
        limits: Sequence[Sequence[int]],
    ) -> None:
        flat = list(chain.from_iterable(workers))
        count = len(flat)
        self.firsts = list(accumulate([len(row) for row in workers], initial=0))
        self.seconds = [seconds for worker in flat for seconds in worker[:2]]
        self.limits = list(chain.from_iterable(limits))
        self.left = [0] * count  # forwards to be done
        self.held, self.most_held = [0] * count, [0] * count
        self.free, self.transfer = [0.0] * count, [0.0] * count  # when the last task ends; transfers on the chain of waits behind it
        self.wanted = list(range(0, 2 * count, 2))  # the side that does the next task
        self.due = [inf] * count  # when the next task begins, as far as is known
        self.events: list[tuple[float, int]] = []  # those times, and outdated ones
        self.inboxes: list[list[_Input]] = [[] for _ in self.seconds]  # heaps, by side
        self.receivers: list[list[int] | None] = [None] * (2 * count)  # by side: the sides that micro-batches go to; None for nowhere
        self.ways: list[dict[int, _Way]] = [{} for _ in self.seconds]  # by side and receiving side
        self.link_free = [0.0] * (1 + max([hop.link for row in chain(onward, back) for hop in row.values()], default=-1))
        self._connect(routes, onward, back)
        for side in range(0, 2 * self.firsts[1], 2):
            if self.inboxes[side]:
                self._begin(side, 0.0)

    def _connect(self, routes: Sequence[Sequence[int]], onward: Sequence[Hops], back: Sequence[Hops]) -> None:
        firsts, last = self.firsts, len(routes) - 1
        sides = [[2 * (first + i) for i in row] for first, row in zip(firsts, routes, strict=False)]
        returning = [[side + 1 for side in row] for row in sides]
        for s, row in enumerate(sides):
            after = sides[s + 1] if s < last else returning[s]  # the loss: its gradient is there at once
            before = returning[s - 1] if s else None
            for side in range(2 * firsts[s], 2 * firsts[s + 1], 2):
                self.receivers[side], self.receivers[side + 1] = after, before
                self.left[side >> 1] = row.count(side)
                self.ways[side][side + 1] = (0.0, 0.0, -1)
        for s, (forth, back_again) in enumerate(zip(onward, back, strict=True)):
            here, there = 2 * firsts[s], 2 * firsts[s + 1]
            for (i, j), hop in forth.items():
                self.ways[here + 2 * i][there + 2 * j] = hop
            for (i, j), hop in back_again.items():
                self.ways[there + 2 * j + 1][here + 2 * i + 1] = hop
        for ways, seconds in zip(self.ways, self.seconds, strict=True):
            _drop_idle_queues(ways, seconds)
        for m, side in enumerate(sides[0]):
            self.inboxes[side].append((m, 0.0, 0.0))

    def _begin(self, side: int, when: float) -> None:
        """A replica that waits will do a task of that side."""
        self.wanted[side >> 1], self.due[side >> 1] = side, when
        heappush(self.events, (when, side >> 1))

    def break_circle(self) -> bool:
        """Where everyone waits: lets those who wait for a forward go back, else those who have no room go forward; False at the end."""
        for wants_backward in (0, 1):
            waiting = [side for side in self.wanted if side & 1 == wants_backward and self.inboxes[side ^ 1]]
            if waiting:
                inputs = [item for inbox in self.inboxes for item in inbox]
                when = max(*self.free, max(arrival for _, arrival, _ in inputs))
                for side in waiting:
                    self._begin(side ^ 1, when)
                return True
        return False

    def play(self) -> None:
        """Until nobody has anything to do, task by task in the order in which they begin. `forward_next` is written out: searches spend
        most of their time here."""
        seconds, limits, left, held, most_held = self.seconds, self.limits, self.left, self.held, self.most_held
        free, transfer, wanted, due, inboxes = self.free, self.transfer, self.wanted, self.due, self.inboxes
        receivers, ways, link_free, events = self.receivers, self.ways, self.link_free, self.events
        while events:
            now, replica = heappop(events)
            if due[replica] != now:
                continue
            side = wanted[replica]
            inbox = inboxes[side]
            m, arrival, behind = heappop(inbox) if inbox[0][1] <= now else _take(inbox, now)
            if arrival > free[replica]:
                transfer[replica] = behind
            end = free[replica] = now + seconds[side]
            if side & 1:
                held[replica] = holding = held[replica] - 1
                following = side - 1 if left[replica] and holding < limits[replica] else side
            else:
                left[replica] -= 1
                held[replica] = holding = held[replica] + 1
                if holding > most_held[replica]:
                    most_held[replica] = holding
                following = side if left[replica] and holding < limits[replica] else side + 1
            wanted[replica] = following
            row = receivers[side]
            if row:
                to = row[m]
                occupancy, delay, link = ways[side][to]
                if link < 0:
                    arrival = end + delay
                else:
                    sent = link_free[link]
                    sent = link_free[link] = (sent if sent > end else end) + occupancy
                    arrival = sent + delay
                heappush(inboxes[to], (m, arrival, transfer[replica] + arrival - end))
                receiver = to >> 1
                if wanted[receiver] == to and arrival < due[receiver] and receiver != replica:
                    when = free[receiver]
                    if when < arrival:
                        when = arrival
                    if when < due[receiver]:
                        due[receiver] = when
                        heappush(events, (when, receiver))
            inbox = inboxes[following]
            if inbox:
                if inbox[0][1] > end:
                    end = max(end, min([item[1] for item in inbox]))
                due[replica] = end
                heappush(events, (end, replica))
            else:
                due[replica] = inf


def _take(inbox: list[_Input], now: float) -> _Input:
    """Removes the earliest micro-batch of those that have arrived."""
    taken = min([item for item in inbox if item[1] <= now])
    inbox.remove(taken)
    heapify(inbox)
    return taken


def _drop_idle_queues(ways: dict[int, _Way], seconds: float) -> None:
    """Tasks that are further apart than a link needs for each of their transfers never make one wait: they are a delay alone."""
    queues = {hop[2] for hop in ways.values() if hop[0] > seconds}
    for to, (occupancy, latency, link) in ways.items():
        if link < 0 or link not in queues:
            ways[to] = (0.0, occupancy + latency, -1)


_Inboxes = tuple[list[list[_Input]], list[list[_Input]]]  # heaps of forwards and of backwards, by device
_STRICT, _BACKWARD_OUT_OF_TURN, _BEYOND_LIMIT = range(3)  # what a free device may do: each only where nobody could do the one before
_BUSY = -1.0


def play_virtual_stages(
    workers: Sequence[Sequence[StageReplica]],
    routes: Sequence[Sequence[int]],
    onward: Sequence[Hops],
    back: Sequence[Hops],
    limits: Sequence[int],
) -> Timeline:
    """Plays a step: `routes[s][m]` is the worker of stage s for micro-batch m, `limits[d]` bounds the micro-batches device d may hold."""
    return _Simulation(workers, routes, onward, back, limits).run()


class _Simulation:
    """A step to be played.

    Tasks are numbered as a device prefers them: forwards by (block of micro-batches, stage, micro-batch), then backwards by (block, stage
    from the last, micro-batch). A block has as many micro-batches as the pipeline has devices: a device with several stages turns to the
    next one after a block, as in Megatron-LM. What follows a task on the next stage is numbered a block further on.
    """

    def __init__(
        self,
        workers: Sequence[Sequence[StageReplica]],
        routes: Sequence[Sequence[int]],
        onward: Sequence[Hops],
        back: Sequence[Hops],
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
        self.seconds = [flat[w].forward for w in self.worker[: self.backwards]] + [flat[w].backward for w in self.worker[self.backwards :]]
        stays: list[Hop | None] = [None] * len(chosen[0])  # after the last forward and the last backward
        forth: list[list[Hop | None]] = [*_by_micro_batch(routes, onward), stays]
        returning: list[list[Hop | None]] = [*_by_micro_batch(routes, back)[::-1], stays]
        self.hops = _numbered(forth, self.block) + _numbered(returning, self.block)
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

    def _turns(self) -> tuple[list[list[int]], list[list[int]]]:
        """What devices do in turn, forwards and backwards, last first."""
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
        log = _Log(len(home))
        held = [0] * len(limits)
        free_since, transfer = [0.0] * len(limits), [0.0] * len(limits)  # busy devices: since _BUSY
        ends: list[tuple[float, int, int]] = []  # time, device, task
        link_free: dict[int, float] = {}
        looking: Iterable[int] = range(len(limits))
        now, patience = 0.0, _STRICT
        while True:
            for device in looking:
                limit = limits[device] if patience < _BEYOND_LIMIT else held[device] + 1
                is_forward = forward_next(forwards_left[device], held[device], limit)
                inbox = forwards[device] if is_forward else backwards[device]
                if not inbox:
                    if not (patience and is_forward and backwards[device]):
                        continue
                    is_forward, inbox = False, backwards[device]
                start = now if patience else free_since[device]
                turn = turns[not is_forward][device]
                if inbox[0][0] != turn[-1] and not patience:
                    continue
                task, arrival, behind = heappop(inbox)
                turn.remove(task) if task != turn[-1] else turn.pop()
                if arrival > start:
                    start, transfer[device] = arrival, behind
                if is_forward:
                    forwards_left[device] -= 1
                    held[device] += 1
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
        return Timeline(now, self._by_stage(log.finish), self._by_stage(log.most_held), self._by_stage(log.transfer))

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


def _by_micro_batch(routes: Sequence[Sequence[int]], hops: Sequence[Hops]) -> list[list[Hop | None]]:
    return [[row[pair] for pair in zip(*ways, strict=True)] for ways, row in zip(pairwise(routes), hops, strict=True)]


def _numbers(micro_batches: int, stages: int, block: int, stage: int) -> list[int]:
    """The tasks of a stage, micro-batch by micro-batch."""
    return [(m // block * stages + stage) * block + m % block for m in range(micro_batches)]


def _numbered(rows: Sequence[Sequence[_T]], block: int) -> list[_T]:
    """What belongs to each task, from rows by stage and micro-batch; numbers that the last block leaves over have what comes first."""
    spare = -len(rows[0]) % block
    padded = [[*row, *[row[0]] * spare] for row in rows]
    return [item for begin in range(0, len(padded[0]), block) for row in padded for item in row[begin : begin + block]]


def simulate(
    workers: Sequence[Sequence[StageReplica]],
    routes: Sequence[Sequence[int]],
    onward: Sequence[Hops],
    back: Sequence[Hops],
    schedule: str,
    limits: Sequence[int],
) -> Timeline:
    """Plays a step. `routes[s][m]` is the worker of stage s for micro-batch m; `onward[s][i, j]` leads from worker i of stage s to worker j
    of stage s+1, `back[s][i, j]` the other way; `limits[d]` bounds the micro-batches device d may hold."""
    # GPipe holds everything: its limit is never reached before the last forward
    bounds = [len(routes[0]) * len(workers) + 1] * len(limits) if schedule == "gpipe" else limits
    devices = [worker.device for row in workers for worker in row]
    if len(set(devices)) < len(devices):
        return play_virtual_stages(workers, routes, onward, back, bounds)
    return play_routes(workers, routes, onward, back, [[bounds[worker.device] for worker in row] for row in workers])
