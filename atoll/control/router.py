"""Router: which worker of a stage gets the next micro-batch — interleaved weighted routing by measured throughput.

Every peer has an expected finish time. The least gets the task and its time grows by the task's size divided by its moving-average
throughput, so that work is shared in proportion to speed without anybody being asked. A new peer, or one whose ban is over, enters at
the current minimum (SWARM, ICML 2023, section 3.2).

A path stays in a process that also hosts the next stage, where that worker's turn is at most one task away: it saves the link. Its time
grows as anybody's, so nobody gets more than a task beyond its share for it.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from atoll.control.messages import Peer
from atoll.control.multi_stage import process_of

__all__ = ["Router", "StageRouter"]

SMOOTHING = 0.1
LONGEST_BAN = 8  # doublings

Entry: TypeAlias = tuple[float, int, str]
"""(expected finish time, turn, worker)."""


class _Known:
    __slots__ = ("peer", "speed", "banned_until", "bans", "entry")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.speed = peer.speed
        self.banned_until = 0.0
        self.bans = 0
        self.entry: Entry | None = None  # in the heap; another entry of the same name is out of date


class StageRouter:
    """The peers of one stage as one feeder sees them."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._known: dict[str, _Known] = {}
        self._heap: list[Entry] = []
        self._by_process: dict[str, list[str]] = {}
        self._typical = 1.0
        self._turns = 0

    def update(self, peers: Iterable[Peer]) -> set[str]:
        """These are the usable peers now; gives those who are not any more. One with a new incarnation is new, and the old one gone."""
        current = {peer.worker: peer for peer in peers}
        gone = {name for name, known in self._known.items() if name not in current or current[name].incarnation != known.peer.incarnation}
        for name in gone:
            del self._known[name]
        for name, peer in current.items():
            known = self._known.get(name)
            if known is None:
                self._known[name] = _Known(peer)
            elif peer.speed:
                known.speed = peer.speed
        speeds = [known.speed for known in self._known.values() if known.speed > 0]
        self._typical = sum(speeds) / len(speeds) if speeds else 1.0
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        self._by_process = {}
        for name in self._known:
            self._by_process.setdefault(process_of(name), []).append(name)
        self._enter()
        return gone

    def _is_current(self, entry: Entry) -> bool:
        known = self._known.get(entry[2])
        return known is not None and known.entry is entry

    def _enter(self) -> None:
        start = self._heap[0][0] if self._heap else 0.0
        newcomers = [name for name, known in self._known.items() if known.entry is None]
        self._random.shuffle(newcomers)  # so that several feeders do not all begin with the same peer
        for name in newcomers:
            self._push(start, name)

    def _push(self, time: float, name: str) -> None:
        entry = self._known[name].entry = (time, self._turn(), name)
        heapq.heappush(self._heap, entry)

    def pick(self, now: float, work: float, beside: str = "") -> str | None:
        """The peer to use for a task of `work` forwards; None when there is none. Banned ones only where nobody else is left.

        One in the process `beside` is used in place of the peer whose turn it is, if its own turn is at most one task away.
        """
        chosen = self._next(now)
        if chosen is None:
            return None
        near = self._near(beside, chosen, now, work) if beside in self._by_process else None
        if near is not None:
            heapq.heappush(self._heap, chosen)
            chosen = near
        self._push(chosen[0] + self._seconds(chosen[2], work), chosen[2])
        return chosen[2]

    def _seconds(self, name: str, work: float) -> float:
        return work / (self._known[name].speed or self._typical)

    def _near(self, process: str, chosen: Entry, now: float, work: float) -> Entry | None:
        """The next of a process's peers, where it is as good as `chosen`."""
        if process_of(chosen[2]) == process or self._known[chosen[2]].banned_until > now:
            return None
        known = [self._known[name] for name in self._by_process[process]]
        entries = [peer.entry for peer in known if peer.entry is not None and peer.banned_until <= now]
        near = min(entries, default=None)
        return near if near is not None and near[0] <= chosen[0] + self._seconds(near[2], work) else None

    def _next(self, now: float) -> Entry | None:
        """Takes the peer whose turn it is out of the heap; banned ones stay in it, unless there are no others."""
        aside: list[Entry] = []
        chosen: Entry | None = None
        while self._heap and chosen is None:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            if self._known[entry[2]].banned_until <= now:
                chosen = entry
            else:
                aside.append(entry)
        if chosen is None:
            if not aside:
                return None
            chosen = min(aside, key=lambda entry: self._known[entry[2]].banned_until)
        for entry in aside:
            if entry is not chosen:  # a banned one comes back at the minimum, not with a backlog of turns
                later = self._known[entry[2]].entry = (max(entry[0], chosen[0]), entry[1], entry[2])
                heapq.heappush(self._heap, later)
        return chosen

    def _turn(self) -> int:
        """Equal peers take turns in order: by chance, queues would grow at some while others stand idle."""
        self._turns += 1
        return self._turns

    def observe(self, worker: str, work: float, seconds: float) -> None:
        """A task of so many forwards took this worker so long."""
        known = self._known.get(worker)
        if known is None or seconds <= 0:
            return
        sample = work / seconds
        known.speed = sample if known.speed == 0 else known.speed + SMOOTHING * (sample - known.speed)
        known.bans = 0

    def ban(self, worker: str, now: float, seconds: float) -> None:
        """Not used for a while: longer each time until something of it works again."""
        known = self._known.get(worker)
        if known is None:
            return
        known.banned_until = now + seconds * 2 ** min(known.bans, LONGEST_BAN)
        known.bans += 1

    def incarnation(self, worker: str) -> int:
        """Of a known peer; 0 when it is not known."""
        known = self._known.get(worker)
        return known.peer.incarnation if known else 0

    def __len__(self) -> int:
        return len(self._known)


class Router:
    """A path through all stages, one worker each."""

    def __init__(self, stages: int, randomness: random.Random) -> None:
        self.stages = tuple(StageRouter(randomness) for _ in range(stages))

    def update(self, routes: Sequence[Iterable[Peer]]) -> set[str]:
        """The usable peers of every stage; gives those who are not any more."""
        return set().union(*(stage.update(peers) for stage, peers in zip(self.stages, routes, strict=True)))

    def path(self, now: float, work: float) -> tuple[str, ...] | None:
        """A worker for every stage; None while a stage has nobody."""
        found: list[str] = []
        for stage in self.stages:
            if not len(stage):
                return None
            worker = stage.pick(now, work, process_of(found[-1]) if found else "")
            assert worker is not None
            found.append(worker)
        return tuple(found)
