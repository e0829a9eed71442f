"""Coordinator: decides which work makes up a step, writes it to the journal, and says so until everybody has heard.

What holds after a failure: whatever was announced is in the journal; a coordinator started again on the same journal takes over under a new
term, seals first, and continues with the buffers that survive. It keeps nothing else that matters.
"""

from collections import Counter
from collections.abc import Callable
from heapq import nsmallest
from typing import Any

import msgspec

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.checkpoint_schedule import CheckpointRound, CheckpointSchedule
from atoll.control.clipping import clip_or_skip, why_refused
from atoll.control.feeder import Leases
from atoll.control.journal import Checkpointed, Epoch, FencedError, Term, replay
from atoll.control.membership import Member, Members, MissedHeartbeats, StageMoves
from atoll.control.messages import (
    Announce,
    Assignment,
    Committed,
    FeederBeat,
    Finished,
    Manifest,
    Peer,
    Phase,
    Reduce,
    Reduced,
    Round,
    Run,
    Seal,
    View,
    WorkerBeat,
)
from atoll.control.multi_stage import process_of, processes
from atoll.control.notices import (
    Happening,
    Joined,
    Refused,
    Repaired,
    Resealed,
    RolledBack,
    Saved,
    Silent,
    StateRefused,
    StatesDiffer,
    StepCommitted,
    TookOver,
)
from atoll.control.reduction import Choice, ReductionRound, choose_stages, stage_reduction, too_slow, waits_for_joiners
from atoll.control.settings import Settings
from atoll.control.state_transfer import DONORS
from atoll.control.world import Journal, SwarmProcess

__all__ = ["Coordinator"]

TICK = object()


class _Stored(msgspec.Struct, frozen=True):
    """The coordinator's own store has got a state."""

    epoch: int
    version: int
    stage: int
    digest: str


class Coordinator:
    """One coordinator process. `await run()` ends when the run is finished or a newer coordinator has taken over (`deposed`)."""

    def __init__(
        self,
        node: SwarmProcess,
        journal: Journal,
        settings: Settings,
        observe: Callable[[Happening], None] = lambda happening: None,
        discard: Callable[[int, int, int], None] = lambda epoch, version, stage: None,
    ) -> None:
        self.node, self.journal, self.settings = node, journal, settings
        self.deposed = self.finished = False
        self.refused: Refused | None = None  # why the run ends before its last step, where a step must not be made
        self.term = self.seq = self.epoch = self.version = 0
        self.phase: Phase = Seal((0, 0))  # of the step under way
        self.trailing: Reduce | None = None  # with staleness: how the step before it is summed
        self.members = Members(settings, 0)
        self._observe, self._discard = observe, discard  # the latter has the store remove a state
        self._all = frozenset(range(settings.micro_batches))
        self._origin = Epoch(0, 0, 0)
        self._commit: Committed | None = None
        self._last_checkpoint: Checkpointed | None = None
        self.checkpoint_round = CheckpointRound()
        self._checkpoint_schedule = CheckpointSchedule()
        self._beat = self._rounds = 0  # the latter are SEALs of the step under way
        self._entered = self._deadline = self._committed_at = self._gathered_at = self._step_seconds = 0.0
        self._awaited: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._reduction_round: ReductionRound | None = None
        self._barred: set[str] = set()
        self._routes: tuple[tuple[Peer, ...], ...] = ()
        self._routed: dict[tuple[str, int], float] = {}  # workers in the routes since this RUN began, and since when
        self._lost: tuple[tuple[str, int], ...] = ()
        self._lost_since: dict[int, float] = {}
        self._stage_moves = StageMoves(settings, node.random, self._observe)
        self._stopping = False
        self._dismissed: dict[str, Member] = {}  # those let go; a late heart-beat does not bring them back
        self._missed_heartbeats = MissedHeartbeats()
        beat = settings.heartbeat_seconds
        self._seal_patience = AdaptiveTimeout(settings.patience_seconds, 2 * beat)
        self._reduce_patience = AdaptiveTimeout(settings.patience_seconds, 2 * beat)
        self._leases = Leases(AdaptiveTimeout(settings.patience_seconds, 3 * beat))

    def move(self, worker: str, stage: int) -> None:
        """Asks that a worker change stage after this step; it is not done where it would leave too few behind."""
        self._stage_moves.wish(worker, stage)

    def stop(self) -> None:
        """Asks that the run end early: after the step under way, once its state is stored. `stopped` tells that it did."""
        self._stopping = True

    @property
    def stopped(self) -> bool:
        """Whether the run ended, or ends, before its last step because it was asked to."""
        return type(self.phase) is Finished and self.version < self.settings.steps

    @property
    def stored_version(self) -> int:
        """What everybody would go back to."""
        return self._last_checkpoint.version if self._last_checkpoint is not None else 0

    async def run(self) -> None:
        """Takes over and coordinates."""
        try:
            await self._take_over()
            self.node.clock.spawn(self._tick())
            while not self.finished:
                await self._handle(await self.node.inbox.take())
        except FencedError:
            self.deposed = True
        self.finished = True

    async def _tick(self) -> None:
        while not self.finished:
            await self.node.clock.sleep(self.settings.heartbeat_seconds)
            self.node.inbox.put(TICK)

    async def _take_over(self) -> None:
        """The term is claimed before the journal is believed: until then the coordinator before may still have added a commit."""
        await self._claim_term()
        history = replay(await self.journal.read())
        if history.origin is None:
            await self.journal.append(self.term, Epoch(0, 0, 0))
        else:
            self._origin = history.origin
        self.epoch, self.version = self._origin.epoch, history.version
        self._commit, self._last_checkpoint = history.commit, history.checkpoint
        self.members = Members(self.settings, self.term)
        now = self.node.clock.now()
        self._committed_at = now
        self._stage_moves.begin(now)
        self._checkpoint_schedule.begin(now)
        self._observe(TookOver(self.term, self.version))
        if self.version >= self.settings.steps and history.stored:
            self._finish()
            return
        self._enter_seal("a coordinator took over")
        fresh = self._commit is None and self.version == 0
        self._deadline = now + (self.settings.gather_seconds if not fresh else 0.0)
        self._gathered_at = self._deadline
        self._awaited = {""}  # whoever may still be out there

    async def _claim_term(self) -> None:
        """The next one. Another may have claimed it just now and be dead already, its record on its way: then the one after it."""
        for last in (False, False, True):
            self.term = replay(await self.journal.read()).term + 1
            try:
                await self.journal.append(self.term, Term(self.term))
                return
            except FencedError:
                if last:
                    raise

    # --- hearing ------------------------------------------------------------------------------------------------------------

    async def _handle(self, message: Any) -> None:
        match message:
            case WorkerBeat():
                await self._on_worker_beat(message)
            case FeederBeat():
                self._on_feeder_beat(message)
            case Manifest():
                self._on_manifest(message)
            case Reduced():
                await self._on_reduced(message)
            case _Stored():
                await self._on_stored(message)
            case _ if message is TICK:
                await self._on_tick()

    async def _on_worker_beat(self, beat: WorkerBeat) -> None:
        before = self.members.get(beat.worker)
        ready = before is not None and self._has_state(before)
        dismissed = self._dismissed.get(beat.worker)
        if before is None and dismissed is not None and beat.nonce <= dismissed.nonce:
            if beat.nonce == dismissed.nonce:
                self._announce(dismissed, self._view())  # it has not heard yet
            return
        if before is None and beat.incarnation == 0 and self.node.clock.now() < self._gathered_at:
            return  # where it helps is known once those who have a stage were heard
        summing = self._reduction_round
        contributed = before is not None and summing is not None and summing.contributes(before.name, before.incarnation)
        member, new = self.members.hear(beat, self.node.clock.now())
        if member is None:
            return
        if new:
            if beat.incarnation != member.incarnation:  # else it was here before this coordinator
                self._observe(Joined(member.name, member.incarnation, member.stage))
            if contributed:
                self._on_contributor_back(member)
        if new or beat.incarnation != member.incarnation:
            self._announce(member, self._view())
        if beat.attests is not None and beat.attests[0] == self.checkpoint_round.version and beat.epoch == self.epoch:
            self.checkpoint_round.hear(member, beat.attests[1])
            await self._note_stored()
        if not ready and type(self.phase) is Run and self._has_state(member):
            self._broadcast(workers=False)  # whoever hands out work need not wait for the next heartbeat to use it

    def _on_contributor_back(self, member: Member) -> None:
        """It has lost what it had summed."""
        self._give_up_summing(f"{member.name} came back with nothing")

    def _on_feeder_beat(self, beat: FeederBeat) -> None:
        now = self.node.clock.now()
        member, new = self.members.hear(beat, now)
        if member is None:
            return
        if new or beat.incarnation != member.incarnation:
            self._announce(member, self._view())
        if type(self.phase) is Run and beat.round == self.phase.opened:
            self._leases.hear(beat, now)
            self._look_at_leases(now, False)

    async def _on_tick(self) -> None:
        now = self.node.clock.now()
        self._beat += 1
        self.members.forget(now)
        if type(self.phase) is not Finished:
            for change in self._missed_heartbeats.look(self.members, now):
                if isinstance(change, Silent) and process_of(change.name) == change.name and change.stage >= 0:
                    self._checkpoint_schedule.died()
                self._observe(change)
            self._look_at_checkpoint(now)
        await self._look_for_lost_stages(now)
        await self._note_stored()
        if self._stopping or self.version >= self.settings.steps:
            await self._stop_when_stored(now)
        phase = type(self.phase)
        if phase is Run:
            self._move_at_once(now)
            self._look_at_leases(now, True)
        elif phase is Seal and now >= self._deadline:
            if self.trailing is None:  # those who move would be missing in its sums
                for moved in self._stage_moves.fill_empty_stages(self.members, now):
                    self._manifests.pop(moved.name, None)
            self._decide()
        if self._reduction_round is not None:
            await self._look_at_reduction(self._reduction_round)
        elif phase is Finished and now - self._entered > self.settings.silent_beats * self.settings.heartbeat_seconds:
            self.finished = True
        self._broadcast()

    # --- speaking -----------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        origin = (self._origin.from_epoch, self._origin.version)
        where = (self.epoch, self.version, origin, self._commit)
        return View(self.term, self.seq, self._beat, *where, self.phase, self.checkpoint_round.version, self.trailing)

    @property
    def step(self) -> int:
        """The step under way."""
        return self.version + (self.trailing is not None)

    def _broadcast(self, workers: bool = True) -> None:
        """To everybody, or to feeders alone."""
        self._find_routes()
        view = self._view()
        for member in self.members:
            if workers or not member.worker:
                self._announce(member, view)

    def _find_routes(self) -> None:
        now = self.node.clock.now()
        usable = self._answering(now)  # who wants to leave works until it is let go, after the step: what it has begun counts
        self._routes = Members.peers(usable, self.settings.stages)
        if type(self.phase) is Run:
            for member in usable:
                self._routed.setdefault((member.name, member.incarnation), now)
            self._lost = tuple(sorted(pair for pair in self._routed if not self._there(*pair, now)))

    def _there(self, name: str, incarnation: int, now: float) -> bool:
        """Whether a worker is heard and is still who it was."""
        member = self.members.get(name)
        return member is not None and member.incarnation == incarnation and self.members.heard(member, now)

    def _announce(self, member: Member, view: View) -> None:
        self.node.transport.send(member.name, Announce(self.node.name, view, self._assignment(member)))

    def _assignment(self, member: Member) -> Assignment:
        who, storing = (member.nonce, member.incarnation), self.checkpoint_round
        if not member.worker:
            return Assignment(*who, -1, lease=self._leases.of(member), window=self._window(), routes=self._routes, lost=self._lost)
        donors = self._donors(member) if member.stage >= 0 and not self._has_state(member) else ()
        return Assignment(*who, member.stage, donors, storing.writes(member), storing.attests(member))

    def _window(self) -> int:
        """Three micro-batches for every process: one in hand, one waiting, one on its way. A feeder has more where the way is long."""
        workers = processes(peer.worker for row in self._routes for peer in row)
        return max(1, min(self.settings.in_flight, -(-3 * len(workers) // self._leases.feeders)))

    def _donors(self, member: Member) -> tuple[str, ...]:
        """Some who have the state: the same ones as long as they are there, and of the others those who give to the fewest.

        They stay the same over a commit that the joiner misses: who gave the state before it has kept that.
        """
        there = {peer.worker for peer in self._routes[member.stage]} - {member.name} if self._routes else set()
        kept = tuple(name for name in member.donors if name in there)
        if len(kept) < min(DONORS, len(there)):
            fetching = [other for other in self.members if other is not member and not self._has_state(other)]
            busy = Counter(name for other in fetching for name in other.donors)
            others = sorted(there.difference(kept))
            turn = member.incarnation % len(others)
            kept += tuple(nsmallest(DONORS - len(kept), others[turn:] + others[:turn], key=lambda name: busy[name]))
        member.donors = kept
        return kept

    # --- who can be used ----------------------------------------------------------------------------------------------------

    def _usable(self, now: float) -> list[Member]:
        """Those who can be given work: one that wants to leave only where its stage has nobody else."""
        answering = self._answering(now)
        served = {member.stage for member in answering if not member.leaving}
        return [member for member in answering if not member.leaving or member.stage not in served]

    def _answering(self, now: float) -> list[Member]:
        """Workers with the state of this version, heard and hearing, not barred from this step."""
        members = self.members
        return [
            member
            for member in members
            if member.worker and member.name not in self._barred and self._has_state(member) and members.live(member, now, self._beat)
        ]

    def _has_state(self, member: Member) -> bool:
        return Members.current(member, self.epoch, self.version, self._commit)

    def _live_feeders(self, now: float) -> list[Member]:
        return [member for member in self.members if not member.worker and self.members.live(member, now, self._beat)]

    def _can_run(self, now: float) -> bool:
        stages = {member.stage for member in self._usable(now)}
        if len(stages) < self.settings.stages:
            self._unbar(stages)
            return False
        return bool(self._live_feeders(now))

    def _unbar(self, served: set[int]) -> None:
        """Rather somebody doubtful than nobody."""
        for name in sorted(self._barred):
            member = self.members.get(name)
            if member is None or member.stage not in served:
                self._barred.discard(name)

    # --- RUN ----------------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._entered = self.node.clock.now()
        self._broadcast()

    def _enter_run(self, missing: tuple[frozenset[int], ...], keep: frozenset[tuple[str, int, int]]) -> None:
        now = self.node.clock.now()
        self.seq += 1
        self._leases.divide(sorted(frozenset().union(*missing)), self._live_feeders(now), now)
        self._routed, self._lost = {}, ()
        self._enter(Run(missing, keep, (self.term, self.seq)))

    def _run_or_seal(self) -> None:
        """A new step: everything is missing and nothing is kept."""
        if self._stopping:
            self._enter_seal("")
        elif self._can_run(self.node.clock.now()):
            self._enter_run((self._all,) * self.settings.stages, frozenset())
        else:
            self._enter_seal("a stage or the feeders are not there")

    def _move_at_once(self, now: float) -> None:
        """Where somebody was lost, one that has done little yet takes the place: the step need not crawl to its end first."""
        assert type(self.phase) is Run
        if self.trailing is None and not self._stopping:  # those who move would be missing in its sums
            remaining = self._leases.remaining(self.members, self.phase.opened)
            self._stage_moves.rebalance_at_once(self.members, lambda: self._usable(now), now, self._routed, remaining)

    def _look_at_leases(self, now: float, ticking: bool) -> None:
        """Seals when all is done, when nobody is left who could do the rest, or when nothing moves."""
        assert type(self.phase) is Run
        if not self._leases.pending(self.members, self.phase.opened, now):
            self._enter_seal("")
        elif ticking and self._leases.stuck(now):
            self._enter_seal("no progress")

    # --- SEAL and decide ------------------------------------------------------------------------------------------------------

    def _enter_seal(self, reason: str) -> None:
        now = self.node.clock.now()
        self.seq += 1
        self._rounds += 1
        if reason:
            self._observe(Resealed(self.step, reason))
        if self.trailing is None:
            self._reduction_round = None
        self._await_manifests(now)
        self._enter(Seal(self._next_round()))

    def _next_round(self) -> Round:
        """A name that no round had before, under any coordinator."""
        return self.term, self.seq

    def _await_manifests(self, now: float) -> None:
        self._manifests = {}
        self._awaited = {member.name for member in self._answering(now)}
        self._deadline = now + self._seal_patience.seconds()

    def _on_manifest(self, manifest: Manifest) -> None:
        phase = self.phase
        member = self.members.get(manifest.worker)
        if type(phase) is not Seal or manifest.round != phase.round or member is None or member.name in self._barred:
            return
        if (manifest.epoch, manifest.version, manifest.stage) != (self.epoch, self.step, member.stage):
            return
        if not self._survives(manifest) or not self._is_from(manifest, member):
            return
        member.epoch, member.version = self.epoch, self.version
        self._manifests[manifest.worker] = manifest
        self._awaited.discard(manifest.worker)
        if not self._awaited:
            self._seal_patience.measured(self.node.clock.now() - self._entered)
            self._decide()

    def _survives(self, manifest: Manifest) -> bool:
        """Whether the worker's sums are not lost with a state that lacks the last commit."""
        return manifest.state == self.version

    def _is_from(self, manifest: Manifest, member: Member) -> bool:
        return manifest.incarnation == member.incarnation

    def _is_still(self, member: Member, incarnation: int) -> bool:
        return member.incarnation == incarnation

    def _responders(self) -> list[Manifest]:
        answers = [(self.members.get(manifest.worker), manifest) for manifest in self._manifests.values()]
        return [manifest for member, manifest in answers if member is not None and self._is_still(member, manifest.incarnation)]

    def _decide(self) -> None:
        """Every micro-batch in exactly one chosen buffer of every stage: reduce. Otherwise run what is missing."""
        now = self.node.clock.now()
        storing = self._stopping and self.checkpoint_round.version == self.version
        if self.refused is not None or storing or self.version >= self.settings.steps:
            self._deadline = now + self.settings.heartbeat_seconds  # no more steps: the state is being stored
            return
        responders = self._responders()
        choices = self._choose(responders)
        if self._is_complete(choices):
            if self.trailing is None:
                self._enter_reduce(choices, responders)
            else:
                self._deadline = now + self.settings.heartbeat_seconds  # one sum at a time: when that of the step before is committed
        elif self._can_run(now):
            keep = frozenset(buffer for choice in choices for buffer in choice.buffers)
            if keep:
                self._observe(Repaired(self.step, tuple(len(choice.missing) for choice in choices)))
            self._enter_run(tuple(choice.missing for choice in choices), keep)
        else:
            self._deadline = now + self.settings.heartbeat_seconds
            self._awaited = {""}

    def _choose(self, responders: list[Manifest]) -> tuple[Choice, ...]:
        return choose_stages(responders, self.settings.stages, self._all)

    def _is_complete(self, choices: tuple[Choice, ...]) -> bool:
        return not any(choice.missing for choice in choices)

    # --- REDUCE ---------------------------------------------------------------------------------------------------------------

    def _enter_reduce(self, choices: tuple[Choice, ...], responders: list[Manifest]) -> None:
        """Sums the step; the next one is begun meanwhile where staleness allows it."""
        assert type(self.phase) is Seal
        now = self.node.clock.now()
        turn, settings = self.version + self._rounds, self.settings
        together = [*((stage,) for stage in range(settings.stages)), *settings.tied]
        stages = tuple(
            stage_reduction([buffer for stage in some for buffer in choices[stage].buffers], responders, some, settings.chunks, turn)
            for some in together
        )
        order = Reduce(self.phase.round, stages)
        self._reduction_round = ReductionRound(order, choices, self._rounds, now, now + self._reduce_patience.seconds())
        if self._may_overlap(now):
            self.trailing = order
            self._rounds = 0
            self._enter_run((self._all,) * self.settings.stages, frozenset())
        else:
            self.seq += 1
            self._enter(order)

    def _may_overlap(self, now: float) -> bool:
        """Whether the next step may begin. Who leaves or moves does so between steps, so there one must end before the next begins."""
        if not self.settings.staleness or self.version + 1 >= self.settings.steps or self._stopping:
            return False
        return not self._stage_moves.pending(self.members, now, self._step_seconds) and self._can_run(now)

    def _give_up_summing(self, reason: str) -> None:
        """Seals its step again. What was done of the next one meanwhile is done anew: its turn comes when this one is summed."""
        if self.trailing is not None and self._reduction_round is not None:
            self._rounds = self._reduction_round.rounds
            self.trailing = None
        self._enter_seal(reason)

    async def _on_reduced(self, reduced: Reduced) -> None:
        summing = self._reduction_round
        member = self.members.get(reduced.worker)
        if summing is None or reduced.round != summing.order.round or member is None:
            return
        if (reduced.epoch, reduced.version, reduced.stage) != (self.epoch, self.version, member.stage):
            return
        if not self._is_still(member, reduced.incarnation):
            return
        if not summing.hear(reduced):
            return
        member.holds, member.digest = reduced.round, reduced.digest
        member.wait_no_more()
        member.epoch, member.version = reduced.epoch, reduced.version
        if not summing.awaited:
            await self._look_at_reduction(summing)

    async def _look_at_reduction(self, summing: ReductionRound) -> None:
        now = self.node.clock.now()
        late = now >= summing.deadline
        if summing.awaited and not late:
            return
        if self._is_covered(summing, late):
            if summing.disagree():
                self._give_up_summing("members of a stage disagree about the sum")
            elif not waits_for_joiners(
                self.members, summing, self.settings, version=self.version, barred=self._barred, now=now, beat=self._beat
            ):
                if not summing.awaited:
                    self._reduce_patience.measured(now - summing.began)
                await self._write_commit(summing)
        elif late:
            self._reduce_patience.failed()
            blamed = summing.most_blamed()
            if blamed is not None:
                self._barred.add(blamed)
            self._give_up_summing("the reduction did not finish")

    def _is_covered(self, summing: ReductionRound, late: bool) -> bool:
        """Whether every stage has a sum."""
        return all(summing.reports)

    # --- COMMIT ---------------------------------------------------------------------------------------------------------------

    async def _write_commit(self, summing: ReductionRound) -> None:
        reports = [next(iter(row.values()), None) for row in summing.reports]
        loss, weight = summing.choices[-1].loss, summing.choices[-1].weight
        norms = [report.norm_squared if report is not None else 0.0 for report in reports]
        why = why_refused(loss, weight, norms, self.settings.skips_overflows)
        if why is not None:
            self._refuse(*why)
            return
        clip, skipped = clip_or_skip(norms, weight, self.settings.max_norm)
        digests = tuple(report.digest if report is not None else "" for report in reports)
        record = Committed(self.epoch, self.version, summing.order.round, digests, clip, skipped, loss, weight)
        await self._commit_durably(record, summing)

    async def _commit_durably(self, record: Committed, summing: ReductionRound) -> None:
        """Nobody hears of a commit before it is durable."""
        await self.journal.append(self.term, record)
        await self._committed(record, summing)

    def _refuse(self, what: str, value: float) -> None:
        """The step is not made, here or by whoever coordinates next: the run ends once the state before it is stored."""
        if self.refused is not None:
            return
        self.refused = Refused(self.version, what, value)
        self._observe(self.refused)
        self._stopping = True
        self._store(self.node.clock.now())
        self._give_up_summing(f"its {what} is {value}")

    async def _committed(self, record: Committed, summing: ReductionRound) -> None:
        now = self.node.clock.now()
        overlapped = self.trailing is not None
        self._commit = record
        self._reduction_round = self.trailing = None
        self.version += 1
        seconds = self._step_seconds = now - self._committed_at
        self._observe(StepCommitted(record.epoch, record.version, record.loss, record.weight, record.skipped, seconds, summing.rounds))
        for one in too_slow(self.members, self.settings, now):
            self._observe(one)
        self._committed_at = now
        self._checkpoint_schedule.committed(seconds)
        self._barred.clear()
        if overlapped:
            self._go_on_with_step(now)
            return
        self._rounds = 0
        if self.version >= self.settings.steps:
            self._store(now)
            self._enter_seal("")  # until the last state is stored, those who have it stay
            return
        self._rearrange(now)
        self._begin_checkpoint(now)
        self._run_or_seal()

    def _go_on_with_step(self, now: float) -> None:
        """The step under way was begun before the commit and goes on as it is.

        Whoever cannot apply the commit loses its buffers: where manifests were given before it, they are asked for once more.
        """
        self.seq += 1
        self._begin_checkpoint(now)
        if type(self.phase) is Seal:
            self._on_commit_in_seal(now)
        self._broadcast()

    def _on_commit_in_seal(self, now: float) -> None:
        """Some manifests may be of states that could not apply the commit."""
        self._await_manifests(now)

    def _finish(self) -> None:
        self.seq += 1
        self._reduction_round = self.trailing = None
        self._enter(Finished())

    def _rearrange(self, now: float) -> None:
        def usable() -> list[Member]:
            return self._usable(now)

        for member in self._stage_moves.let_go(self.members, usable):
            self._announce(member, self._view())
            self._dismissed[member.name] = member
        self._stage_moves.grant_wishes(self.members, usable)
        self._stage_moves.rebalance(self.members, usable, now, self._step_seconds)

    # --- checkpoints and epochs -------------------------------------------------------------------------------------------------

    def _begin_checkpoint(self, now: float) -> None:
        settings, version = self.settings, self.version
        asked = settings.checkpoint_every > 0 and version % settings.checkpoint_every == 0
        evaluated = settings.evaluate_every > 0 and version % settings.evaluate_every == 0
        by_itself = settings.checkpoint_every == 0 and self._may_store(now) and self._checkpoint_schedule.due(now)
        if self._stopping or asked or evaluated or by_itself:
            self._store(now)

    def _store(self, now: float) -> None:
        """The state of this version: by one worker of every stage, while training goes on."""
        self.checkpoint_round.begin(self.version, self._usable(now), now)
        self._checkpoint_schedule.started(now)

    def _may_store(self, now: float) -> bool:
        """Whether no round is under way that will end: one that is superseded again and again stores nothing."""
        heard = (member for member in self.members if self.members.heard(member, now))
        return self.checkpoint_round.version < 0 or self._checkpoint_schedule.given_up(self.checkpoint_round, heard, now)

    def _look_at_checkpoint(self, now: float) -> None:
        """A stage that is down to its last process is stored in the middle of a step, if nothing asks for another interval."""
        schedule, usable = self._checkpoint_schedule, self._usable(now)
        schedule.look(usable, now)
        if self.settings.checkpoint_every or self._stopping or not schedule.urgent(now) or self.version == self._origin.version:
            return
        served = len({member.stage for member in usable}) == self.settings.stages
        if not self._is_stored() and served and self._may_store(now):
            self._store(now)

    def _is_stored(self) -> bool:
        saved = self._last_checkpoint
        return saved is not None and (saved.epoch, saved.version) == (self.epoch, self.version)

    async def _stop_when_stored(self, now: float) -> None:
        """Ends the run when nothing would be lost; a writer that is gone is replaced, since no next checkpoint supersedes this one."""
        if self.version == self._origin.version or self._is_stored():
            if type(self.phase) is not Finished:
                await self._check_that_it_leads()
                self._finish()
        elif self.checkpoint_round.version == self.version:
            self.checkpoint_round.replace_lost(self._usable(now))
        elif self.version >= self.settings.steps and now >= self._gathered_at:
            self._store(now)

    async def _check_that_it_leads(self) -> None:
        """Ending writes no record that the journal could refuse: another may have taken over, and then it is not this one's to end."""
        newest = replay(await self.journal.read()).term
        if newest > self.term:
            raise FencedError(f"the journal is at term {newest}: another coordinator has taken over")

    def why_not_stored(self, process: str, epoch: int, version: int, stage: int, size: int) -> str | None:
        """Why the store must not take a state that a process sends, which is told; None: it takes it."""
        quota = self.settings.state_quota
        why = self.checkpoint_round.why_not(process, version, stage) if epoch == self.epoch else "it is of another epoch"
        if why is None and stage < len(quota) and size > quota[stage]:
            why = f"it has {size:,} bytes, and a state of this stage at most {quota[stage]:,}"
        if why is not None:
            self._observe(StateRefused(process, version, stage, why))
        return why

    def stored(self, epoch: int, version: int, stage: int, digest: str) -> None:
        """The store has a state, with this digest."""
        self.node.inbox.put(_Stored(epoch, version, stage, digest))

    async def _on_stored(self, stored: _Stored) -> None:
        if (stored.epoch, stored.version) == (self.epoch, self.checkpoint_round.version):
            self.checkpoint_round.stored(stored.stage, stored.digest, self.node.clock.now())
            await self._note_stored()

    async def _note_stored(self) -> None:
        """Looks at what is stored of the round; the journal has it once all of it is what the stages' workers have."""
        storing, now = self.checkpoint_round, self.node.clock.now()
        if storing.version < 0:
            return
        heard = {member.identity for member in self.members if self.members.heard(member, now)}
        every = range(self.settings.stages)
        verdicts = [storing.verdict(stage, heard, now, self.settings.patience_seconds) for stage in every]
        for stage, verdict in zip(every, verdicts, strict=True):
            if verdict is not None and not verdict.taken:
                self._discard(self.epoch, storing.version, stage)
                self._observe(StateRefused(storing.reject(stage), storing.version, stage, "most workers of its stage have another"))
        if all(verdict is not None and verdict.taken for verdict in verdicts):
            for stage, verdict in zip(every, verdicts, strict=True):
                if verdict is not None and not verdict.agreed:
                    self._observe(StatesDiffer(storing.version, stage))
            record = Checkpointed(self.epoch, self.checkpoint_round.version)
            self._checkpoint_schedule.saved(self.checkpoint_round, self.node.clock.now())
            self.checkpoint_round.end()
            await self.journal.append(self.term, record)
            self._last_checkpoint = record
            self._observe(Saved(record.epoch, record.version))

    async def _look_for_lost_stages(self, now: float) -> None:
        if type(self.phase) is Finished or self.version == self._origin.version:
            self._lost_since.clear()
            return
        alive = {member.stage for member in self.members if self.members.heard(member, now) and self._has_state(member)}
        for stage in range(self.settings.stages):
            if stage in alive:
                self._lost_since.pop(stage, None)
            elif now - self._lost_since.setdefault(stage, now) > self.settings.lost_seconds:
                await self._roll_back(stage)
                return

    async def _roll_back(self, stage: int) -> None:
        """Nobody can continue a stage: everybody starts again from the last checkpoint, under a new epoch."""
        checkpoint, made = self._last_checkpoint or Checkpointed(0, 0), self.version
        record = Epoch(self.epoch + 1, checkpoint.version, checkpoint.epoch)
        await self.journal.append(self.term, record)
        self._origin = record
        self.epoch, self.version = record.epoch, record.version
        self._commit = None
        self.checkpoint_round.end()
        self._barred.clear()
        self._lost_since.clear()
        self.trailing = None
        self._checkpoint_schedule.lost_stage(self.node.clock.now())
        self._observe(RolledBack(self.epoch, self.version, stage, made - self.version))
        self._enter_seal("a stage was lost")
