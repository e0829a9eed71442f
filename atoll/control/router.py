"""Router: which worker of a stage gets the next micro-batch — interleaved weighted routing by measured throughput.

Every peer has an expected finish time. The least gets the task and its time grows by the task's size divided by its moving-average
throughput, so that work is shared in proportion to speed without anybody being asked. A new peer, or one whose ban is over, enters at
the current minimum (SWARM, ICML 2023, section 3.2).
"""

import heapq
import random
from collections.abc import Iterable, Sequence

from atoll.control.messages import Peer

__all__ = ["Router", "StageRouter"]

SMOOTHING = 0.1
LONGEST_BAN = 8  # doublings


class _Known:
    __slots__ = ("peer", "speed", "banned_until", "bans", "queued")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.speed = peer.speed
        self.banned_until = 0.0
        self.bans = 0
        self.queued = False


class StageRouter:
    """The peers of one stage as one feeder sees them."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._known: dict[str, _Known] = {}
        self._heap: list[tuple[float, int, str]] = []
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
        self._heap = [entry for entry in self._heap if entry[2] in self._known and self._known[entry[2]].queued]
        heapq.heapify(self._heap)
        self._enter()
        return gone

    def _enter(self) -> None:
        start = self._heap[0][0] if self._heap else 0.0
        newcomers = [name for name, known in self._known.items() if not known.queued]
        self._random.shuffle(newcomers)  # so that several feeders do not all begin with the same peer
        for name in newcomers:
            self._known[name].queued = True
            heapq.heappush(self._heap, (start, self._turn(), name))

    def pick(self, now: float, work: float) -> str | None:
        """The peer to use for a task of `work` forwards; None when there is none. Banned ones only where nobody else is left."""
        aside: list[tuple[float, int, str]] = []
        chosen: tuple[float, int, str] | None = None
        while self._heap and chosen is None:
            entry = heapq.heappop(self._heap)
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
                heapq.heappush(self._heap, (max(entry[0], chosen[0]), entry[1], entry[2]))
        known = self._known[chosen[2]]
        heapq.heappush(self._heap, (chosen[0] + work / (known.speed or self._typical), self._turn(), chosen[2]))
        return chosen[2]

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
        found = []
        for stage in self.stages:
            if not len(stage):
                return None
            worker = stage.pick(now, work)
            assert worker is not None
            found.append(worker)
        return tuple(found)
