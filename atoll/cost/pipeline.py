"""Pipeline schedules, played task by task: when every micro-batch is where, and how long the step is.

Both engines keep to the policy of `plan/schedule_policy.py`, as schedules do that runtimes follow: a forward while there is room, else a
backward, waiting for either if need be (taking whatever is ready proved up to 10% slower). Should all wait in a circle, whoever has another
task ready takes it. A link queues for one sender alone, so when a task begins, it is known when its output arrives.

`_Routes` is for micro-batches on any routes, where no device has two stages: of what has arrived a replica takes the earliest micro-batch.
`_VirtualStages` is for devices with several stages each, which take their tasks in Megatron-LM's order. Where a plan is a column of stages,
`column_seconds` gives the same answer faster; a test compares them.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, pairwise
from math import inf
from typing import NamedTuple, TypeVar

from atoll.cost.replica import ReplicaSeconds
from atoll.plan.schedule_policy import forward_next

__all__ = ["Counts", "Hop", "Hops", "NO_HOP", "Played", "Replicas", "StageReplica", "Timeline", "simulate"]

_T = TypeVar("_T")


class Hop(NamedTuple):
    """A transfer between two replicas: how long it holds its link, and how long after that it arrives."""

    occupancy: float  # as long as all that share the link need (see `sharing`)
    latency: float
    link: int  # transfers of one sender on the same link queue for it; no two senders name the same; -1 for none


NO_HOP = Hop(0.0, 0.0, -1)
Hops = dict[tuple[int, int], Hop]  # of one boundary and direction, by the replicas before and after the boundary


class StageReplica(NamedTuple):
    """A replica of a stage as the engines see it."""

    forward: float
    backward: float
    device: int  # replicas of several virtual stages may share one


Workers = Sequence[Sequence[StageReplica]]  # by stage
Routes = Sequence[Sequence[int]]  # by stage and micro-batch: which of the stage's workers


class Timeline(NamedTuple):
    """The end of all forwards and backwards, and what each worker did (indexed as given, stage by stage)."""

    seconds: float
    finish: list[list[float]]  # when each worker ended its last backward
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: list[list[float]]  # seconds of transfers on the chain of waits that led to its last backward


Replicas = list[list[ReplicaSeconds]]  # by stage
Counts = list[list[int]]  # micro-batches of each replica, by stage


class Played(NamedTuple):
    """What each replica of each stage did in a step."""

    finish: list[list[float]]  # when it ended its last backward
    busy: list[list[float]]
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: Callable[[int, int], float]  # by stage and replica: what transfers added to `finish`


def simulate(
    workers: Workers, routes: Routes, onward: Sequence[Hops], back: Sequence[Hops], schedule: str, limits: Sequence[int]
) -> Timeline:
    """Plays a step. `routes[s][m]` is the worker of stage s for micro-batch m; `onward[s][i, j]` leads from worker i of stage s to worker j
    of stage s+1, `back[s][i, j]` the other way; `limits[d]` bounds the micro-batches device d may hold."""
    # GPipe holds everything: its limit is never reached before the last forward
    bounds = [len(routes[0]) * len(workers) + 1] * len(limits) if schedule == "gpipe" else limits
    devices = [worker.device for row in workers for worker in row]
    if len(set(devices)) < len(devices):
        return _VirtualStages(workers, routes, onward, back, bounds).play()
    return _Routes(workers, routes, onward, back, bounds).play()


_Input = tuple[int, float, float]  # micro-batch, arrival, seconds of transfer on the chain of waits behind it
_Way = tuple[float, float, int]  # how long a link is held, what passes after that until the arrival, the link; -1 where nothing ever queues


class _Routes:
    """A step under way. Replicas are numbered stage by stage; replica r has two sides: 2r does its forwards, 2r + 1 its backwards."""

    def __init__(self, workers: Workers, routes: Routes, onward: Sequence[Hops], back: Sequence[Hops], limits: Sequence[int]) -> None:
        flat = list(chain.from_iterable(workers))
        count = len(flat)
        self.firsts = list(accumulate([len(row) for row in workers], initial=0))
        self.seconds = [seconds for worker in flat for seconds in worker[:2]]
        self.limits = [limits[worker.device] for worker in flat]
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

    def play(self) -> Timeline:
        """The whole step."""
        self._play()
        while self._break_circle():
            self._play()
        return _timeline(self.firsts, max(self.free), self.free, self.most_held, self.transfer)

    def _break_circle(self) -> bool:
        """Where everyone waits: lets those who wait for a forward go back, else those who have no room go forward; False at the end."""
        for wants_backward in (0, 1):
            waiting = [side for side in self.wanted if side & 1 == wants_backward and self.inboxes[side ^ 1]]
            if waiting:
                when = max(*self.free, *[arrival for inbox in self.inboxes for _, arrival, _ in inbox])
                for side in waiting:
                    self._begin(side ^ 1, when)
                return True
        return False

    def _play(self) -> None:
        """Until nobody has anything to do, task by task in the order in which they begin."""
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
            else:
                left[replica] -= 1
                held[replica] = holding = held[replica] + 1
                if holding > most_held[replica]:
                    most_held[replica] = holding
            wanted[replica] = following = 2 * replica if forward_next(left[replica], holding, limits[replica]) else 2 * replica + 1
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


def _timeline(firsts: list[int], seconds: float, finish: list[float], most_held: list[int], transfer: list[float]) -> Timeline:
    """From rows of workers to rows by stage; `firsts` are the numbers of the stages' first workers."""

    def by_stage(row: list[_T]) -> list[list[_T]]:
        return [row[first:end] for first, end in pairwise(firsts)]

    return Timeline(seconds, by_stage(finish), by_stage(most_held), by_stage(transfer))


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


_IN_TURN, _OUT_OF_TURN, _BEYOND_LIMIT = range(3)  # what a device may do: each only where nobody could do the one before


class _VirtualStages:
    """A step under way on devices that keep to an order: only where all wait in a circle does time decide what is done next.

    Tasks are numbered as a device prefers them: forwards by (block of micro-batches, stage, micro-batch), then backwards by (block, stage
    from the last, micro-batch). A block has as many micro-batches as the pipeline has devices: a device with several stages turns to the
    next one after a block, as in Megatron-LM. What follows a task on the next stage is numbered a block further on.
    """

    def __init__(self, workers: Workers, routes: Routes, onward: Sequence[Hops], back: Sequence[Hops], limits: Sequence[int]) -> None:
        flat = list(chain.from_iterable(workers))
        self.limits = limits
        self.firsts = list(accumulate([len(row) for row in workers], initial=0))  # workers are numbered stage by stage
        self.home = [worker.device for worker in flat]
        chosen = [[first + choice for choice in row] for first, row in zip(self.firsts, routes, strict=False)]
        self.block = block = len({self.home[row[0]] for row in chosen})
        self.worker = _numbered(chosen, block) + _numbered(chosen[::-1], block)
        self.backwards = len(self.worker) // 2  # where their numbers begin
        self.to_backward = self.backwards - (len(workers) - 1) * block  # from a last forward, whose gradient is there at once
        self.seconds = [flat[w].forward for w in self.worker[: self.backwards]] + [flat[w].backward for w in self.worker[self.backwards :]]
        stays: list[Hop | None] = [None] * len(chosen[0])  # after the last forward and the last backward
        self.hops = _numbered([*_by_micro_batch(routes, onward), stays], block)
        self.hops += _numbered([*_by_micro_batch(routes, back)[::-1], stays], block)
        self.turns: list[list[int]] = [[] for _ in range(2 * len(limits))]  # forwards of device d at 2d, backwards at 2d + 1; last first
        self.inputs: list[dict[int, tuple[float, float]]] = [{} for _ in self.turns]  # by task: arrival, transfers on the waits behind it
        for task in sorted([_number(s, m, len(workers), block) for s in range(len(workers)) for m in range(len(chosen[0]))], reverse=True):
            for number, side in ((task, 0), (task + self.backwards, 1)):
                self.turns[2 * self.home[self.worker[number]] + side].append(number)
        for m in range(len(chosen[0])):
            task = _number(0, m, len(workers), block)
            self.inputs[2 * self.home[self.worker[task]]][task] = (0.0, 0.0)
        self.held, self.free, self.transfer = [0] * len(limits), [0.0] * len(limits), [0.0] * len(limits)
        self.link_free: dict[int, float] = {}
        self.holding, self.most_held = [0] * len(flat), [0] * len(flat)  # by worker, as what follows
        self.finish, self.behind = [0.0] * len(flat), [0.0] * len(flat)

    def play(self) -> Timeline:
        """The whole step."""
        looking = list(range(len(self.limits)))
        while looking:
            device = looking.pop()
            while (task := self._next(device, _IN_TURN)) is not None:
                looking.append(self._do(device, task, self.free[device]))
            looking = looking or self._break_circle()
        return _timeline(self.firsts, max(self.free), self.finish, self.most_held, self.behind)

    def _next(self, device: int, freedom: int) -> int | None:
        """The task that a device begins; None where it waits."""
        limit = self.limits[device] if freedom < _BEYOND_LIMIT else self.held[device] + 1
        side = 2 * device + (not forward_next(len(self.turns[2 * device]), self.held[device], limit))
        if freedom == _IN_TURN:
            turn = self.turns[side]
            return turn[-1] if turn and turn[-1] in self.inputs[side] else None
        inputs = self.inputs[side] or self.inputs[2 * device + 1]
        return min(inputs, default=None)

    def _break_circle(self) -> list[int]:
        """Where everyone waits: who has another task ready does it. Gives the devices that may go on; none at the end."""
        for freedom in (_OUT_OF_TURN, _BEYOND_LIMIT):
            ready = [(device, task) for device in range(len(self.limits)) if (task := self._next(device, freedom)) is not None]
            if ready:
                now = max(self.free)
                return [one for device, task in ready for one in (device, self._do(device, task, now))]
        return []

    def _do(self, device: int, task: int, begin: float) -> int:
        """Does a task, as soon as its input has arrived; gives the device that its output is for."""
        is_backward, who = task >= self.backwards, self.worker[task]
        turn = self.turns[2 * device + is_backward]
        turn.remove(task) if task != turn[-1] else turn.pop()
        arrival, behind = self.inputs[2 * device + is_backward].pop(task)
        if arrival > begin:
            begin, self.transfer[device] = arrival, behind
        behind = self.transfer[device]
        end = self.free[device] = begin + self.seconds[task]
        self.held[device] += -1 if is_backward else 1
        self.holding[who] += -1 if is_backward else 1
        self.most_held[who] = max(self.most_held[who], self.holding[who])
        if is_backward:
            self.finish[who], self.behind[who] = end, behind
        hop = self.hops[task]
        if hop is None:
            if not is_backward:
                self.inputs[2 * device + 1][task + self.to_backward] = (end, behind)
            return device
        sent = end
        if hop.link >= 0:
            sent = max(end, self.link_free.get(hop.link, 0.0))
            self.link_free[hop.link] = sent + hop.occupancy
        arrival = sent + hop.occupancy + hop.latency
        receiver = self.home[self.worker[task + self.block]]
        self.inputs[2 * receiver + is_backward][task + self.block] = (arrival, behind + arrival - end)
        return receiver


def _by_micro_batch(routes: Sequence[Sequence[int]], hops: Sequence[Hops]) -> list[list[Hop | None]]:
    return [[row[pair] for pair in zip(*ways, strict=True)] for ways, row in zip(pairwise(routes), hops, strict=True)]


def _number(stage: int, micro_batch: int, stages: int, block: int) -> int:
    """Of a forward."""
    return (micro_batch // block * stages + stage) * block + micro_batch % block


def _numbered(rows: Sequence[Sequence[_T]], block: int) -> list[_T]:
    """What belongs to each task, from rows by stage and micro-batch; numbers that the last block leaves over have what comes first."""
    spare = -len(rows[0]) % block
    padded = [[*row, *[row[0]] * spare] for row in rows]
    return [item for begin in range(0, len(padded[0]), block) for row in padded for item in row[begin : begin + block]]
