"""Feeder: starts the micro-batches leased to it, sends each along a path of its own, and tries again where no answer comes.

How many are under way at once follows from how long they take and how many come back in a second. Acknowledgements are hints: they tell
the feeder what need not be tried again and the coordinator, which has given the leases (`Leases`), when to seal. If one is lost or wrong,
work is done twice or a round more is needed; the sum is exact all the same.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.membership import Member, Members
from atoll.control.messages import Ack, Announce, Assignment, Attempt, FeederBeat, Finished, Forward, Order, Round, Run
from atoll.control.router import Router
from atoll.control.settings import BACKWARD_WORK, Settings
from atoll.control.world import MicroBatchSource, SwarmProcess

__all__ = ["Feeder", "Leases", "Window"]


class Window:
    """One waiting at every process, and those in hand or on their way: by Little's law the rate at which micro-batches come back, times
    what one takes when nothing is queued. More would only queue, and hide who is slow.

    `given` is three for every process and the least there is: enough where ways are short. What one takes unqueued is told by the quickest
    of a RUN, as that begins with nothing queued anywhere.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.given = 1
        self._under_way = 0.0
        self._quickest = math.inf  # of this RUN
        self._ends: deque[float] = deque()  # of the last ones of this RUN

    def begin(self) -> None:
        """A RUN opens."""
        self._quickest = math.inf
        self._ends.clear()

    def measured(self, now: float, seconds: float) -> None:
        """A micro-batch came back at the first try, after so long."""
        self._quickest = min(self._quickest, seconds)
        self._ends.append(now)
        while len(self._ends) > self.given + 1:
            self._ends.popleft()
        elapsed = now - self._ends[0]
        if len(self._ends) > self.given and elapsed > 0:
            self._under_way = self.given / elapsed * self._quickest

    @property
    def size(self) -> int:
        """Of the window."""
        return max(1, min(self._most, max(self.given, math.ceil(self._under_way + self.given / 3))))


WORK = 1.0 + BACKWARD_WORK


@dataclass(slots=True, eq=False)
class _Sample:
    """One leased micro-batch: which stages seem to own it, and the attempt under way."""

    micro_batch: int
    owned: set[int]
    owners: dict[int, tuple[str, int]] = field(default_factory=dict)  # who (and which incarnation) acknowledged a stage, in this lease
    number: int = 0
    starts: list[float] = field(default_factory=list)  # of all attempts in this lease
    attempt: Attempt | None = None
    path: tuple[str, ...] = ()
    passed: int = -1  # the last stage known to have done the forward
    began: float = 0.0
    deadline: float = 0.0
    payload: object = None


class Feeder:
    """One feeder process. `await run()` ends when the run is finished."""

    def __init__(
        self,
        node: SwarmProcess,
        feed: MicroBatchSource,
        settings: Settings,
        coordinators: tuple[str, ...],
        on_owned: Callable[["Feeder", Ack], None] | None = None,
    ) -> None:
        self.node = node
        self._on_owned = on_owned  # told of every acknowledgement believed
        self.feed, self.settings, self.coordinators = feed, settings, coordinators
        self.finished = False
        self.incarnation = 0
        self.retries = 0
        self.round: Round | None = None
        self.patience = AdaptiveTimeout(settings.patience_seconds, settings.heartbeat_seconds)
        self.router = Router(settings.stages, node.random)
        self._order: Order = (0, 0)
        self._echo = (0, 0)
        self._epoch = 0
        self._version = 0  # the step under way
        self._waiting: deque[_Sample] = deque()
        self._active: dict[int, _Sample] = {}
        self._finished: dict[int, _Sample] = {}
        self._window = Window(settings.in_flight)
        self._leased = 0
        self._progress = 0
        self._routes: tuple[object, ...] = ()

    async def run(self) -> None:
        """Feeds until the coordinator says the run is finished."""
        self.node.clock.spawn(self._tick())
        inbox = self.node.inbox
        while not self.finished:
            message = await inbox.take()
            if type(message) is Ack:
                self._on_ack(message)
            elif type(message) is Announce:
                self._on_announce(message)

    async def _tick(self) -> None:
        while not self.finished:
            self._beat()
            self._look_at_deadlines()
            await self.node.clock.sleep(self.settings.heartbeat_seconds)

    def _beat(self) -> None:
        beat = FeederBeat(
            self.node.name, self.incarnation, self.node.nonce, self._echo[1], self._echo[0], self.round, len(self._finished), self._progress
        )
        for coordinator in self.coordinators:
            self.node.transport.send(coordinator, beat)

    def _on_announce(self, announce: Announce) -> None:
        view, yours = announce.view, announce.yours
        if yours.nonce != self.node.nonce or yours.incarnation < self.incarnation:
            return
        order = (view.term, view.seq)
        if self._is_outdated(order):
            return
        self._order = order
        self._echo = max(self._echo, (view.term, view.beat))
        self.incarnation = yours.incarnation
        self._window.given = yours.window
        gone: set[str] = set()
        if yours.routes and yours.routes != self._routes:
            self._routes = yours.routes
            gone = self.router.update(yours.routes)
        phase = view.phase
        if yours.lost and type(phase) is Run and self.round == phase.opened:
            self._redo(frozenset(yours.lost))
        if gone:
            self._give_up_on(gone)
        if type(phase) is Run:
            if self.round != phase.opened:
                self._epoch, self._version = view.epoch, view.step
                self._lease(phase, yours)
            else:
                self._start_more()
        elif self.round is not None:
            self._drop_lease()
        self.finished = type(phase) is Finished

    def _lease(self, run: Run, yours: Assignment) -> None:
        """A new RUN: everything leased before is forgotten, as whatever it reached is in some manifest or will be asked for again."""
        self._drop_lease()
        self.round = run.opened
        self._window.begin()
        for micro_batch in yours.lease:
            owned = {stage for stage, missing in enumerate(run.missing) if micro_batch not in missing}
            self._waiting.append(_Sample(micro_batch, owned))
        self._leased = len(yours.lease)
        self._start_more()

    def _drop_lease(self) -> None:
        self._waiting.clear()
        self._active.clear()
        self._finished.clear()
        self._leased = 0
        self.round = None

    def _start_more(self) -> None:
        while self._waiting and len(self._active) < self._window.size:
            sample = self._waiting.popleft()
            self._active[sample.micro_batch] = sample
            sample.deadline = float("inf")
            self.node.clock.spawn(self._start(sample, self.round))

    async def _start(self, sample: _Sample, lease: Round | None) -> None:
        sample.payload = await self.feed.load(self._version, sample.micro_batch)
        if self.round == lease and self._active.get(sample.micro_batch) is sample:
            self._try(sample)

    def _try(self, sample: _Sample) -> None:
        """One attempt: a path of its own, and a deadline from what attempts have taken so far."""
        assert self.round is not None
        now = self.node.clock.now()
        sample.attempt = Attempt(self.round, self.node.name, self.incarnation, sample.number)
        sample.began = now
        sample.deadline = now + self.patience.seconds() * 2 ** min(sample.number, 6)
        sample.passed = -1
        sample.number += 1
        sample.starts.append(now)
        path = self.router.path(now, WORK)
        if path is None:
            return
        sample.path = path
        forward = Forward(self._epoch, self._version, 0, sample.micro_batch, sample.attempt, path, frozenset(sample.owned), sample.payload)
        self.node.transport.send(path[0], forward)

    def _on_ack(self, ack: Ack) -> None:
        sample = self._active.get(ack.micro_batch)
        if sample is None or sample.attempt is None:
            return
        if not self._is_current(sample, ack):
            self._learn_from_late(sample, ack)
            return
        work = 1.0 if ack.forward else WORK if ack.stage == self.settings.stages - 1 else BACKWARD_WORK
        self.router.stages[ack.stage].observe(ack.worker, work, ack.seconds)
        sample.passed = max(sample.passed, ack.stage)
        self._progress += 1
        if not ack.owns:
            return
        if self._on_owned is not None:
            self._on_owned(self, ack)
        sample.owned.add(ack.stage)
        sample.owners[ack.stage] = (ack.worker, ack.incarnation)
        if len(sample.owned) == self.settings.stages:
            self._finish(sample)

    def _is_outdated(self, order: Order) -> bool:
        return order < self._order

    def _is_current(self, sample: _Sample, ack: Ack) -> bool:
        return (ack.attempt, ack.epoch, ack.version) == (sample.attempt, self._epoch, self._version)

    def _learn_from_late(self, sample: _Sample, ack: Ack) -> None:
        """An attempt given up was only slow: the next ones are given as long."""
        attempt = ack.attempt
        if ack.forward or ack.stage or attempt.round != self.round or attempt.incarnation != self.incarnation:
            return
        if attempt.number < len(sample.starts):
            self.patience.measured(self.node.clock.now() - sample.starts[attempt.number])

    def _finish(self, sample: _Sample) -> None:
        del self._active[sample.micro_batch]
        self._finished[sample.micro_batch] = sample
        sample.payload = None
        now = self.node.clock.now()
        seconds = now - sample.began
        self.patience.measured(seconds)  # tokens tell attempts apart, so a retried one counts too
        if sample.number == 1:
            self._window.measured(now, seconds)
        self._start_more()
        if len(self._finished) == self._leased:
            self._beat()

    def _give_up_on(self, gone: set[str]) -> None:
        """Attempts that still need somebody who is gone are tried again at once: no deadline has to pass first."""
        for sample in list(self._active.values()):
            if any(stage not in sample.owned and worker in gone for stage, worker in enumerate(sample.path)):
                self._retry(sample)

    def _redo(self, lost: frozenset[tuple[str, int]]) -> None:
        """What only the lost have summed is done again while the step still runs, not after its SEAL.

        Retries go to the small buffers of others: should the lost come back with their sums, those are taken and only the retries dropped.
        """
        for sample in [sample for sample in self._finished.values() if not lost.isdisjoint(sample.owners.values())]:
            del self._finished[sample.micro_batch]
            _disown(sample, lost)
            sample.attempt, sample.path = None, ()
            self._waiting.append(sample)
        for sample in list(self._active.values()):
            if _disown(sample, lost) and sample.attempt is not None:
                self._retry(sample)
        self._start_more()

    def _retry(self, sample: _Sample) -> None:
        self.retries += 1
        self._try(sample)

    def _look_at_deadlines(self) -> None:
        now = self.node.clock.now()
        late = [sample for sample in self._active.values() if sample.deadline <= now]
        if late:
            self.patience.failed()
        for sample in late:
            self._ban_suspect(sample, now)
            self._retry(sample)

    def _ban_suspect(self, sample: _Sample, now: float) -> None:
        """Whoever had the micro-batch last: the stage after the last forward known, or the lowest that owns nothing on the way back."""
        if not sample.path:
            return
        last = self.settings.stages - 1
        if not self.settings.acknowledge_forward and sample.passed < 0:
            return  # nobody in particular
        stage = sample.passed + 1 if sample.passed < last else max((s for s in range(last + 1) if s not in sample.owned), default=last)
        self.router.stages[stage].ban(sample.path[stage], now, self.settings.ban_seconds)


def _disown(sample: _Sample, lost: frozenset[tuple[str, int]]) -> bool:
    """Forgets stages owned by the lost; whether there were any."""
    stages = [stage for stage, owner in sample.owners.items() if owner in lost]
    for stage in stages:
        del sample.owners[stage]
        sample.owned.discard(stage)
    return bool(stages)


class Leases:
    """Of one RUN at a time."""

    def __init__(self, patience: AdaptiveTimeout) -> None:
        self._timeout = patience
        self._leases: dict[str, tuple[int, tuple[int, ...]]] = {}  # by feeder: its incarnation and micro-batches
        self._progress_at = 0.0
        self._progress: dict[str, int] = {}

    def divide(self, micro_batches: Sequence[int], feeders: Sequence[Member], now: float) -> None:
        """A RUN opens: each feeder gets about as many."""
        count = len(feeders)
        self._leases = {feeder.name: (feeder.incarnation, tuple(micro_batches[i::count])) for i, feeder in enumerate(feeders)}
        self._progress_at = now
        self._progress = {}

    def of(self, feeder: Member) -> tuple[int, ...]:
        """What a feeder starts: nothing where it is somebody else by now."""
        incarnation, lease = self._leases.get(feeder.name, (0, ()))
        return lease if incarnation == feeder.incarnation else ()

    @property
    def feeders(self) -> int:
        """How many have something to start; 1 where nobody has."""
        return sum(1 for _, lease in self._leases.values() if lease) or 1

    def remaining(self, members: Members, round: Round) -> int:
        """Micro-batches of the RUN that are not finished, as far as was heard."""
        there = [(members.get(name), len(lease)) for name, (_, lease) in self._leases.items()]
        return sum(count - (member.done if member is not None and member.round == round else 0) for member, count in there)

    def hear(self, beat: FeederBeat, now: float) -> None:
        """A feeder tells how far it is."""
        if beat.progress > self._progress.get(beat.feeder, -1):
            self._progress[beat.feeder] = beat.progress
            self._timeout.measured(now - self._progress_at)
            self._progress_at = now

    def pending(self, members: Members, round: Round, now: float) -> bool:
        """Whether a feeder that is there still has something to do."""
        for name, (incarnation, lease) in self._leases.items():
            member = members.get(name)
            if not lease or (member is not None and member.round == round and member.done >= len(lease)):
                continue
            if member is not None and member.incarnation == incarnation and members.heard(member, now):
                return True
        return False

    def stuck(self, now: float) -> bool:
        """Whether nothing has moved for longer than it takes."""
        if now - self._progress_at <= self._timeout.seconds():
            return False
        self._timeout.failed()
        return True
