"""Devices with several (virtual) stages, played task by task in Megatron-LM's order.

A device does a forward while there is room, else a backward, each in turn; should all wait in a circle, whoever has another task ready
takes it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import TypeVar

from atoll.cost.workers import Hop, Hops, Timeline, Worker

__all__ = ["play_virtual_stages"]

_T = TypeVar("_T")
_Input = tuple[int, float, float]  # task, arrival, seconds of transfer on the chain of waits behind it
_Inboxes = tuple[list[list[_Input]], list[list[_Input]]]  # heaps of forwards and of backwards, by device
_STRICT, _BACKWARD_OUT_OF_TURN, _BEYOND_LIMIT = range(3)  # what a free device may do: each only where nobody could do the one before
_BUSY = -1.0


def play_virtual_stages(
    workers: Sequence[Sequence[Worker]],
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
        workers: Sequence[Sequence[Worker]],
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
                is_forward = forwards_left[device] > 0 and (held[device] < limits[device] or patience == _BEYOND_LIMIT)
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
