"""Worker: computes micro-batches of one stage, keeps exact account of what it has summed, and follows the coordinator's announcements.

It reads as docs/swarm.md does, whose rules the sections name; `kernels.py` has the rest of rule 4. What holds after a failure: a worker's
buffers count only as far as a manifest reported while frozen says; its state is always that of a commit in the journal, or it has none and
fetches one. It may be killed, stopped, cut off or moved to another stage at any moment.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.kernels import KERNEL_ERRORS, DeviceTurns, Kernels
from atoll.control.messages import (
    Announce,
    Assignment,
    Backward,
    Committed,
    FetchState,
    Finished,
    Forward,
    Manifest,
    Message,
    Order,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Round,
    Run,
    Seal,
    StateChunk,
    SumChunk,
    SumPart,
    View,
    WorkerBeat,
)
from atoll.control.multi_stage import process_of
from atoll.control.reduction import Reduction
from atoll.control.settings import Settings
from atoll.control.state_transfer import ENOUGH, Fetch, Snapshots, StateDonor, sums_from
from atoll.control.worker_state import EARLY_LIMIT, NEVER, Buffers, WorkerState
from atoll.control.world import Checkpoints, Compute, SwarmProcess
from atoll.errors import RebuiltWeightsError
from atoll.events import Warned

__all__ = ["Worker"]


class _Sealed(NamedTuple):
    """The sums of the step before the one under way, while they are reduced."""

    buffers: Buffers
    frozen: Round | None


class Worker(WorkerState):
    """One worker. `await run()` ends when the run is finished or the worker was dismissed.

    A process that hosts several stages runs as many workers; they are given the same `device`. `on_state` is told whenever there is a new
    state, `on_kernel` of every kernel: what it counts as, in forwards, and its seconds. `planned` is the stage a plan means it for.
    """

    kernels_type, donor_type, fetch_type, reduction_type, snapshots_type = Kernels, StateDonor, Fetch, Reduction, Snapshots

    def __init__(
        self,
        node: SwarmProcess,
        compute: Compute,
        checkpoints: Checkpoints,
        settings: Settings,
        coordinators: tuple[str, ...],
        on_state: Callable[["Worker"], None] = lambda worker: None,
        on_kernel: Callable[["Worker", float, float], None] = lambda worker, work, seconds: None,
        device: DeviceTurns | None = None,
        planned: int = -1,
    ) -> None:
        super().__init__(node.name, compute, settings)
        self.node = node
        self._device = device or DeviceTurns(node.clock)
        self._device.workers += 1
        self._on_state = on_state
        self._send = node.transport.send
        kernel = partial(on_kernel, self)
        self.kernels = self.kernels_type(self, node.clock, self._device, self._send, kernel, self._answer_if_sealed, self._warn)
        self._donor = self.donor_type(self, self._send)
        self._snapshots = self.snapshots_type(self, node.clock, checkpoints, self._beat)
        self.checkpoints, self.coordinators, self.planned = checkpoints, coordinators, planned
        self.leaving = False
        self.finished = False
        self._sealed: _Sealed | None = None  # of the version's step, when another is under way
        self.reduction: Reduction | None = None
        self.fetch: Fetch | None = None
        self._givers: frozenset[str] = frozenset()  # who gave it its state, until it has made a step with the others
        self._catching: tuple[Committed, frozenset[str]] | None = None  # the commit whose sums it gets from which of them
        self._view: View | None = None
        self._yours: Assignment | None = None
        self._echo = (0, 0)  # term, beat
        self._handled: Round | None = None  # the RUN whose orders were carried out
        self.gave_up: Round = NEVER  # the RUN in which it last gave up its state, and what it had summed with it
        self._generation = 0  # grows whenever the state is given up
        self._fetches = 0
        self._fetch_patience = AdaptiveTimeout(settings.patience_seconds, 2 * settings.heartbeat_seconds)
        self._sum_patience = AdaptiveTimeout(2 * settings.heartbeat_seconds, settings.heartbeat_seconds)
        self._reported_at = 0.0
        self._heard_at = 0.0  # when parts or sums last came, or were asked for
        self._asked_at = 0.0  # when one who catches up last asked for sums
        self._early_sums: deque[PullSum] = deque(maxlen=EARLY_LIMIT)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Announce: self._on_announce,
            Forward: self.kernels.on_work,
            Backward: self.kernels.on_work,
            Pull: self._on_pull,
            SumPart: self._on_sum,
            PullSum: self._on_pull_sum,
            SumChunk: self._on_sum,
            FetchState: self._donor.on_fetch,
            StateChunk: self._on_chunk,
        }

    async def run(self) -> None:
        """Joins, works, and comes back when there is nothing left to do."""
        self.node.clock.spawn(self._tick())
        self.node.clock.spawn(self.kernels.run())
        inbox, handlers = self.node.inbox, self._handlers
        while not self.finished:
            message = await inbox.take()
            handler = handlers.get(type(message))
            if handler is not None:
                handler(message)
        self.kernels.end()
        self._device.workers -= 1  # the others have it to themselves

    @property
    def announced(self) -> int:
        """The version it last heard of; -1 where it has heard nothing."""
        return self._view.version if self._view is not None else -1

    def leave(self) -> None:
        """Asks to be let go: what it has summed still counts, and it is dismissed after the step."""
        self.leaving = True

    # --- heartbeats, and what is told to the coordinator ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while not self.finished:
            self._beat()
            self._ask_again()
            await self.node.clock.sleep(self.settings.heartbeat_seconds)

    def _beat(self) -> None:
        reduction = self.reduction
        holds = reduction.round if reduction is not None and reduction.complete else None
        beat = WorkerBeat(
            self.node.name,
            self.incarnation,
            self.node.nonce,
            self.stage,
            self.epoch,
            self.version if self.state is not None else -1,
            self._echo[1],
            self._echo[0],
            len(self.fetch.received) if self.fetch is not None else -1,
            self.kernels.speed,
            holds,
            reduction.digest if holds and reduction is not None else "",
            self._snapshots.attests(),
            self.leaving,
            self.planned,
        )
        self._tell(beat)

    def _tell(self, message: Message) -> None:
        for coordinator in self.coordinators:
            self._send(coordinator, message)

    def _warn(self, message: str) -> None:
        """Of what came that cannot be."""
        self.node.emit(Warned(message=message, source=process_of(self.name)))

    # --- rules 1 and 3: following announcements -------------------------------------------------------------------------------------------

    def _on_announce(self, announce: Announce) -> None:
        view, yours = announce.view, announce.yours
        if yours.nonce != self.node.nonce or yours.incarnation < self.incarnation:
            return
        order = (view.term, view.seq)
        if self._is_outdated(order):
            return
        self.order = order
        self._view, self._yours = view, yours
        self._echo = max(self._echo, (view.term, view.beat))
        if yours.incarnation > self.incarnation:
            self._become(yours)
        if not self.finished:
            self._follow(view)

    def _is_outdated(self, order: Order) -> bool:
        return order < self.order

    def _become(self, yours: Assignment) -> None:
        """A new incarnation: another stage, or the first one. What belonged to the old one is gone."""
        self.incarnation = yours.incarnation
        self.stage = yours.stage
        self._snapshots.forget()
        self._give_up_state()
        if yours.stage < 0:
            self.finished = True

    def _again(self) -> None:
        """Something finished: tell the coordinator, and look at its last announcement once more."""
        if self.finished or self._view is None:
            return
        self._follow(self._view)
        self._beat()

    def _follow(self, view: View) -> None:
        """Brings this worker to where the coordinator is. Does nothing twice, so it may be called at any time."""
        if self._is_of_the_past(view):
            self._give_up_state()
            self._snapshots.forget()
        self.epoch = view.epoch
        if self.changing:
            return
        commit = view.commit
        if self.state is not None and commit is not None and commit.version == self.version and not self._take(commit):
            if type(view.phase) is not Finished and self._catch_up(commit):
                return
            self._give_up_state()
        if self.changing:
            return
        if self.state is not None and self.version != view.version:
            self._give_up_state()
        if self.state is None and type(view.phase) is Finished and view.version != view.origin[1]:
            self.finished = True  # what it would fetch is with those who have it, who store it
        elif self.state is None:
            self._obtain(view)
        if self.state is None:
            return
        assert self._yours is not None
        self._snapshots.follow(view, self._yours)
        self._carry_out(view)
        self.kernels.admit_early()

    def _is_of_the_past(self, view: View) -> bool:
        """Whether what this worker has is of another epoch."""
        return view.epoch != self.epoch

    def _carry_out(self, view: View) -> None:
        self._turn_to(view.step)
        if view.trailing is not None:
            self._start_reduction(view.trailing)
        phase = view.phase
        if type(phase) is Run:
            if self._handled != phase.opened:
                self._handled = phase.opened
                self._open(phase)
        elif type(phase) is Seal:
            self.frozen = phase.round
            if self.landing is None:
                self._answer_seal()
        elif type(phase) is Reduce:
            self._start_reduction(phase)
        elif type(phase) is Finished:
            self.finished = True

    # --- rule 4: RUN; rule 17: the next step, while the sums of this one are reduced ------------------------------------------------------

    def _open(self, run: Run) -> None:
        """RUN: buffers that count are kept, others emptied, and accumulation goes on with what is missing."""
        self.frozen = None
        if self._sealed is None:
            self.reduction = None
        for index in (0, 1):
            if (self.node.name, self.incarnation, index) not in run.keep:
                self.buffers.clear(index)
        self.missing = run.missing[self.stage]
        self.run_round = run.opened

    def _turn_to(self, step: int) -> None:
        """The next step begins while this one's sums are reduced; or that failed, and this one is taken up again as it was left."""
        if step == self.step:
            return
        if step > self.step:
            self._sealed = _Sealed(self.buffers, self.frozen)
            self.buffers, self.frozen = self._next_buffers(), None
        elif self._sealed is not None:
            self.buffers, self.frozen = self._sealed.buffers, self._sealed.frozen
            self._sealed = None
        self.step = step
        self.run_round = NEVER
        self._forget_messages()

    def _next_buffers(self) -> Buffers:
        """For the next step, while the sums of this one are reduced."""
        return Buffers(self.compute)

    def to_reduce(self) -> _Sealed:
        """The sums of the version's step."""
        return self._sealed or _Sealed(self.buffers, self.frozen)

    # --- rule 6: SEAL ---------------------------------------------------------------------------------------------------------------------

    def _answer_seal(self) -> None:
        assert self.frozen is not None
        where = (self.epoch, self.step, self.stage)
        manifest = Manifest(self.frozen, self.node.name, self.incarnation, *where, self.buffers.manifests(), self.version)
        self._tell(manifest)

    def _answer_if_sealed(self) -> None:
        """A sum has landed: a SEAL that came meanwhile is answered with it."""
        if self.frozen is not None and self.state is not None and self._view is not None and type(self._view.phase) is Seal:
            self._answer_seal()

    # --- rule 8: REDUCE -------------------------------------------------------------------------------------------------------------------

    def _start_reduction(self, order: Reduce) -> None:
        reduction = self.reduction
        if reduction is not None and (reduction.round, reduction.position) == (order.round, self.position):
            self._report(reduction)
            return
        plan = order.stages[self.stage]
        listed = next((incarnation for worker, incarnation in plan.members if worker == self.node.name), 0)
        if listed and self._is_own_incarnation(listed):
            if not self._is_same_round(self.to_reduce().frozen, order.round):
                return  # this incarnation never sealed that round
        elif listed:
            return  # somebody else who had this name
        self.reduction = self._reduction(order)
        self._reported_at = self._heard_at = self.node.clock.now()
        self.reduction.ask()
        early, self._early_sums = self._early_sums, deque(maxlen=EARLY_LIMIT)
        for pull in early:
            if pull.round == order.round:
                self._on_pull_sum(pull)
        self._finish_reduction()

    def _reduction(self, order: Reduce) -> Reduction:
        position, buffers = self.position, self.to_reduce().buffers
        return self.reduction_type(self.node.name, position, self.settings, order, self.compute, buffers, self._send)

    def _on_pull(self, pull: Pull) -> None:
        if self.state is None or not self._here(pull):
            return
        sealed = self.to_reduce()
        if not self._is_same_round(sealed.frozen, pull.round) or not self._is_own_incarnation(pull.incarnation):
            return
        section = self._sections().index(pull.stage)
        payload = self.compute.part(sealed.buffers.chosen(pull.buffers, self.stage), self.stage, section, pull.chunk)
        part = SumPart(pull.round, self.epoch, self.version, pull.stage, pull.chunk, self.node.name, self.incarnation, payload)
        self._send(pull.owner, part)

    def _on_pull_sum(self, pull: PullSum) -> None:
        if self._donor.on_pull_sum(pull):
            return
        reduction = self._reduction_of(pull)
        if reduction is not None:
            reduction.on_pull_sum(pull)
        elif self._here(pull):
            self._early_sums.append(pull)  # the announcement of this REDUCE is on its way

    def _on_sum(self, message: SumPart | SumChunk) -> None:
        reduction = self._reduction_of(message)
        if reduction is None or reduction.complete:
            return
        now, patience = self.node.clock.now(), self._sum_patience
        patience.measured(min(now - self._heard_at, 4 * patience.seconds()))  # one that stood still is no measure for the rest
        self._heard_at = now
        if isinstance(message, SumPart):
            reduction.on_part(message)
        else:
            reduction.on_sum(message)
        self._finish_reduction()

    def _reduction_of(self, message: SumPart | PullSum | SumChunk) -> Reduction | None:
        reduction = self.reduction
        if reduction is None or not self._here(message):
            return None
        return reduction if self._is_same_round(reduction.round, message.round) else None

    def _here(self, message: Pull | SumPart | PullSum | SumChunk) -> bool:
        if message.version != self.version or message.stage not in self._sections():
            return False
        return self.is_own_epoch(message.epoch)

    def _sections(self) -> tuple[int, ...]:
        return self.settings.sections(self.stage) if self.stage >= 0 else ()

    def _is_own_incarnation(self, incarnation: int) -> bool:
        return incarnation == self.incarnation

    def _is_same_round(self, held: Round | None, named: Round) -> bool:
        return held == named

    def _finish_reduction(self) -> None:
        if self.reduction is None or not self.reduction.complete:
            return
        if self._catching is None:
            self._report(self.reduction)
        else:
            self._again()

    def _report(self, reduction: Reduction) -> None:
        missing = () if reduction.complete else reduction.missing()
        report = Reduced(
            reduction.round, self.node.name, self.incarnation, *reduction.position, reduction.digest, reduction.norm_squared, missing
        )
        self._tell(report)

    def _ask_again(self) -> None:
        """Whatever is late is asked for once more; whom it is waiting for is told.

        Late is what takes longer than parts have taken so far: over a slow link, asking again too soon would fill it with doubles.
        """
        now = self.node.clock.now()
        reduction = self.reduction
        if self._catching is not None:
            self._ask_to_catch_up(now)
        elif reduction is not None and not reduction.complete and now - self._reported_at >= self.settings.heartbeat_seconds:
            self._reported_at = now
            if now - self._heard_at >= self._sum_patience.seconds():
                self._heard_at = now
                self._sum_patience.failed()
                reduction.ask()
            self._report(reduction)
        if self.fetch is not None and self._view is not None and not self.changing:
            self._obtain(self._view)

    # --- rule 10: applying a commit -------------------------------------------------------------------------------------------------------

    def _take(self, commit: Committed) -> bool:
        """Applies the commit when the result held is the one committed; otherwise says no."""
        reduction = self.reduction
        if reduction is None or not reduction.complete or reduction.position != self.position:
            return False
        if not self._is_committed(reduction, commit):
            return False
        self.changing = True
        generation = self._generation
        self.kernels.first(lambda: self._apply(commit, reduction, generation))
        return True

    def _is_committed(self, reduction: Reduction, commit: Committed) -> bool:
        return reduction.round == commit.round and reduction.digest == commit.digests[self.stage]

    async def _apply(self, commit: Committed, reduction: Reduction, generation: int) -> None:
        before, position = self.state, self.position
        kept = await self.compute.keep(before) if self._donor.wanted and generation == self._generation else None
        state = None
        if generation == self._generation:
            state = await self.compute.apply(before, reduction.result(), commit)
        self.changing = False
        if generation == self._generation:
            self._donor.remember(position, commit.round, kept, reduction.all_sums())
            if self._catching is None:
                self._givers = frozenset()
            self._set_state(state, commit.version + 1)
        self._again()

    def _set_state(self, state: Any, version: int) -> None:
        self._catching = None
        goes_on = self._sealed is not None and version == self.step  # the step under way was begun before this commit
        self.state = state
        self.version = self.step = version
        self.fetch = None
        if goes_on:
            self._sealed = self.reduction = None
        else:
            self._forget_work()
        self._on_state(self)
        self._donor.answer_early()

    def _forget_work(self) -> None:
        """The state beneath the buffers has changed: everything summed, saved or frozen is of the past."""
        self._clear_buffers()
        self.frozen = None
        self._sealed = self.reduction = self._catching = None
        self._early_sums.clear()
        self._forget_messages()

    def _clear_buffers(self) -> None:
        self.buffers.clear_all()

    def _forget_messages(self) -> None:
        self._handled = None
        self.missing = frozenset()
        self.kernels.forget()

    def _give_up_state(self) -> None:
        self.gave_up = self.run_round
        self.state = None
        self._givers = frozenset()
        self._donor.forget()
        self.version = self.step = -1
        self._generation += 1
        self._give_up_fetch()
        self._forget_work()

    def _give_up_fetch(self) -> None:
        self.fetch = None

    # --- rule 13: getting a state, and catching up ----------------------------------------------------------------------------------------

    def _obtain(self, view: View) -> None:
        """No state yet: from the checkpoint where the epoch begins, later from peers."""
        if view.version == view.origin[1]:
            self.changing = True
            self.node.clock.spawn(self._restore(view.origin, view.epoch, view.version, self.stage, self._generation))
            return
        position, fetch = (view.epoch, view.version, self.stage), self.fetch
        if fetch is None or self._is_useless(fetch, position, view):
            self._fetches += 1
            fetch = self.fetch = self.fetch_type(self.node.name, self._fetches, position, self.settings.chunks, self._fetch_patience)
            self.compute.expect(self.stage)
        self._ask_for_state(fetch, view)

    async def _restore(self, origin: tuple[int, int], epoch: int, version: int, stage: int, generation: int) -> None:
        state = None
        if origin[1] == 0:
            state = await self.compute.initial(stage)
        else:
            snapshot = await self.checkpoints.read(origin[0], origin[1], stage)
            state = None if snapshot is None else await self.compute.restore(stage, snapshot)
        self.changing = False
        if state is None:
            return  # the store did not answer: the next announcement asks again
        if generation == self._generation and epoch == self.epoch:
            self._set_state(state, version)
        self._again()

    def _is_useless(self, fetch: Fetch, position: tuple[int, int, int], view: View) -> bool:
        """Whether another state is to be fetched than the one under way."""
        return fetch.position != position and not self._worth_finishing(fetch, view)

    def _worth_finishing(self, fetch: Fetch, view: View) -> bool:
        """Whether a state that was committed upon meanwhile is the shorter way: those who gave most of it keep it, and the sums."""
        assert self._yours is not None
        donors = self._yours.donors
        enough = len(fetch.received) >= ENOUGH * self.settings.chunks and not fetch.late(self.node.clock.now())
        there = not donors or not fetch.givers.isdisjoint(donors)  # none: a coordinator that has just taken over does not know yet
        return enough and there and fetch.position == (view.epoch, view.version - 1, self.stage)

    def _ask_for_state(self, fetch: Fetch, view: View) -> None:
        assert self._yours is not None
        donors = self._yours.donors
        if fetch.position[1] != view.version:
            donors = tuple(donor for donor in donors if donor in fetch.givers)
        fetch.ask(self.node.clock.now(), donors, self._send)

    def _on_chunk(self, message: StateChunk) -> None:
        fetch = self.fetch
        if fetch is None or self.changing or self._view is None:
            return
        if fetch.on_chunk(message, self.node.clock.now()):
            self.changing = True
            self.node.clock.spawn(self._assemble(fetch, self.stage, self.epoch, self._generation))
        else:
            self._ask_for_state(fetch, self._view)

    async def _assemble(self, fetch: Fetch, stage: int, epoch: int, generation: int) -> None:
        try:
            state = await self.compute.assemble(stage, fetch.chunks())
        except RebuiltWeightsError:
            raise  # fetching it again would not help
        except KERNEL_ERRORS as error:
            self._refetch(fetch, stage, error)
            return
        self.changing = False
        if generation == self._generation and epoch == self.epoch:
            self._set_state(state, fetch.position[1])
            self._givers = frozenset(fetch.givers)
        self._again()

    def _refetch(self, fetch: Fetch, stage: int, error: Exception) -> None:
        """What was sent is no state: it is fetched again, and from whom it came is told."""
        givers = ", ".join(sorted(fetch.givers))
        self._warn(f"the state of stage {stage} that {givers} sent cannot be put together ({error}); it is fetched again")
        self.changing = False
        if self.fetch is fetch:
            self.fetch = None
        self._again()

    def _catch_up(self, commit: Committed) -> bool:
        """One whose state was committed upon while it came gets the sums from those who gave it; False where they would not have them."""
        assert self._yours is not None
        donors = self._givers.intersection(self._yours.donors)
        if not self._yours.donors:  # a coordinator that has just taken over does not know yet
            donors = self._givers
        if not donors:
            return False
        if self._catching != (commit, donors):
            if self._catching is None or self._catching[0] != commit:
                self._heard_at = self.node.clock.now()
            self._catching = commit, donors
            settings, before = self.settings, self.reduction
            self.reduction = self._reduction(sums_from(donors, commit.round, settings.stages + len(settings.tied), settings.chunks))
            if before is not None and before.round == commit.round and before.position == self.position:
                self.reduction.take_over(before)
            self._asked_at = self.node.clock.now()
            self.reduction.ask()
        return self.reduction is not None and not self.reduction.complete

    def _ask_to_catch_up(self, now: float) -> None:
        """Once more, and after long in vain no more: all sums are asked for at once, so the first may take its time."""
        reduction = self.reduction
        if reduction is None or reduction.complete:
            return
        if now - self._heard_at >= 4 * max(self._fetch_patience.seconds(), self._sum_patience.seconds()):
            self._give_up_state()
            self._again()
        elif now - max(self._asked_at, self._heard_at) >= self._sum_patience.seconds():
            self._asked_at = now
            reduction.ask()
