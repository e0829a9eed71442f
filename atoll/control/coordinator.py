"""Coordinator: decides which work makes up a step, writes it to the journal, and says so until everybody has heard.

What holds after a failure: whatever was announced is in the journal; a coordinator started again on the same journal takes over under a new
term, seals first, and continues with the buffers that survive. It keeps nothing else that matters.
"""

from collections import Counter
from collections.abc import Callable
from heapq import nsmallest
from typing import Any

from atoll.control.catching_up import DONORS
from atoll.control.checks import ALL_CHECKS, Checks
from atoll.control.clipping import clip_factor, why_refused
from atoll.control.decision import Choice, choose_stages
from atoll.control.happenings import (
    Happening,
    Joined,
    Refused,
    Repaired,
    Resealed,
    RolledBack,
    Saved,
    StepCommitted,
    TookOver,
)
from atoll.control.holding import too_slow, waits_for_joiners
from atoll.control.hosting import processes
from atoll.control.journal import Checkpointed, Epoch, FencedError, Record, Term, replay
from atoll.control.leases import Leases
from atoll.control.membership import Member, Members
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
    Run,
    Seal,
    View,
    WorkerBeat,
)
from atoll.control.patience import Patience
from atoll.control.rearranging import Rearranging
from atoll.control.settings import Settings
from atoll.control.silence import Silence
from atoll.control.storing import Storing
from atoll.control.summing import Summing, stage_reduction
from atoll.control.world import Journal, Node

__all__ = ["Coordinator"]

TICK = object()


class Coordinator:
    """One coordinator process. `await run()` ends when the run is finished or a newer coordinator has taken over (`deposed`)."""

    def __init__(
        self,
        node: Node,
        journal: Journal,
        settings: Settings,
        checks: Checks = ALL_CHECKS,
        observe: Callable[[Happening], None] | None = None,
    ) -> None:
        self.node = node
        self.journal = journal
        self.settings = settings
        self.checks = checks
        self.deposed = False
        self.finished = False
        self.refused: Refused | None = None  # why the run ends before its last step, where a step must not be made
        self.term = 0
        self.seq = 0
        self.epoch = 0
        self.version = 0
        self.phase: Phase = Seal((0, 0))  # of the step under way
        self.trailing: Reduce | None = None  # with staleness: how the step before it is summed
        self.members = Members(settings, 0)
        self._observe = observe or (lambda happening: None)
        self._all = frozenset(range(settings.micro_batches))
        self._origin = Epoch(0, 0, 0)
        self._commit: Committed | None = None
        self._last_checkpoint: Checkpointed | None = None
        self._storing = Storing()
        self._beat = 0
        self._entered = 0.0
        self._deadline = 0.0
        self._committed_at = 0.0
        self._rounds = 0
        self._gathered_at = 0.0
        self._awaited: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._summing: Summing | None = None
        self._barred: set[str] = set()
        self._routes: tuple[tuple[Peer, ...], ...] = ()
        self._routed: set[tuple[str, int]] = set()  # workers in the routes since this RUN began
        self._lost: tuple[tuple[str, int], ...] = ()
        self._lost_since: dict[int, float] = {}
        self._step_seconds = 0.0
        self._rearranging = Rearranging(settings, node.random, self._observe)
        self._stopping = False
        self._dismissed: dict[str, Member] = {}  # those let go; a late heart-beat does not bring them back
        self._silence = Silence()
        beat = settings.heartbeat_seconds
        self._seal_patience = Patience(settings.patience_seconds, 2 * beat)
        self._reduce_patience = Patience(settings.patience_seconds, 2 * beat)
        self._leases = Leases(Patience(settings.patience_seconds, 3 * beat))

    def move(self, worker: str, stage: int) -> None:
        """Asks that a worker change stage after this step; it is not done where it would leave too few behind."""
        self._rearranging.wish(worker, stage)

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
        self._rearranging.begin(now)
        self._observe(TookOver(self.term, self.version))
        if self.version >= self.settings.steps:
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
        kind = type(message)
        if message is TICK:
            await self._on_tick()
        elif kind is WorkerBeat:
            await self._on_worker_beat(message)
        elif kind is FeederBeat:
            self._on_feeder_beat(message)
        elif kind is Manifest:
            self._on_manifest(message)
        elif kind is Reduced:
            await self._on_reduced(message)

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
        summing = self._summing
        contributed = before is not None and summing is not None and summing.contributes(before.name, before.incarnation)
        member, new = self.members.hear(beat, self.node.clock.now())
        if member is None:
            return
        if new:
            if beat.incarnation != member.incarnation:  # else it was here before this coordinator
                self._observe(Joined(member.name, member.incarnation, member.stage))
            if contributed and self.checks.incarnation:
                self._give_up_summing(f"{member.name} came back with nothing")
        if new or beat.incarnation != member.incarnation:
            self._announce(member, self._view())
        if beat.stored == self._storing.version >= 0 and beat.epoch == self.epoch:
            await self._note_stored()
        if not ready and type(self.phase) is Run and self._has_state(member):
            self._tell_feeders()

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
            for change in self._silence.look(self.members, now):
                self._observe(change)
        await self._look_for_lost_stages(now)
        if self._stopping:
            await self._stop_when_stored(now)
        phase = type(self.phase)
        if phase is Run:
            self._look_at_leases(now, True)
        elif phase is Seal and now >= self._deadline:
            if self.trailing is None:  # those who move would be missing in its sums
                for moved in self._rearranging.fill_empty_stages(self.members, now):
                    self._manifests.pop(moved.name, None)
            self._decide()
        if self._summing is not None:
            await self._look_at_reduction(self._summing)
        elif phase is Finished and now - self._entered > self.settings.silent_beats * self.settings.heartbeat_seconds:
            self.finished = True
        self._broadcast()

    # --- speaking -----------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        origin = (self._origin.from_epoch, self._origin.version)
        where = (self.epoch, self.version, origin, self._commit)
        return View(self.term, self.seq, self._beat, *where, self.phase, self._storing.version, self.trailing)

    @property
    def step(self) -> int:
        """The step under way."""
        return self.version + (self.trailing is not None)

    def _broadcast(self) -> None:
        self._find_routes()
        view = self._view()
        for member in self.members:
            self._announce(member, view)

    def _tell_feeders(self) -> None:
        """Somebody has just got its state: whoever hands out work need not wait for the next heart-beat to use it."""
        self._find_routes()
        view = self._view()
        for member in self.members:
            if not member.worker:
                self._announce(member, view)

    def _find_routes(self) -> None:
        now = self.node.clock.now()
        usable = self._answering(now)  # who wants to leave works until it is let go, after the step: what it has begun counts
        self._routes = Members.peers(usable, self.settings.stages)
        if type(self.phase) is Run:
            self._routed.update((member.name, member.incarnation) for member in usable)
            self._lost = tuple(sorted(pair for pair in self._routed if not self._there(*pair, now)))

    def _there(self, name: str, incarnation: int, now: float) -> bool:
        """Whether a worker is heard and is still who it was."""
        member = self.members.get(name)
        return member is not None and member.incarnation == incarnation and self.members.heard(member, now)

    def _announce(self, member: Member, view: View) -> None:
        self.node.transport.send(member.name, Announce(self.node.name, view, self._assignment(member)))

    def _assignment(self, member: Member) -> Assignment:
        if not member.worker:
            lease = self._leases.of(member)
            return Assignment(
                member.nonce, member.incarnation, -1, lease=lease, window=self._window(), routes=self._routes, lost=self._lost
            )
        donors: tuple[str, ...] = ()
        if member.stage >= 0 and not self._has_state(member):
            donors = self._donors(member)
        return Assignment(member.nonce, member.incarnation, member.stage, donors, self._storing.writes(member))

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
        self._routed, self._lost = set(), ()
        self._enter(Run(missing, keep, (self.term, self.seq)))

    def _run_or_seal(self) -> None:
        """A new step: everything is missing and nothing is kept."""
        if self._stopping:
            self._enter_seal("")
        elif self._can_run(self.node.clock.now()):
            self._enter_run((self._all,) * self.settings.stages, frozenset())
        else:
            self._enter_seal("a stage or the feeders are not there")

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
            self._summing = None
        self._await_manifests(now)
        self._enter(Seal((self.term, self.seq) if self.checks.term_digest else (0, self._rounds)))

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
        if self.checks.survived and manifest.state != self.version:
            return
        if self.checks.incarnation:
            if manifest.incarnation != member.incarnation:
                return
        elif manifest.worker in self._manifests:
            return
        member.epoch, member.version = self.epoch, self.version
        self._manifests[manifest.worker] = manifest
        self._awaited.discard(manifest.worker)
        if not self._awaited:
            self._seal_patience.measured(self.node.clock.now() - self._entered)
            self._decide()

    def _responders(self) -> list[Manifest]:
        found = []
        for manifest in self._manifests.values():
            member = self.members.get(manifest.worker)
            if member is not None and (member.incarnation == manifest.incarnation or not self.checks.incarnation):
                found.append(manifest)
        return found

    def _decide(self) -> None:
        """Every micro-batch in exactly one chosen buffer of every stage: reduce. Otherwise run what is missing."""
        now = self.node.clock.now()
        if self.refused is not None or (self._stopping and self._storing.version == self.version):
            self._deadline = now + self.settings.heartbeat_seconds  # no more steps: the state is being stored
            return
        responders = self._responders()
        choices = choose_stages(responders, self.settings.stages, self._all, self.checks)
        incomplete = any(choice.missing for choice in choices)
        if not incomplete or (not self.checks.completeness and all(choice.buffers for choice in choices)):
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
        self._summing = Summing(order, choices, self._rounds, now, now + self._reduce_patience.seconds())
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
        return not self._rearranging.pending(self.members, now, self._step_seconds) and self._can_run(now)

    def _give_up_summing(self, reason: str) -> None:
        """Seals its step again. What was done of the next one meanwhile is done anew: its turn comes when this one is summed."""
        if self.trailing is not None and self._summing is not None:
            self._rounds = self._summing.rounds
            self.trailing = None
        self._enter_seal(reason)

    async def _on_reduced(self, reduced: Reduced) -> None:
        summing = self._summing
        member = self.members.get(reduced.worker)
        if summing is None or reduced.round != summing.order.round or member is None:
            return
        if (reduced.epoch, reduced.version, reduced.stage) != (self.epoch, self.version, member.stage):
            return
        if self.checks.incarnation and reduced.incarnation != member.incarnation:
            return
        if not summing.hear(reduced):
            return
        member.holds, member.digest = reduced.round, reduced.digest
        member.wait_no_more()
        member.epoch, member.version = reduced.epoch, reduced.version
        if not summing.awaited:
            await self._look_at_reduction(summing)

    async def _look_at_reduction(self, summing: Summing) -> None:
        now = self.node.clock.now()
        late = now >= summing.deadline
        if summing.awaited and not late:
            return
        covered = all(summing.reports)
        if covered or (late and not self.checks.all_stages and any(summing.reports)):
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

    # --- COMMIT ---------------------------------------------------------------------------------------------------------------

    async def _write_commit(self, summing: Summing) -> None:
        reports = [next(iter(row.values()), None) for row in summing.reports]
        weight = summing.choices[-1].weight
        norms = [report.norm_squared if report is not None else 0.0 for report in reports]
        loss = summing.choices[-1].loss
        why = why_refused(loss, weight, norms, self.settings.skips_overflows)
        if why is not None:
            self._refuse(*why)
            return
        clip, skipped = clip_factor(norms, weight, self.settings.max_norm)
        record = Committed(
            self.epoch,
            self.version,
            summing.order.round,
            tuple(report.digest if report is not None else "" for report in reports),
            clip,
            skipped,
            loss,
            weight,
        )
        if self.checks.journal_first:
            await self.journal.append(self.term, record)
            await self._committed(record, summing)
        else:
            await self._committed(record, summing)
            await self.journal.append(self.term, record)

    def _refuse(self, what: str, value: float) -> None:
        """The step is not made, here or by whoever coordinates next: the run ends once the state before it is stored."""
        if self.refused is not None:
            return
        self.refused = Refused(self.version, what, value)
        self._observe(self.refused)
        self._stopping = True
        self._storing.begin(self.version, self._usable(self.node.clock.now()))
        self._give_up_summing(f"its {what} is {value}")

    async def _committed(self, record: Committed, summing: Summing) -> None:
        now = self.node.clock.now()
        overlapped = self.trailing is not None
        self._commit = record
        self._summing = self.trailing = None
        self.version += 1
        seconds = self._step_seconds = now - self._committed_at
        self._observe(StepCommitted(record.epoch, record.version, record.loss, record.weight, record.skipped, seconds, summing.rounds))
        for one in too_slow(self.members, self.settings, now):
            self._observe(one)
        self._committed_at = now
        self._barred.clear()
        if overlapped:
            self._go_on_with_step(now)
            return
        self._rounds = 0
        if self.version >= self.settings.steps:
            self._finish()
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
            if self.checks.survived:
                self._await_manifests(now)
            elif not self._awaited:
                self._decide()
        self._broadcast()

    def _finish(self) -> None:
        self.seq += 1
        self._summing = self.trailing = None
        self._enter(Finished())

    def _rearrange(self, now: float) -> None:
        def usable() -> list[Member]:
            return self._usable(now)

        for member in self._rearranging.let_go(self.members, usable):
            self._announce(member, self._view())
            self._dismissed[member.name] = member
        self._rearranging.grant_wishes(self.members, usable)
        self._rearranging.rebalance(self.members, usable, now, self._step_seconds)

    # --- checkpoints and epochs -------------------------------------------------------------------------------------------------

    def _begin_checkpoint(self, now: float) -> None:
        every = self.settings.checkpoint_every
        if self._stopping or (every and self.version % every == 0):
            self._storing.begin(self.version, self._usable(now))

    async def _stop_when_stored(self, now: float) -> None:
        """Ends the run when nothing would be lost; a writer that is gone is replaced, since no next checkpoint supersedes this one."""
        saved = self._last_checkpoint
        if self.version == self._origin.version or (saved is not None and (saved.epoch, saved.version) == (self.epoch, self.version)):
            if type(self.phase) is not Finished:
                await self._check_that_it_leads()
                self._finish()
        elif self._storing.version == self.version:
            self._storing.replace_lost(self._usable(now))

    async def _check_that_it_leads(self) -> None:
        """Ending writes no record that the journal could refuse: another may have taken over, and then it is not this one's to end."""
        newest = replay(await self.journal.read()).term
        if newest > self.term:
            raise FencedError(f"the journal is at term {newest}: another coordinator has taken over")

    async def _note_stored(self) -> None:
        if self._storing.complete(self.members, self.epoch, self.settings.stages):
            record = Checkpointed(self.epoch, self._storing.version)
            self._storing.end()
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
        checkpoint = self._last_checkpoint or Checkpointed(0, 0)
        record: Record = Epoch(self.epoch + 1, checkpoint.version, checkpoint.epoch)
        await self.journal.append(self.term, record)
        assert isinstance(record, Epoch)
        self._origin = record
        self.epoch, self.version = record.epoch, record.version
        self._commit = None
        self._storing.end()
        self._barred.clear()
        self._lost_since.clear()
        self.trailing = None
        self._observe(RolledBack(self.epoch, self.version, stage))
        self._enter_seal("a stage was lost")
