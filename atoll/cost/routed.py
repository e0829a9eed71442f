"""Micro-batches on any routes through stages of any numbers of replicas, played in order of time; no device has two stages.

A replica keeps to 1F1B's policy: a forward while there is room, else a backward, waiting for either if need be (taking whatever is ready
proved up to 10% slower). Of what has arrived it takes the earliest micro-batch. Should all wait in a circle, whoever has another task ready
takes it. A link queues for one sender alone, so when a task begins, it is known when its output arrives: the beginnings of tasks are all
the events there are.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, pairwise
from math import inf
from typing import TypeVar

from atoll.cost.workers import Hops, Timeline, Worker

__all__ = ["play_routes"]

_T = TypeVar("_T")
_Input = tuple[int, float, float]  # micro-batch, arrival, seconds of transfer on the chain of waits behind it
_Way = tuple[float, float, int]  # how long a link is held, what passes after that until the arrival, the link; -1 where nothing ever queues


def play_routes(
    workers: Sequence[Sequence[Worker]],
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
        workers: Sequence[Sequence[Worker]],
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
