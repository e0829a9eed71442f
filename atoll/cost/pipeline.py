"""Pipeline schedules, simulated event by event: when every micro-batch is where, and how long the step is.

Two engines give the same answer where both apply. `column_seconds` walks the recurrences of 1F1B and GPipe through one column of stages and
leaps over the steady part once it repeats exactly; `simulate` plays any plan — unequal replicas, any routing, virtual stages, links shared
by several boundaries — with a queue of events. Its policy is 1F1B's: forward while there is room, else backward, waiting for either if need
be (taking whatever is ready proved up to 10% slower); should all wait in a circle, whoever has another task ready takes it. The order it
finds is one that a runtime can follow.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Hop", "Timeline", "Worker", "column_seconds", "route", "simulate"]


class Hop(NamedTuple):
    """A transfer between two replicas: how long it holds its link, and how long after that it arrives."""

    occupancy: float
    latency: float
    link: int  # transfers on the same link queue for it; -1 for none


NO_HOP = Hop(0.0, 0.0, -1)


class Worker(NamedTuple):
    """A replica of a stage as the simulator sees it."""

    forward: float
    backward: float
    device: int  # replicas of several virtual stages may share one


class Timeline(NamedTuple):
    """The end of all forwards and backwards, and what each worker did (indexed as given, stage by stage)."""

    seconds: float
    finish: list[list[float]]  # when each worker ended its last backward
    busy: list[list[float]]
    in_flight: list[list[int]]  # most micro-batches held at once


def route(counts: Sequence[int]) -> list[int]:
    """Which replica takes each micro-batch, in order: every replica gets its count, spread as evenly as can be."""
    total = sum(counts)
    taken = [0] * len(counts)
    order = []
    for i in range(1, total + 1):
        choice = max(range(len(counts)), key=lambda r: (counts[r] * i / total - taken[r], -r) if taken[r] < counts[r] else (-1e9, -r))
        taken[choice] += 1
        order.append(choice)
    return order


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
    round maps the three lists below by maxima and sums, so once a round moves all of them by the same step, every later one does.
    """
    stages = len(forward)
    free = [0.0] * stages  # when each stage ends what was given to it so far
    onward_free = [0.0] * stages  # when each link ends what was given to it so far
    back_free = [0.0] * stages
    hops = list(zip(forward, backward, (*onward, NO_HOP), (NO_HOP, *back), strict=True))
    came_back = [0.0] * (stages + 1)  # when the gradient of the next backward arrives, from stage s + 1
    m = 0
    while m < micro_batches + stages:
        before = free[:], onward_free[:], back_free[:]
        arrival = 0.0
        for s, (forth_seconds, back_seconds, ahead, behind) in enumerate(hops):
            end = free[s]
            if m < micro_batches:
                end = (end if end > arrival else arrival) + forth_seconds
                start = onward_free[s]
                onward_free[s] = start = (start if start > end else end) + ahead[0]
                arrival = start + ahead[1]
            if 0 <= m - stages + s + 1 < micro_batches:
                gradient = came_back[s]
                end = (end if end > gradient else gradient) + back_seconds
                start = back_free[s]
                back_free[s] = start = (start if start > end else end) + behind[0]
                came_back[s - 1] = start + behind[1]
            free[s] = end
        m += 1
        if stages < m < micro_batches - 1 and (step := _common_step((free, onward_free, back_free), before)):
            leap = step * (micro_batches - 1 - m)
            free, onward_free, back_free, came_back = ([value + leap for value in row] for row in (free, onward_free, back_free, came_back))
            came_back[stages - 1] = 0.0  # the last stage waits for no gradient
            m = micro_batches - 1
    return max(free), free


def _common_step(after: tuple[list[float], ...], before: tuple[list[float], ...]) -> float:
    """By how much every value grew, or 0 where they grew differently."""
    step = after[0][0] - before[0][0]
    slack = 1e-12 + 1e-9 * step
    if abs(after[0][-1] - before[0][-1] - step) > slack:  # most rounds end here
        return 0.0
    for row, old in zip(after, before, strict=True):
        for value, was in zip(row, old, strict=True):
            if not -slack <= value - was - step <= slack:
                return 0.0
    return step


def simulate(
    workers: Sequence[Sequence[Worker]],
    routes: Sequence[Sequence[int]],
    hops: dict[tuple[int, int, int, int], Hop],
    schedule: str,
    limits: Sequence[int],
) -> Timeline:
    """Plays a step. `routes[s][m]` is the worker of stage s for micro-batch m; `hops[s, a, t, b]` leads from worker a of stage s to worker
    b of the neighbouring stage t; `limits[d]` bounds the micro-batches device d may hold."""
    return _Simulation(workers, routes, hops, schedule, limits).run()


_Task = tuple[int, int, int]  # order of preference, micro-batch, stage


class _Simulation:
    def __init__(
        self,
        workers: Sequence[Sequence[Worker]],
        routes: Sequence[Sequence[int]],
        hops: dict[tuple[int, int, int, int], Hop],
        schedule: str,
        limits: Sequence[int],
    ) -> None:
        self.workers, self.routes, self.hops = workers, routes, hops
        self.stages = len(workers)
        devices = len(limits)
        # GPipe holds everything: its limit is never reached before the last forward
        self.limits = [len(routes[0]) * self.stages + 1] * devices if schedule == "gpipe" else limits
        self.group = max(
            1, len({worker.device for row in workers for worker in row[:1]})
        )  # interleaving turns to another stage after so many
        self.events: list[tuple[float, int, int, int]] = []  # time; 0 forward arrives, 1 backward arrives, 2 done; stage; micro-batch
        self.link_free: dict[int, float] = {}
        self.free = [True] * devices
        self.held = [0] * devices
        self.forwards: list[list[_Task]] = [[] for _ in range(devices)]
        self.backwards: list[list[_Task]] = [[] for _ in range(devices)]
        self.forwards_left = [0] * devices
        for s, choices in enumerate(routes):
            for choice in choices:
                self.forwards_left[workers[s][choice].device] += 1
        finish, busy = ([[0.0] * len(row) for row in workers] for _ in range(2))
        self.holding = [[0] * len(row) for row in workers]
        self.timeline = Timeline(0.0, finish, busy, [[0] * len(row) for row in workers])

    def run(self) -> Timeline:
        now = 0.0
        self.events.extend((0.0, 0, 0, m) for m in range(len(self.routes[0])))
        while self.events or self._release(now):
            now = self.events[0][0]
            together = now + 1e-12 * now  # sums in another order differ in the last bits: what happens together is known together
            touched: set[int] = set()
            while self.events and self.events[0][0] <= together:
                touched.add(self._take(*heapq.heappop(self.events)[1:]))
            for device in touched:
                if self.free[device]:
                    self._start(device, now, strict=True)
        return self.timeline._replace(seconds=now)

    def _take(self, kind: int, stage: int, m: int) -> int:
        """Notes what an event says; returns the device it concerns."""
        device = self.workers[stage][self.routes[stage][m]].device
        if kind == 2:
            self.free[device] = True
        elif kind == 1:
            heapq.heappush(self.backwards[device], (m // self.group * self.stages - stage, m, stage))
        else:
            heapq.heappush(self.forwards[device], (m // self.group * self.stages + stage, m, stage))
        return device

    def _release(self, now: float) -> bool:
        """When everyone waits for the task that is next in its order, whoever has another ready takes it; whether anyone could."""
        for device, free in enumerate(self.free):
            if free:
                self._start(device, now, strict=False)
        return bool(self.events)

    def _start(self, device: int, now: float, strict: bool) -> None:
        """Gives a free device its next task: a forward while it has room, else a backward, waiting for either if need be."""
        room = self.forwards_left[device] > 0 and self.held[device] < self.limits[device]
        if room and self.forwards[device]:
            self._run_forward(device, now)
        elif self.backwards[device] and not (room and strict):
            self._run_backward(device, now)

    def _run_forward(self, device: int, now: float) -> None:
        _, m, stage = heapq.heappop(self.forwards[device])
        choice = self.routes[stage][m]
        worker = self.workers[stage][choice]
        end = now + worker.forward
        self.forwards_left[device] -= 1
        self.held[device] += 1
        self.holding[stage][choice] += 1
        row = self.timeline.in_flight[stage]
        row[choice] = max(row[choice], self.holding[stage][choice])
        self._occupy(device, stage, choice, m, end, worker.forward)
        if stage + 1 < self.stages:
            self._send(end, stage, choice, stage + 1, 0, m)
        else:
            heapq.heappush(self.events, (end, 1, stage, m))

    def _run_backward(self, device: int, now: float) -> None:
        _, m, stage = heapq.heappop(self.backwards[device])
        choice = self.routes[stage][m]
        worker = self.workers[stage][choice]
        end = now + worker.backward
        self.held[device] -= 1
        self.holding[stage][choice] -= 1
        self._occupy(device, stage, choice, m, end, worker.backward)
        self.timeline.finish[stage][choice] = end
        if stage:
            self._send(end, stage, choice, stage - 1, 1, m)

    def _occupy(self, device: int, stage: int, choice: int, m: int, end: float, seconds: float) -> None:
        self.free[device] = False
        self.timeline.busy[stage][choice] += seconds
        heapq.heappush(self.events, (end, 2, stage, m))

    def _send(self, end: float, stage: int, choice: int, to: int, kind: int, m: int) -> None:
        hop = self.hops[stage, choice, to, self.routes[to][m]]
        start = end
        if hop.link >= 0:
            start = max(end, self.link_free.get(hop.link, 0.0))
            self.link_free[hop.link] = start + hop.occupancy
        heapq.heappush(self.events, (start + hop.occupancy + hop.latency, kind, to, m))
