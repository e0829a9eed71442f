"""When a swarm stores its state, who writes it, and what of it is believed (docs/swarm.md, rule 15).

A worker whose stage has others takes nothing with it; with a stage's last worker all is lost that was made since the last checkpoint.
So the interval follows Young and Daly from what a save costs and how often stages are lost, a run's first saves come early, and a stage
that is down to its last process is stored at once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.coordinator_state import CoordinatorState
from atoll.control.journal import Checkpointed
from atoll.control.membership import Member, WorkerIdentity
from atoll.control.messages import WorkerBeat
from atoll.control.multi_stage import process_of
from atoll.events import CheckpointSaved, PeerRefused, Warned
from atoll.plan.checkpoint_interval import CheckpointInterval, checkpoint_interval

__all__ = ["CheckpointRound", "CheckpointSchedule", "StateVerdict", "StoredStates"]

PRIOR_HOURS = 1.0  # before anything is known: as if one stage had been lost in so long
LIFE_HOURS = 24.0  # and one process had died in so many hours of all of them
HASTE = 5.0  # between two saves lie so many times what a save costs, even where a stage is down to its last process
WITNESSES = 2  # of a stage, beside the one that writes: enough to outvote it, and others need not copy their states
YOUNG_SHARE = 0.03  # of the time may be spent on the first saves, each of which is taken for as dear as it is long
FIRST_SECONDS = 60.0  # a round may take so long before it is given up, until one was measured


class StateVerdict(msgspec.Struct, frozen=True):
    """What is thought of a stage's stored state: whether it is taken, and whether all who were asked have the same."""

    taken: bool
    agreed: bool


class CheckpointRound:
    """One worker of every stage stores the state of one version; a new checkpoint supersedes one that is unfinished.

    Nobody's word is taken for what a state is: others of the stage tell the digest of theirs, and what the majority has is stored. Where
    none has it, as devices of several kinds may differ in the last bit, or the stage has nobody else, it is that of the one who was told.
    """

    def __init__(self) -> None:
        self.version = -1  # -1: none
        self.began = 0.0
        self.replicas = 1  # processes of the stage that had fewest when it began
        self._writers: dict[int, WorkerIdentity] = {}
        self._witnesses: dict[int, dict[WorkerIdentity, str]] = {}  # others of the stage, and the digest each has told; "": none yet
        self._stored: dict[int, tuple[str, float]] = {}  # the digest of what was stored, and when

    def begin(self, version: int, usable: Iterable[Member], now: float) -> None:
        """The first of every stage writes, the next ones tell their digests."""
        there = list(usable)
        self.version, self.began, self._writers, self._witnesses, self._stored = version, now, {}, {}, {}
        self.replicas = min(Counter(stage for stage, _ in {(m.stage, process_of(m.name)) for m in there}).values(), default=1)
        for member in there:
            self._ask(member)

    def _ask(self, member: Member) -> None:
        writer = self._writers.setdefault(member.stage, member.identity)
        witnesses = self._witnesses.setdefault(member.stage, {})
        if member.identity != writer and len(witnesses) < WITNESSES:
            witnesses.setdefault(member.identity, "")

    def end(self) -> None:
        """It is whole, or of no use any more."""
        self.version = -1

    def writes(self, member: Member) -> bool:
        """Whether this worker stores its stage."""
        return self.version >= 0 and member.stage not in self._stored and self._writers.get(member.stage) == member.identity

    def attests(self, member: Member) -> bool:
        """Whether this worker tells the digest of its state."""
        return self.version >= 0 and not self._witnesses.get(member.stage, {}).get(member.identity, "told")

    def why_not(self, process: str, version: int, stage: int) -> str | None:
        """Why a state that a process sends is not stored; None: it is."""
        writer = self._writers.get(stage)
        if version != self.version or writer is None:
            return "nobody is told to store it"
        return None if process_of(writer[0]) == process else f"{writer[0]} is told to store it"

    def lacks_writer(self, heard: Iterable[Member]) -> bool:
        """Whether a writer is gone, so that the round cannot end."""
        there = {member.identity for member in heard}
        return any(writer not in there for stage, writer in self._writers.items() if stage not in self._stored)

    def replace_lost(self, usable: list[Member]) -> None:
        """A writer that is gone, or is on another stage by now, is replaced by another of its stage."""
        serving = {(member.stage, member.identity) for member in usable}
        for member in usable:
            if member.stage not in self._stored and (member.stage, self._writers.get(member.stage)) not in serving:
                self._writers[member.stage] = member.identity
                self._witnesses.get(member.stage, {}).pop(member.identity, None)

    def stored(self, stage: int, digest: str, now: float) -> None:
        """The store has a state of this round: the first one it got."""
        self._stored.setdefault(stage, (digest, now))

    def hear(self, member: Member, digest: str) -> None:
        """What a worker's own state is."""
        witnesses = self._witnesses.get(member.stage, {})
        if digest and witnesses.get(member.identity) == "":
            witnesses[member.identity] = digest

    def witnessed(self, stage: int) -> int:
        """How many have told the digest of a stage's state."""
        return sum(map(bool, self._witnesses.get(stage, {}).values()))

    def verdict(self, stage: int, heard: Collection[WorkerIdentity], now: float, patience_seconds: float) -> StateVerdict | None:
        """Of one stage; None while it is not stored, or a witness that is heard may still tell its digest."""
        stored = self._stored.get(stage)
        if stored is None:
            return None
        witnesses = self._witnesses.get(stage, {})
        if now - stored[1] < patience_seconds and any(not told and who in heard for who, told in witnesses.items()):
            return None
        votes = Counter([stored[0], *filter(None, witnesses.values())])
        most, count = votes.most_common(1)[0]
        return StateVerdict(taken=most == stored[0] or 2 * count <= votes.total(), agreed=len(votes) == 1)

    def reject(self, stage: int) -> str:
        """What was stored is not what the majority has: one of them writes. Gives who had written."""
        witnesses = self._witnesses[stage]
        most = Counter(filter(None, witnesses.values())).most_common(1)[0][0]
        writer, self._writers[stage] = self._writers[stage], next(who for who, told in witnesses.items() if told == most)
        del self._stored[stage]
        return writer[0]


class CheckpointSchedule:
    """When the next checkpoint is due where no interval was asked for. A coordinator that takes over begins anew, with early saves."""

    def __init__(self) -> None:
        self._began = 0.0
        self._last = 0.0  # when the last round began, or everybody went back to a checkpoint
        self._looked = 0.0
        self._lost = 0  # stages
        self._died = 0  # processes
        self._process_hours = 0.0
        self._save_seconds: float | None = None  # what a save takes from training
        self._step_seconds = 0.0
        self._timeout = AdaptiveTimeout(FIRST_SECONDS, 1.0)
        self._lone: set[tuple[int, str]] = set()  # stages with one process, and which
        self._urgent = False  # one of them is to be stored

    def begin(self, now: float) -> None:
        """A coordinator takes over."""
        self._began = self._last = self._looked = now

    def committed(self, seconds: float) -> None:
        """A step took so long."""
        self._step_seconds = seconds if not self._step_seconds else self._step_seconds + 0.2 * (seconds - self._step_seconds)

    def started(self, now: float) -> None:
        """A round began."""
        self._last = now
        self._urgent = False

    def saved(self, round: CheckpointRound, now: float) -> None:
        """A round is whole. At most it kept one worker of each stage from its work, so where stages have several it cost a part of that."""
        seconds = now - round.began
        self._timeout.measured(seconds)
        cost, known = seconds / round.replicas, self._save_seconds
        self._save_seconds = cost if known is None else known + 0.5 * (cost - known)

    def given_up(self, round: CheckpointRound, heard: Iterable[Member], now: float) -> bool:
        """Whether a round under way will not end: somebody who was to write is gone, or it takes too long."""
        if round.lacks_writer(heard):
            return True
        if now - round.began <= self._timeout.seconds():
            return False
        self._timeout.failed()
        return True

    def lost_stage(self, now: float) -> None:
        """Everybody goes back to the last checkpoint."""
        self._lost += 1
        self._last = now

    def died(self) -> None:
        """A process missed its heartbeats, whether that mattered or not."""
        self._died += 1

    def look(self, ready: Iterable[Member], now: float) -> None:
        """Who is there with a state. A stage that has just come down to one process is to be stored."""
        rows: dict[int, set[str]] = {}
        for member in ready:
            rows.setdefault(member.stage, set()).add(process_of(member.name))
        self._process_hours += len(set().union(*rows.values())) * (now - self._looked) / 3600.0
        self._looked = now
        lone = {(stage, *row) for stage, row in rows.items() if len(row) == 1}
        self._urgent = self._urgent or not lone <= self._lone
        self._lone = lone  # type: ignore[assignment]

    def urgent(self, now: float) -> bool:
        """Whether to store without waiting for the end of the step."""
        return self._urgent and self._save_seconds is not None and now - self._last >= HASTE * self._save_seconds

    def due(self, now: float) -> bool:
        """Whether to store after this step: the end of a step that is nearest. The first time at once, then after twice as long each time,
        until that is the interval: a young run has little to lose, and loses at most half of it, or what thirty saves take.
        """
        young = max(self._last - self._began, (self._save_seconds or 0.0) / YOUNG_SHARE)
        gap = min(self.interval().seconds, young)
        return now - self._last + self._step_seconds / 2 >= gap

    def interval(self) -> CheckpointInterval:
        """As things are measured now."""
        hours = (self._looked - self._began) / 3600.0
        stages_lost = (1 + self._lost) / (PRIOR_HOURS + hours)
        deaths = (1 + self._died) / (LIFE_HOURS + self._process_hours)
        return checkpoint_interval(self._save_seconds or 0.0, stages_lost + len(self._lone) * deaths, self._step_seconds)


class StoredStates:
    """Has the states of versions stored, and says in the journal which of them are. `discard` has the store remove one."""

    def __init__(self, at: CoordinatorState, discard: Callable[[int, int, int], None]) -> None:
        self._at, self._discard = at, discard
        self.round, self.schedule = CheckpointRound(), CheckpointSchedule()
        self.last: Checkpointed | None = None  # what everybody would go back to

    @property
    def current(self) -> bool:
        """Whether the state of this version is stored."""
        return self.last is not None and (self.last.epoch, self.last.version) == (self._at.epoch, self._at.version)

    def begin(self, now: float) -> None:
        """The state of this version: by one worker of every stage, while training goes on."""
        self.round.begin(self._at.version, self._at.usable(now), now)
        self.schedule.started(now)

    def after_commit(self, now: float) -> None:
        """Stores where that is asked for or due."""
        settings, version = self._at.settings, self._at.version
        asked = settings.checkpoint_every > 0 and version % settings.checkpoint_every == 0
        evaluated = settings.evaluate_every > 0 and version % settings.evaluate_every == 0
        by_itself = settings.checkpoint_every == 0 and self._may_begin(now) and self.schedule.due(now)
        if self._at.stopping or asked or evaluated or by_itself:
            self.begin(now)

    def _may_begin(self, now: float) -> bool:
        """Whether no round is under way that will end: one that is superseded again and again stores nothing."""
        heard = (member for member in self._at.members if self._at.members.heard(member, now))
        return self.round.version < 0 or self.schedule.given_up(self.round, heard, now)

    def look(self, now: float) -> None:
        """A stage that is down to its last process is stored in the middle of a step, if nothing asks for another interval."""
        at, usable = self._at, self._at.usable(now)
        self.schedule.look(usable, now)
        if at.settings.checkpoint_every or at.stopping or not self.schedule.urgent(now) or at.version == at.origin.version:
            return
        served = len({member.stage for member in usable}) == at.settings.stages
        if not self.current and served and self._may_begin(now):
            self.begin(now)

    def why_not(self, process: str, epoch: int, version: int, stage: int, size: int) -> str | None:
        """Why the store must not take a state that a process sends, which is told; None: it takes it."""
        quota = self._at.settings.state_quota
        why = self.round.why_not(process, version, stage) if epoch == self._at.epoch else "it is of another epoch"
        if why is None and stage < len(quota) and size > quota[stage]:
            why = f"it has {size:,} bytes, and a state of this stage at most {quota[stage]:,}"
        if why is not None:
            self._tell_refused(process, version, stage, why)
        return why

    def _tell_refused(self, sender: str, version: int, stage: int, why: str) -> None:
        reason = f"a state of stage {stage} after step {version}: {why}"
        self._at.node.emit(PeerRefused(peer=sender, role="worker", what="state", reason=reason))

    async def on_beat(self, member: Member, beat: WorkerBeat) -> None:
        """A worker may say what its own state is."""
        if beat.attests is not None and beat.attests[0] == self.round.version and beat.epoch == self._at.epoch:
            self.round.hear(member, beat.attests[1])
            await self.judge()

    async def on_stored(self, epoch: int, version: int, stage: int, digest: str) -> None:
        """The store has got a state."""
        if (epoch, version) == (self._at.epoch, self.round.version):
            self.round.stored(stage, digest, self._at.node.clock.now())
            await self.judge()

    async def judge(self) -> None:
        """Looks at what is stored of the round; the journal has it once all of it is what the stages' workers have."""
        at, storing, now = self._at, self.round, self._at.node.clock.now()
        if storing.version < 0:
            return
        heard = {member.identity for member in at.members if at.members.heard(member, now)}
        verdicts = [storing.verdict(stage, heard, now, at.settings.patience_seconds) for stage in range(at.settings.stages)]
        for stage, verdict in enumerate(verdicts):
            if verdict is not None and not verdict.taken:
                self._discard(at.epoch, storing.version, stage)
                self._tell_refused(storing.reject(stage), storing.version, stage, "most workers of its stage have another")
        if all(verdict is not None and verdict.taken for verdict in verdicts):
            for stage, verdict in enumerate(verdicts):
                if verdict is not None and not verdict.agreed:
                    differ = f"workers of stage {stage} have states after step {storing.version} that differ in some bits, as devices of"
                    at.node.emit(Warned(message=f"{differ} several kinds may; that of the worker told to store it was taken"))
            await self._write(now)

    async def _write(self, now: float) -> None:
        record, began = Checkpointed(self._at.epoch, self.round.version), self.round.began
        self.schedule.saved(self.round, now)
        self.round.end()
        await self._at.journal.append(self._at.term, record)
        self.last = record
        self._at.node.emit(CheckpointSaved(step=record.version, path="", size_bytes=0, blocked_seconds=0.0, seconds=now - began))
