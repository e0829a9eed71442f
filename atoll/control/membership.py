"""Membership: who is in the swarm, under which incarnation and on which stage; who can be relied on now, who leaves and who changes stage.

Missed heartbeats and returns are reported; no decisions about steps are made here.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from atoll.control.messages import Committed, FeederBeat, Order, Peer, Round, WorkerBeat
from atoll.control.multi_stage import hosted_number, process_of, processes
from atoll.control.rebalancing import MICRO_BATCH_WORK, RatedPeer, move_at_once, place, plan_moves
from atoll.control.settings import Settings
from atoll.events import MemberChanged, MemberMoved, MemberState, Observer
from atoll.units import format_seconds

__all__ = ["Member", "Members", "MissedHeartbeats", "StageMoves", "WorkerIdentity"]

INCARNATIONS_OF_A_TERM = 1 << 32

WorkerIdentity: TypeAlias = tuple[str, int]
"""(name, incarnation)."""


@dataclass(slots=True, eq=False)
class Member:
    """One process as the coordinator knows it."""

    name: str
    worker: bool
    incarnation: int
    nonce: int
    stage: int
    heard_at: float
    echo: Order = (0, 0)
    epoch: int = -1
    version: int = -1
    fetched: int = -1
    speed: float = 0.0
    holds: Round | None = None
    digest: str = ""
    leaving: bool = False
    held_until: float = 0.0
    held_at_most: float = 0.0
    held_with: tuple[int, int] = (-1, -1)  # version and chunks it had when its time was last prolonged
    too_slow: bool = False  # whether it was told that nobody waits for it any more
    donors: tuple[str, ...] = ()  # who give it its state
    missed: int = -1  # the first version that was ready to be committed while this worker was still fetching
    done: int = 0
    round: Round | None = None

    @property
    def identity(self) -> WorkerIdentity:
        """Who it is for good."""
        return self.name, self.incarnation

    def changed(self, state: MemberState, before: MemberState, reason: str = "") -> MemberChanged:
        """The event that says so."""
        role, stages = "worker" if self.worker else "feeder", (self.stage,) if self.stage >= 0 else ()
        return MemberChanged(name=self.name, state=state, before=before, role=role, stages=stages, reason=reason)

    def wait_no_more(self) -> None:
        """It has what it needs, or is somebody new: whether commits wait for it is decided from the beginning."""
        self.held_until = self.held_at_most = 0.0
        self.held_with = (-1, -1)
        self.too_slow = False
        self.missed = -1


class Members:
    """All processes heard of. Incarnations are issued here; they only grow, over all terms."""

    def __init__(self, settings: Settings, term: int) -> None:
        self._settings, self._term = settings, term
        self._next = term * INCARNATIONS_OF_A_TERM
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, name: str) -> Member | None:
        """The member of that name."""
        return self._members.get(name)

    def issue(self) -> int:
        """A new incarnation, greater than all before it."""
        self._next += 1
        return self._next

    def forget(self, now: float) -> None:
        """Those silent for very long are nobody any more."""
        for name in [m.name for m in self if now - m.heard_at > self._settings.forget_seconds]:
            del self._members[name]

    def remove(self, name: str) -> None:
        """It was dismissed."""
        self._members.pop(name, None)

    def hear(self, beat: WorkerBeat | FeederBeat, now: float) -> tuple[Member | None, bool]:
        """Takes a heart-beat. Gives the member, None for one that is out of date, and whether it is somebody new.

        A nonce grows with every start of a process, so a beat of an earlier start is known as such however late it comes. A coordinator
        that has just taken over believes the incarnations it is told: they were issued by the terms before. A process hosts no more workers
        than there are stages.
        """
        worker = isinstance(beat, WorkerBeat)
        name = beat.worker if isinstance(beat, WorkerBeat) else beat.feeder
        stage = beat.stage if isinstance(beat, WorkerBeat) else -1
        number = hosted_number(name)
        member = self._members.get(name)
        if number is None or number >= self._settings.stages or (member is not None and beat.nonce < member.nonce):
            return None, False
        new = member is None or beat.nonce > member.nonce or beat.incarnation > member.incarnation
        if new:
            known = beat.incarnation > 0 and (not worker or 0 <= stage < self._settings.stages)
            incarnation = beat.incarnation if known else self.issue()
            if worker and not known:
                planned = beat.planned if isinstance(beat, WorkerBeat) else -1
                stage = place(self._capacities_beside(name, beat.nonce, now), self.hosted_beside(name, beat.nonce), planned)
            member = self._members[name] = Member(name, worker, incarnation, beat.nonce, stage, now)
        assert member is not None
        member.heard_at = now
        member.echo = max(member.echo, (beat.term, beat.echo))
        if beat.incarnation == member.incarnation:
            self._copy(member, beat)
        return member, new

    def hosted_beside(self, name: str, nonce: int) -> set[int]:
        """The stages of the other workers of its process."""
        process = process_of(name)
        return {m.stage for m in self if m.stage >= 0 and m.nonce == nonce and m.name != name and process_of(m.name) == process}

    @staticmethod
    def _copy(member: Member, beat: WorkerBeat | FeederBeat) -> None:
        if isinstance(beat, WorkerBeat):
            member.epoch, member.version = beat.epoch, beat.version
            member.fetched, member.speed = beat.fetched, beat.speed
            if beat.holds is not None:
                member.holds, member.digest = beat.holds, beat.digest
            member.leaving = beat.leaving
        elif beat.round is not None:
            member.round, member.done = beat.round, beat.done

    def move(self, member: Member, stage: int) -> None:
        """A new incarnation on another stage; -1 dismisses."""
        member.incarnation = self.issue()
        member.stage = stage
        member.version = -1
        member.holds = None
        member.fetched = -1
        member.donors = ()
        member.wait_no_more()

    # --- who can be relied on ------------------------------------------------------------------------------------------------

    def heard(self, member: Member, now: float) -> bool:
        """Whether it was heard lately."""
        return now - member.heard_at <= self._settings.silent_beats * self._settings.heartbeat_seconds

    def live(self, member: Member, now: float, beat: int) -> bool:
        """Heard lately, and it has heard us lately: both directions work."""
        term, echo = member.echo
        return self.heard(member, now) and term == self._term and beat - echo <= self._settings.silent_beats

    @staticmethod
    def current(member: Member, epoch: int, version: int, commit: Committed | None) -> bool:
        """Whether it has the state of this version, or the result that makes it so as soon as it hears of the commit."""
        if not member.worker or member.epoch != epoch or member.stage < 0:
            return False
        if member.version == version:
            return True
        return (
            commit is not None
            and member.version == commit.version
            and member.holds == commit.round
            and member.digest == commit.digests[member.stage]
        )

    def capacities(self, now: float) -> list[float]:
        """What the workers heard of each stage add up to, in typical peers, divided by the stage's work."""
        return self._capacities(self, now)

    def _capacities_beside(self, name: str, nonce: int, now: float) -> list[float]:
        """The same without what a process was that is started again under its name: it may be back before its silence is noticed."""
        process = process_of(name)
        return self._capacities((m for m in self if m.nonce >= nonce or process_of(m.name) != process), now)

    def _capacities(self, members: Iterable[Member], now: float) -> list[float]:
        settings = self._settings
        totals = [0.0] * settings.stages
        for member, speed in self._speeds(m for m in members if m.worker and m.stage >= 0):
            if not member.leaving and self.heard(member, now):
                totals[member.stage] += speed
        work = settings.work or (1.0,) * settings.stages
        return [total / each for total, each in zip(totals, work, strict=True)]

    def rated(self, usable: list[Member], now: float) -> list[list[RatedPeer]]:
        """Workers of every stage with their speeds; one that is still fetching counts as not ready."""
        ready = {member.name for member in usable}
        workers = [m for m in self if m.worker and m.stage >= 0 and not m.leaving and (m.name in ready or self.heard(m, now))]
        rows: list[list[RatedPeer]] = [[] for _ in range(self._settings.stages)]
        for member, speed in self._speeds(workers):
            rows[member.stage].append(RatedPeer(member.name, speed, member.name in ready))
        return rows

    @staticmethod
    def _speeds(workers: Iterable[Member]) -> Iterator[tuple[Member, float]]:
        """With the speed of each: as measured, else that of a typical process, divided among its workers."""
        known = list(workers)
        sharing = Counter(process_of(member.name) for member in known)
        speeds = [member.speed * sharing[process_of(member.name)] for member in known if member.speed > 0]
        typical = sum(speeds) / len(speeds) if speeds else 1.0
        return ((member, member.speed or typical / sharing[process_of(member.name)]) for member in known)

    @staticmethod
    def may_go(member: Member, others: Iterable[Member], minimum: int) -> bool:
        """Whether enough processes stay on its stage without it, of these."""
        return len(processes(other.name for other in others if other.stage == member.stage and other is not member)) >= minimum

    @staticmethod
    def peers(members: list[Member], stages: int) -> tuple[tuple[Peer, ...], ...]:
        """What feeders may use, by stage."""
        rows: list[list[Peer]] = [[] for _ in range(stages)]
        for member in members:
            rows[member.stage].append(Peer(member.name, member.incarnation, member.speed))
        return tuple(tuple(row) for row in rows)


class MissedHeartbeats:
    """Those not heard lately."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}  # incarnations, by name

    def look(self, members: Members, now: float) -> Iterator[MemberChanged]:
        """What has changed."""
        for member in members:
            if members.heard(member, now):
                if self._silent.pop(member.name, None) == member.incarnation:
                    yield member.changed("active", "silent")
            elif self._silent.get(member.name) != member.incarnation:
                self._silent[member.name] = member.incarnation
                yield member.changed("silent", "active", f"no heartbeat for {format_seconds(now - member.heard_at)}")


Usable = Callable[[], list[Member]]
"""Those who can be given work now: it is asked again after every change."""


class StageMoves:
    """What is asked for and when it was last looked at. Moves are noted in the members, and emitted."""

    def __init__(self, settings: Settings, draw: random.Random, emit: Observer) -> None:
        self._settings, self._draw, self._emit = settings, draw, emit
        self._wishes: dict[str, int] = {}
        self._empty_since: dict[int, float] = {}
        self._rebalance_at = 0.0
        self._balanced: frozenset[tuple[str, int]] = frozenset()  # those whom a move at once was last thought of for

    def begin(self, now: float) -> None:
        """A coordinator takes over."""
        self._rebalance_at = now + self._settings.rebalance_seconds

    def wish(self, worker: str, stage: int) -> None:
        """Somebody asks that a worker change stage."""
        self._wishes[worker] = stage

    def pending(self, members: Members, now: float, step_seconds: float) -> bool:
        """Whether something is to be changed after this step."""
        leaving = any(member.leaving and member.stage >= 0 for member in members)
        return bool(self._wishes) or leaving or self._due(now, step_seconds)

    def _due(self, now: float, step_seconds: float) -> bool:
        """At the end of the step that is nearest to the time set."""
        return self._settings.rebalance_seconds > 0 and now + step_seconds / 2 >= self._rebalance_at

    def let_go(self, members: Members, usable: Usable) -> list[Member]:
        """Those who want to leave and may, since enough stay behind: they have no stage any more."""
        gone = []
        for member in list(members):
            if not member.leaving or member.stage < 0:
                continue
            staying = [other for other in usable() if not other.leaving]
            if Members.may_go(member, staying, self._settings.minimum_replicas):
                self._emit(member.changed("left", "active", "it asked to leave"))
                members.move(member, -1)
                members.remove(member.name)
                gone.append(member)
        return gone

    def grant_wishes(self, members: Members, usable: Usable) -> None:
        """Those that leave no stage with too few; the others are forgotten."""
        for name, stage in self._wishes.items():
            there = usable()
            member = next((member for member in there if member.name == name and member.stage != stage), None)
            if member is None or not Members.may_go(member, there, self._settings.minimum_replicas):
                continue
            if stage not in members.hosted_beside(name, member.nonce):
                self._move(members, member, stage, "asked for")
        self._wishes.clear()

    def rebalance(self, members: Members, usable: Usable, now: float, step_seconds: float) -> None:
        """From time to time, where it pays."""
        settings = self._settings
        if not self._due(now, step_seconds):
            return
        self._rebalance_at = now + settings.rebalance_seconds * self._draw.uniform(0.9, 1.0)
        moves = plan_moves(
            members.rated([member for member in usable() if not member.leaving], now),
            settings.work or (1.0,) * settings.stages,
            migration_seconds=settings.migration_seconds,
            horizon_seconds=20 * settings.migration_seconds,
            minimum_replicas=settings.minimum_replicas,
        )
        for move in moves:
            member = members.get(move.worker)
            assert member is not None
            self._move(members, member, move.target, move.reason)

    def rebalance_at_once(
        self, members: Members, usable: Usable, now: float, since: Mapping[tuple[str, int], float], remaining: int
    ) -> Member | None:
        """Who changes stage in the middle of a step, when somebody came or went: `since` says how long each has worked on it."""
        settings, there = self._settings, usable()
        known = frozenset((member.name, member.incarnation) for member in there)
        if known == self._balanced or settings.rebalance_seconds <= 0:
            return None
        self._balanced = known
        staying = [member for member in there if not member.leaving]
        summed = {
            member.name: (now - since.get((member.name, member.incarnation), now)) * member.speed / MICRO_BATCH_WORK for member in staying
        }
        move = move_at_once(
            members.rated(staying, now),
            settings.work or (1.0,) * settings.stages,
            summed,
            remaining,
            migration_seconds=settings.migration_seconds,
            minimum_replicas=settings.minimum_replicas,
        )
        member = members.get(move.worker) if move is not None else None
        if move is not None and member is not None:
            self._move(members, member, move.target, move.reason)
        return member

    def fill_empty_stages(self, members: Members, now: float) -> list[Member]:
        """A stage that has had nobody for a while gets a worker of the stage that can spare most, whatever minimum that one should keep:
        nothing moves without it, so nothing is lost. Until then whoever is meant for it may just be starting.
        """
        moved = []
        rows = self._rows(members, now)
        for stage, row in enumerate(rows):
            if row:
                self._empty_since.pop(stage, None)
            elif now - self._empty_since.setdefault(stage, now) < self._settings.lost_seconds:
                continue
            spare = [] if row else max(([m for m in other if Members.may_go(m, other, 1)] for other in rows), key=len)
            if spare:
                member = spare[-1]
                rows[member.stage].remove(member)
                row.append(member)
                self._move(members, member, stage, "the stage had nobody")
                moved.append(member)
        return moved

    def _move(self, members: Members, member: Member, target: int, reason: str) -> None:
        self._emit(MemberMoved(name=member.name, source=member.stage, target=target, reason=reason))
        members.move(member, target)

    def _rows(self, members: Members, now: float) -> list[list[Member]]:
        """The workers of every stage that are heard."""
        rows: list[list[Member]] = [[] for _ in range(self._settings.stages)]
        for member in members:
            if member.worker and member.stage >= 0 and members.heard(member, now):
                rows[member.stage].append(member)
        return rows
