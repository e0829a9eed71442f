"""Coordinator: decides which work makes up a step, writes it to the journal, and says so until everybody has heard.

It reads as docs/swarm.md does, whose rules the sections name. What holds after a failure: whatever was announced is in the journal; a
coordinator started again on the same journal takes over under a new term, seals first, and continues with the buffers that survive. It
keeps nothing else that matters.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.checkpoint_schedule import StoredStates
from atoll.control.clipping import clip_or_skip, why_refused
from atoll.control.coordinator_state import CoordinatorState
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
from atoll.control.reduction import Choice, ReductionRound, choose_stages, stage_reduction, too_slow, waits_for_joiners
from atoll.control.settings import Settings
from atoll.control.world import Journal, SwarmProcess
from atoll.events import CoordinatorStarted, NonFinite, StageLost, StepFinished, StepRepaired

__all__ = ["Coordinator"]

TICK = object()


class _Stored(msgspec.Struct, frozen=True):
    """The coordinator's own store has got a state."""

    epoch: int
    version: int
    stage: int
    digest: str


class Coordinator(CoordinatorState):
    """One coordinator process. `await run()` ends when the run is finished or a newer coordinator has taken over (`deposed`)."""

    def __init__(
        self,
        node: SwarmProcess,
        journal: Journal,
        settings: Settings,
        discard: Callable[[int, int, int], None] = lambda epoch, version, stage: None,
    ) -> None:
        super().__init__(node, journal, settings)
        self.deposed = self.finished = False
        self.refused: NonFinite | None = None  # why the run ends before its last step, where a step must not be made
        self.checkpoints = StoredStates(self, discard)
        self._emit = node.emit
        self._all = frozenset(range(settings.micro_batches))
        self._rounds = 0  # SEALs of the step under way
        self._why_sealed = ""  # where that had a reason
        self._entered = self._deadline = self._committed_at = self._gathered_at = self._step_seconds = 0.0
        self._awaited: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._reduction_round: ReductionRound | None = None
        self._lost_since: dict[int, float] = {}  # stages that nobody can continue
        self._stage_moves = StageMoves(settings, node.random, node.emit)
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
        self.stopping = True

    @property
    def stopped(self) -> bool:
        """Whether the run ended, or ends, before its last step because it was asked to."""
        return type(self.phase) is Finished and self.version < self.settings.steps

    @property
    def stored_version(self) -> int:
        """What everybody would go back to."""
        return self.checkpoints.last.version if self.checkpoints.last is not None else 0

    def why_not_stored(self, process: str, epoch: int, version: int, stage: int, size: int) -> str | None:
        """Why the store must not take a state that a process sends, which is told; None: it takes it."""
        return self.checkpoints.why_not(process, epoch, version, stage, size)

    def stored(self, epoch: int, version: int, stage: int, digest: str) -> None:
        """The store has a state, with this digest."""
        self.node.inbox.put(_Stored(epoch, version, stage, digest))

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

    # --- rule 14: a new coordinator -------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """The term is claimed before the journal is believed: until then the coordinator before may still have added a commit."""
        await self._claim_term()
        history = replay(await self.journal.read())
        if history.origin is None:
            await self.journal.append(self.term, self.origin)
        else:
            self.origin = history.origin
        self.epoch, self.version = self.origin.epoch, history.version
        self.commit, self.checkpoints.last = history.commit, history.checkpoint
        self.members = Members(self.settings, self.term)
        now = self.node.clock.now()
        self._committed_at = now
        self._stage_moves.begin(now)
        self.checkpoints.schedule.begin(now)
        self._emit(CoordinatorStarted(term=self.term, step=self.version))
        if self.version >= self.settings.steps and history.stored:
            self._finish()
            return
        self._enter_seal("a coordinator took over")
        fresh = self.commit is None and self.version == 0
        self._deadline = self._gathered_at = now + (self.settings.gather_seconds if not fresh else 0.0)
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

    # --- hearing --------------------------------------------------------------------------------------------------------------

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
                await self.checkpoints.on_stored(message.epoch, message.version, message.stage, message.digest)
            case _ if message is TICK:
                await self._on_tick()

    async def _on_worker_beat(self, beat: WorkerBeat) -> None:
        now, before, summing = self.node.clock.now(), self.members.get(beat.worker), self._reduction_round
        ready = before is not None and self.has_state(before)
        dismissed = self._dismissed.get(beat.worker)
        if before is None and dismissed is not None and beat.nonce <= dismissed.nonce:
            if beat.nonce == dismissed.nonce:
                self._announce(dismissed, self._view())  # it has not heard yet
            return
        if before is None and beat.incarnation == 0 and now < self._gathered_at:
            return  # where it helps is known once those who have a stage were heard
        contributed = before is not None and summing is not None and summing.contributes(before.name, before.incarnation)
        member, new = self.members.hear(beat, now)
        if member is None:
            return
        if new and beat.incarnation != member.incarnation:  # else it was here before this coordinator
            self._emit(member.changed("active", "joining"))
        if new and contributed:
            self._on_contributor_back(member)
        if new or beat.incarnation != member.incarnation:
            self._announce(member, self._view())
        await self.checkpoints.on_beat(member, beat)
        if not ready and type(self.phase) is Run and self.has_state(member):
            self._broadcast(workers=False)  # whoever hands out work need not wait for the next heartbeat to use it

    def _on_feeder_beat(self, beat: FeederBeat) -> None:
        now = self.node.clock.now()
        member, new = self.members.hear(beat, now)
        if member is None:
            return
        if new or beat.incarnation != member.incarnation:
            self._announce(member, self._view())
        if type(self.phase) is Run and beat.round == self.phase.opened:
            self._leases.hear(beat, now)
            self._look_at_leases(self.phase, now, False)

    async def _on_tick(self) -> None:
        now = self.node.clock.now()
        self.beat += 1
        self.members.forget(now)
        if type(self.phase) is not Finished:
            self._look_at_heartbeats(now)
            self.checkpoints.look(now)
        await self._look_for_lost_stages(now)
        await self.checkpoints.judge()
        if self.stopping or self.version >= self.settings.steps:
            await self._stop_when_stored(now)
        phase = self.phase
        if type(phase) is Run:
            self._move_at_once(phase, now)
            self._look_at_leases(phase, now, True)
        elif type(phase) is Seal and now >= self._deadline:
            self._fill_empty_stages(now)
            self._decide()
        if self._reduction_round is not None:
            await self._look_at_reduction(self._reduction_round)
        elif type(phase) is Finished and now - self._entered > self.settings.silent_beats * self.settings.heartbeat_seconds:
            self.finished = True
        self._broadcast()

    def _look_at_heartbeats(self, now: float) -> None:
        for change in self._missed_heartbeats.look(self.members, now):
            if change.state == "silent" and process_of(change.name) == change.name and change.stages:
                self.checkpoints.schedule.died()
            self._emit(change)

    # --- rule 3: the phase is repeated until it changes -------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._entered = self.node.clock.now()
        self._broadcast()

    def _broadcast(self, workers: bool = True) -> None:
        """To everybody, or to feeders alone."""
        self.find_routes(self.node.clock.now())
        view = self._view()
        for member in self.members:
            if workers or not member.worker:
                self._announce(member, view)

    def _view(self) -> View:
        where = (self.epoch, self.version, (self.origin.from_epoch, self.origin.version), self.commit)
        return View(self.term, self.seq, self.beat, *where, self.phase, self.checkpoints.round.version, self.trailing)

    def _announce(self, member: Member, view: View) -> None:
        self.node.transport.send(member.name, Announce(self.node.name, view, self._assignment(member)))

    def _assignment(self, member: Member) -> Assignment:
        who, storing = (member.nonce, member.incarnation), self.checkpoints.round
        if not member.worker:
            return Assignment(*who, -1, lease=self._leases.of(member), window=self._window(), routes=self.routes, lost=self.lost)
        donors = self.donors(member) if member.stage >= 0 and not self.has_state(member) else ()
        return Assignment(*who, member.stage, donors, storing.writes(member), storing.attests(member))

    def _window(self) -> int:
        """Three micro-batches for every process: one in hand, one waiting, one on its way. A feeder has more where the way is long."""
        workers = processes(peer.worker for row in self.routes for peer in row)
        return max(1, min(self.settings.in_flight, -(-3 * len(workers) // self._leases.feeders)))

    # --- rule 4: RUN ------------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Everything is missing and nothing is kept."""
        if self.stopping:
            self._enter_seal("")
        elif self.can_run(self.node.clock.now()):
            self._enter_run((self._all,) * self.settings.stages, frozenset())
        else:
            self._enter_seal("a stage or the feeders are not there")

    def _enter_run(self, missing: tuple[frozenset[int], ...], keep: frozenset[tuple[str, int, int]]) -> None:
        now = self.node.clock.now()
        self.seq += 1
        self._leases.divide(sorted(frozenset().union(*missing)), self.feeders(now), now)
        self.routed, self.lost = {}, ()
        self._enter(Run(missing, keep, (self.term, self.seq)))

    # --- rule 6: SEAL -----------------------------------------------------------------------------------------------------------

    def _look_at_leases(self, run: Run, now: float, ticking: bool) -> None:
        """Seals when all is done, when nobody is left who could do the rest, or when nothing moves."""
        if not self._leases.pending(self.members, run.opened, now):
            self._enter_seal("")
        elif ticking and self._leases.stuck(now):
            self._enter_seal("no progress")

    def _enter_seal(self, reason: str) -> None:
        self.seq += 1
        self._rounds += 1
        self._why_sealed = reason or self._why_sealed
        if self.trailing is None:
            self._reduction_round = None
        self._await_manifests(self.node.clock.now())
        self._enter(Seal(self._next_round()))

    def _next_round(self) -> Round:
        """A name that no round had before, under any coordinator."""
        return self.term, self.seq

    def _await_manifests(self, now: float) -> None:
        self._manifests = {}
        self._awaited = {member.name for member in self.answering(now)}
        self._deadline = now + self._seal_patience.seconds()

    def _on_manifest(self, manifest: Manifest) -> None:
        phase, member = self.phase, self.members.get(manifest.worker)
        if type(phase) is not Seal or manifest.round != phase.round or member is None or member.name in self.barred:
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

    # --- rule 7: decide ---------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Every micro-batch in exactly one chosen buffer of every stage: reduce. Otherwise run what is missing."""
        now = self.node.clock.now()
        later = now + self.settings.heartbeat_seconds
        storing = self.stopping and self.checkpoints.round.version == self.version
        if self.refused is not None or storing or self.version >= self.settings.steps:
            self._deadline = later  # no more steps: the state is being stored
            return
        responders = self._responders()
        choices = self._choose(responders)
        if self._is_complete(choices):
            if self.trailing is None:
                self._enter_reduce(choices, responders)
            else:
                self._deadline = later  # one sum at a time: when that of the step before is committed
        elif self.can_run(now):
            self._repair(choices)
        else:
            self._deadline = later
            self._awaited = {""}

    def _responders(self) -> list[Manifest]:
        answers = [(self.members.get(manifest.worker), manifest) for manifest in self._manifests.values()]
        return [manifest for member, manifest in answers if member is not None and self._is_still(member, manifest.incarnation)]

    def _choose(self, responders: list[Manifest]) -> tuple[Choice, ...]:
        return choose_stages(responders, self.settings.stages, self._all)

    def _is_complete(self, choices: tuple[Choice, ...]) -> bool:
        return not any(choice.missing for choice in choices)

    def _repair(self, choices: tuple[Choice, ...]) -> None:
        keep = frozenset(buffer for choice in choices for buffer in choice.buffers)
        if keep:
            reason, self._why_sealed = self._why_sealed or "somebody who had it is gone", ""
            missing = tuple(len(choice.missing) for choice in choices)
            self._emit(StepRepaired(step=self.step + 1, micro_batches=missing, reason=reason))
        self._enter_run(tuple(choice.missing for choice in choices), keep)

    # --- rule 8: REDUCE; rule 17: and the next step meanwhile ---------------------------------------------------------------------

    def _enter_reduce(self, choices: tuple[Choice, ...], responders: list[Manifest]) -> None:
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
        if not self.settings.staleness or self.version + 1 >= self.settings.steps or self.stopping:
            return False
        return not self._stage_moves.pending(self.members, now, self._step_seconds) and self.can_run(now)

    async def _on_reduced(self, reduced: Reduced) -> None:
        summing, member = self._reduction_round, self.members.get(reduced.worker)
        if summing is None or reduced.round != summing.order.round or member is None:
            return
        if (reduced.epoch, reduced.version, reduced.stage) != (self.epoch, self.version, member.stage):
            return
        if not self._is_still(member, reduced.incarnation) or not summing.hear(reduced):
            return
        member.holds, member.digest = reduced.round, reduced.digest
        member.wait_no_more()
        member.epoch, member.version = reduced.epoch, reduced.version
        if not summing.awaited:
            await self._look_at_reduction(summing)

    # --- rule 9: COMMIT; rule 11: a failed reduction; rule 18: a step that must not be made -----------------------------------------

    async def _look_at_reduction(self, summing: ReductionRound) -> None:
        now = self.node.clock.now()
        late = now >= summing.deadline
        if summing.awaited and not late:
            return
        if not self._is_covered(summing, late):
            if late:
                self._bar_most_blamed(summing)
        elif summing.disagree():
            self._give_up_summing("members of a stage disagree about the sum")
        elif not waits_for_joiners(self.members, summing, self.settings, version=self.version, barred=self.barred, now=now, beat=self.beat):
            if not summing.awaited:
                self._reduce_patience.measured(now - summing.began)
            await self._write_commit(summing)

    def _is_covered(self, summing: ReductionRound, late: bool) -> bool:
        """Whether every stage has a sum."""
        return all(summing.reports)

    def _bar_most_blamed(self, summing: ReductionRound) -> None:
        self._reduce_patience.failed()
        blamed = summing.most_blamed()
        if blamed is not None:
            self.barred.add(blamed)
        self._give_up_summing("the reduction did not finish")

    def _on_contributor_back(self, member: Member) -> None:
        """It has lost what it had summed."""
        self._give_up_summing(f"{member.name} came back with nothing")

    def _give_up_summing(self, reason: str) -> None:
        """Seals its step again. What was done of the next one meanwhile is done anew: its turn comes when this one is summed."""
        if self.trailing is not None and self._reduction_round is not None:
            self._rounds = self._reduction_round.rounds
            self.trailing = None
        self._enter_seal(reason)

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

    def _refuse(self, what: Literal["loss", "gradient", "weight"], value: float) -> None:
        """The step is not made, here or by whoever coordinates next: the run ends once the state before it is stored."""
        if self.refused is not None:
            return
        self.refused = NonFinite(step=self.version + 1, what=what, value=str(value))
        self._emit(self.refused)
        self.stopping = True
        self.checkpoints.begin(self.node.clock.now())
        self._give_up_summing(f"its {what} is {value}")

    async def _commit_durably(self, record: Committed, summing: ReductionRound) -> None:
        """Nobody hears of a commit before it is durable."""
        await self.journal.append(self.term, record)
        await self._committed(record, summing)

    async def _committed(self, record: Committed, summing: ReductionRound) -> None:
        now = self.node.clock.now()
        overlapped = self.trailing is not None
        self.commit = record
        self._reduction_round = self.trailing = None
        self.version += 1
        self._step_seconds, self._committed_at, self._why_sealed = now - self._committed_at, now, ""
        self._tell_step(record, self._step_seconds, summing.rounds)
        for slow in too_slow(self.members, self.settings, now):
            self._emit(slow)
        self.checkpoints.schedule.committed(self._step_seconds)
        self.barred.clear()
        if overlapped:
            self._go_on_with_step(now)
            return
        self._rounds = 0
        if self.version >= self.settings.steps:
            self.checkpoints.begin(now)
            self._enter_seal("")  # until the last state is stored, those who have it stay
            return
        self._rearrange(now)
        self.checkpoints.after_commit(now)
        self._begin_step()

    def _tell_step(self, record: Committed, seconds: float, rounds: int) -> None:
        """How many samples a step has is not known here."""
        loss, weight, applied = record.loss / record.weight, record.weight, not record.skipped
        step = StepFinished(
            step=record.version + 1, loss=loss, samples=0, weight=weight, seconds=seconds, learning_rate=None, applied=applied
        )
        self._emit(msgspec.structs.replace(step, epoch=record.epoch, rounds=rounds))

    def _go_on_with_step(self, now: float) -> None:
        """The step under way was begun before the commit and goes on as it is.

        Whoever cannot apply the commit loses its buffers: where manifests were given before it, they are asked for once more.
        """
        self.seq += 1
        self.checkpoints.after_commit(now)
        if type(self.phase) is Seal:
            self._on_commit_in_seal(now)
        self._broadcast()

    def _on_commit_in_seal(self, now: float) -> None:
        """Some manifests may be of states that could not apply the commit."""
        self._await_manifests(now)

    # --- rule 13: who leaves and who moves ----------------------------------------------------------------------------------------

    def _rearrange(self, now: float) -> None:
        """Between steps."""

        def usable() -> list[Member]:
            return self.usable(now)

        for member in self._stage_moves.let_go(self.members, usable):
            self._announce(member, self._view())
            self._dismissed[member.name] = member
        self._stage_moves.grant_wishes(self.members, usable)
        self._stage_moves.rebalance(self.members, usable, now, self._step_seconds)

    def _move_at_once(self, run: Run, now: float) -> None:
        """Where somebody was lost, one that has done little yet takes the place: the step need not crawl to its end first."""
        if self.trailing is None and not self.stopping:  # those who move would be missing in its sums
            remaining = self._leases.remaining(self.members, run.opened)
            self._stage_moves.rebalance_at_once(self.members, lambda: self.usable(now), now, self.routed, remaining)

    def _fill_empty_stages(self, now: float) -> None:
        if self.trailing is None:
            for moved in self._stage_moves.fill_empty_stages(self.members, now):
                self._manifests.pop(moved.name, None)

    # --- rule 15: the end, when the last state is stored ----------------------------------------------------------------------------

    async def _stop_when_stored(self, now: float) -> None:
        """Ends the run when nothing would be lost; a writer that is gone is replaced, since no next checkpoint supersedes this one."""
        if self.version == self.origin.version or self.checkpoints.current:
            if type(self.phase) is not Finished:
                await self._check_that_it_leads()
                self._finish()
        elif self.checkpoints.round.version == self.version:
            self.checkpoints.round.replace_lost(self.usable(now))
        elif self.version >= self.settings.steps and now >= self._gathered_at:
            self.checkpoints.begin(now)

    async def _check_that_it_leads(self) -> None:
        """Ending writes no record that the journal could refuse: another may have taken over, and then it is not this one's to end."""
        newest = replay(await self.journal.read()).term
        if newest > self.term:
            raise FencedError(f"the journal is at term {newest}: another coordinator has taken over")

    def _finish(self) -> None:
        self.seq += 1
        self._reduction_round = self.trailing = None
        self._enter(Finished())

    # --- rule 16: a stage that nobody can continue ------------------------------------------------------------------------------------

    async def _look_for_lost_stages(self, now: float) -> None:
        if type(self.phase) is Finished or self.version == self.origin.version:
            self._lost_since.clear()
            return
        alive = {member.stage for member in self.members if self.members.heard(member, now) and self.has_state(member)}
        for stage in range(self.settings.stages):
            if stage in alive:
                self._lost_since.pop(stage, None)
            elif now - self._lost_since.setdefault(stage, now) > self.settings.lost_seconds:
                await self._roll_back(stage)
                return

    async def _roll_back(self, stage: int) -> None:
        """Everybody starts again from the last checkpoint, under a new epoch."""
        checkpoint, made = self.checkpoints.last or Checkpointed(0, 0), self.version
        record = Epoch(self.epoch + 1, checkpoint.version, checkpoint.epoch)
        await self.journal.append(self.term, record)
        self.origin = record
        self.epoch, self.version, self.commit, self.trailing = record.epoch, record.version, None, None
        self.checkpoints.round.end()
        self.barred.clear()
        self._lost_since.clear()
        self.checkpoints.schedule.lost_stage(self.node.clock.now())
        self._emit(StageLost(stage=stage, step=self.version, epoch=self.epoch, lost=made - self.version))
        self._enter_seal("a stage was lost")
