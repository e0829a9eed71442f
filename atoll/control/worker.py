"""Worker: computes micro-batches of one stage, keeps exact account of what it has summed, and follows the coordinator's announcements.

What holds after a failure: a worker's buffers count only as far as a manifest reported while frozen says; its state is always that of a
commit in the journal, or it has none and fetches one. It may be killed, stopped, cut off or moved to another stage at any moment.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.control.buffers import Buffer, Buffers
from atoll.control.catching_up import ENOUGH, Past, sums_from
from atoll.control.checks import ALL_CHECKS, Checks
from atoll.control.device import Device
from atoll.control.fetching import Fetch
from atoll.control.messages import (
    Ack,
    Announce,
    Assignment,
    Attempt,
    Backward,
    Committed,
    FetchState,
    Finished,
    Forward,
    Manifest,
    Message,
    Order,
    Part,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Round,
    Run,
    Seal,
    StateChunk,
    SumChunk,
    View,
    WorkerBeat,
)
from atoll.control.patience import Patience
from atoll.control.reduction import Reduction
from atoll.control.settings import BACKWARD_WORK, Settings
from atoll.control.world import Checkpoints, Compute, Node

__all__ = ["Worker"]

EARLY_LIMIT = 4096
NEVER: Order = (0, 0)


class _Sealed:
    """The sums of the step before the one under way, while they are reduced."""

    __slots__ = ("buffers", "frozen")

    def __init__(self, buffers: Buffers, frozen: Round | None) -> None:
        self.buffers = buffers
        self.frozen = frozen


class Worker:
    """One worker. `await run()` ends when the run is finished or the worker was dismissed.

    A process that hosts several stages runs as many workers; they are given the same `device`.
    """

    def __init__(
        self,
        node: Node,
        compute: Compute,
        checkpoints: Checkpoints,
        settings: Settings,
        coordinators: tuple[str, ...],
        checks: Checks = ALL_CHECKS,
        on_state: Callable[["Worker"], None] | None = None,
        on_kernel: Callable[["Worker", float, float], None] | None = None,
        device: Device | None = None,
    ) -> None:
        self.node = node
        self._device = device or Device(node.clock)
        self._device.workers += 1
        self._on_kernel = on_kernel  # told of every kernel: what it counts as, in forwards, and its seconds
        self._on_state = on_state  # told whenever there is a new state
        self.compute = compute
        self.checkpoints = checkpoints
        self.settings = settings
        self.coordinators = coordinators
        self.checks = checks
        self.leaving = False
        self.finished = False
        self.incarnation = 0
        self.stage = -1
        self.epoch = -1
        self.version = -1  # of the state
        self.step = -1  # the one under way: that of the version, or with staleness the one after it while the version's sums are reduced
        self.state: Any = None
        self.stored = -1
        self.speed = 0.0
        self.buffers = Buffers(compute)
        self.frozen: Round | None = None
        self._sealed: _Sealed | None = None  # of the version's step, when another is under way
        self.reduction: Reduction | None = None
        self.fetch: Fetch | None = None
        self._givers: frozenset[str] = frozenset()  # who gave it its state, until it has made a step with the others
        self._catching: Committed | None = None  # the commit whose sums it gets from them
        self._past: Past | None = None
        self._lent = False  # whether somebody fetches the state
        self._order: Order = NEVER
        self._view: View | None = None
        self._yours: Assignment | None = None
        self._echo = (0, 0)  # term, beat
        self._handled: Round | None = None  # the RUN whose orders were carried out
        self.run_round: Round = NEVER
        self.gave_up: Round = NEVER  # the RUN in which it last gave up its state, and what it had summed with it
        self._missing: frozenset[int] = frozenset()
        self._landing: Buffer | None = None
        self._changing = False  # a state is being applied or loaded
        self._generation = 0  # grows whenever the state is given up
        self._storing = False
        self._fetches = 0
        self._fetch_patience = Patience(settings.patience_seconds, 2 * settings.heartbeat_seconds)
        self._sum_patience = Patience(2 * settings.heartbeat_seconds, settings.heartbeat_seconds)
        self._reported_at = 0.0
        self._heard_at = 0.0  # when parts or sums last came, or were asked for
        self._urgent: deque[tuple[Committed, Reduction, int]] = deque()  # commits to apply
        self._forwards: deque[Forward] = deque()
        self._backwards: deque[Backward] = deque()
        self._early: deque[Forward | Backward] = deque()
        self._early_fetches: deque[FetchState] = deque(maxlen=EARLY_LIMIT)
        self._early_sums: deque[PullSum] = deque(maxlen=EARLY_LIMIT)
        self._saved: dict[tuple[int, Attempt | None], Forward] = {}
        self._latest: dict[int, tuple[Round, int]] = {}
        self._wake = node.clock.mailbox()
        self._idle = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Announce: self._on_announce,
            Forward: self._on_work,
            Backward: self._on_work,
            Pull: self._on_pull,
            Part: self._on_part,
            PullSum: self._on_pull_sum,
            SumChunk: self._on_sum,
            FetchState: self._on_fetch,
            StateChunk: self._on_chunk,
        }

    async def run(self) -> None:
        """Joins, works, and comes back when there is nothing left to do."""
        self.node.clock.spawn(self._tick())
        self.node.clock.spawn(self._execute())
        inbox, handlers = self.node.inbox, self._handlers
        while not self.finished:
            message = await inbox.take()
            handler = handlers.get(type(message))
            if handler is not None:
                handler(message)
        self._device.workers -= 1  # the others have it to themselves

    def leave(self) -> None:
        """Asks to be let go: what it has summed still counts, and it is dismissed after the step."""
        self.leaving = True

    # --- telling the coordinator -------------------------------------------------------------------------------------------

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
            self.speed,
            holds,
            reduction.digest if holds and reduction is not None else "",
            self.stored,
            self.leaving,
        )
        for coordinator in self.coordinators:
            self._send(coordinator, beat)

    def _ask_again(self) -> None:
        """Whatever is late is asked for once more; whom it is waiting for is told.

        Late is what takes longer than parts have taken so far: over a slow link, asking again too soon would fill it with doubles.
        """
        now = self.node.clock.now()
        reduction = self.reduction
        if reduction is not None and not reduction.complete and now - self._reported_at >= self.settings.heartbeat_seconds:
            self._reported_at = now
            if now - self._heard_at >= self._sum_patience.seconds():
                self._heard_at = now
                self._sum_patience.failed()
                if self._catching is not None:
                    self._give_up_state()  # they have them no more
                    self._again()
                    return
                reduction.ask()
            self._report(reduction)
        if self.fetch is not None and self._view is not None and not self._changing:
            self._obtain(self._view)

    def _send(self, to: str, message: Message) -> None:
        self.node.transport.send(to, message)

    # --- following announcements -------------------------------------------------------------------------------------------

    def _on_announce(self, announce: Announce) -> None:
        view, yours = announce.view, announce.yours
        if yours.nonce != self.node.nonce or yours.incarnation < self.incarnation:
            return
        order = (view.term, view.seq)
        if order < self._order and self.checks.message_order:
            return
        self._order = order
        self._view, self._yours = view, yours
        self._echo = max(self._echo, (view.term, view.beat))
        if yours.incarnation > self.incarnation:
            self._become(yours)
        if not self.finished:
            self._follow(view)

    def _become(self, yours: Assignment) -> None:
        """A new incarnation: another stage, or the first one. What belonged to the old one is gone."""
        self.incarnation = yours.incarnation
        self.stage = yours.stage
        self._give_up_state()
        if yours.stage < 0:
            self.finished = True

    def _follow(self, view: View) -> None:
        """Brings this worker to where the coordinator is. Does nothing twice, so it may be called at any time."""
        if view.epoch != self.epoch and (self.checks.epoch or self.version != view.version):
            self._give_up_state()
            self.stored = -1
        self.epoch = view.epoch
        if self._changing:
            return
        commit = view.commit
        if self.state is not None and commit is not None and commit.version == self.version and not self._take(commit):
            if self._catch_up(commit):
                return
            self._give_up_state()
        if self._changing:
            return
        if self.state is not None and self.version != view.version:
            self._give_up_state()
        if self.state is None:
            self._obtain(view)
            return
        self._store_checkpoint(view)
        self._carry_out(view)
        self._admit_early()

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
            if self._landing is None:
                self._answer_seal()
        elif type(phase) is Reduce:
            self._start_reduction(phase)
        elif type(phase) is Finished:
            self.finished = True

    def _turn_to(self, step: int) -> None:
        """The next step begins while this one's sums are reduced; or that failed, and this one is taken up again as it was left."""
        if step == self.step:
            return
        if step > self.step:
            self._sealed = _Sealed(self.buffers, self.frozen)
            self.buffers, self.frozen = Buffers(self.compute) if self.checks.set_aside else self.buffers, None
        elif self._sealed is not None:
            self.buffers, self.frozen = self._sealed.buffers, self._sealed.frozen
            self._sealed = None
        self.step = step
        self.run_round = NEVER
        self._forget_messages()

    def _open(self, run: Run) -> None:
        """RUN: buffers that count are kept, others emptied, and accumulation goes on with what is missing."""
        self.frozen = None
        if self._sealed is None:
            self.reduction = None
        for index in (0, 1):
            if (self.node.name, self.incarnation, index) not in run.keep:
                self.buffers.clear(index)
        self._missing = run.missing[self.stage]
        self.run_round = run.opened

    def _answer_seal(self) -> None:
        assert self.frozen is not None
        view = self._view
        assert view is not None
        where = (self.epoch, self.step, self.stage)
        manifest = Manifest(self.frozen, self.node.name, self.incarnation, *where, self.buffers.manifests(), self.version)
        for coordinator in self.coordinators:
            self._send(coordinator, manifest)

    # --- state: commits, checkpoints, fetching ------------------------------------------------------------------------------

    def _take(self, commit: Committed) -> bool:
        """Applies the commit when the result held is the one committed; otherwise says no."""
        reduction = self.reduction
        if reduction is None or not reduction.complete or reduction.position != (self.epoch, self.version, self.stage):
            return False
        if self.checks.round_digest:
            if reduction.round != commit.round:
                return False
            if self.checks.term_digest and reduction.digest != commit.digests[self.stage]:
                return False
        self._changing = True
        self._urgent.append((commit, reduction, self._generation))
        self._work_waits()
        return True

    def _catch_up(self, commit: Committed) -> bool:
        """One whose state was committed upon while it came gets the sums from those who gave it; False where they would not have them."""
        if self._catching == commit:
            return self.reduction is not None and not self.reduction.complete
        assert self._yours is not None
        donors = self._givers.intersection(self._yours.donors)
        if not donors:
            return False
        settings, before = self.settings, self.reduction
        order = sums_from(donors, commit.round, settings.stages + len(settings.tied), settings.chunks)
        self.reduction = self._reduction(order)
        if before is not None and before.round == commit.round and before.position == self.reduction.position:
            self.reduction.take_over(before)
        self._catching = commit
        self._heard_at = self.node.clock.now()
        self.reduction.ask()
        return not self.reduction.complete

    async def _apply(self, commit: Committed, reduction: Reduction, generation: int) -> None:
        before, position = self.state, (self.epoch, self.version, self.stage)
        kept = await self.compute.keep(before) if self._lent and generation == self._generation else None
        state = None
        if generation == self._generation:
            state = await self.compute.apply(before, reduction.result(), commit)
        self._changing = False
        if generation == self._generation:
            self._past = Past(position, commit.round, kept, reduction.all_sums()) if kept is not None else None
            self._lent = False
            if self._catching is None:
                self._givers = frozenset()
            self._set_state(state, commit.version + 1)
        self._again()

    def _set_state(self, state: Any, version: int) -> None:
        goes_on = self._sealed is not None and version == self.step  # the step under way was begun before this commit
        self.state = state
        self.version = self.step = version
        self.fetch = None
        if goes_on:
            self._sealed = self.reduction = None
        else:
            self._forget_work()
        if self._on_state is not None:
            self._on_state(self)
        early, self._early_fetches = self._early_fetches, deque(maxlen=EARLY_LIMIT)
        for fetch in early:
            self._on_fetch(fetch)

    def _forget_work(self) -> None:
        """The state beneath the buffers has changed: everything summed, saved or frozen is of the past."""
        if self.checks.clear:
            self.buffers.clear_all()
        self.frozen = None
        self._sealed = self.reduction = self._catching = None
        self._early_sums.clear()
        self._forget_messages()

    def _forget_messages(self) -> None:
        self._handled = None
        self._missing = frozenset()
        self._saved.clear()
        self._latest.clear()

    def _give_up_state(self) -> None:
        self.gave_up = self.run_round
        self.state = self._past = None
        self._givers, self._lent = frozenset(), False
        self.version = self.step = -1
        self._generation += 1
        if self.checks.fetch_version:
            self.fetch = None
        self._forget_work()

    def _again(self) -> None:
        """Something finished: tell the coordinator, and look at its last announcement once more."""
        if self.finished or self._view is None:
            return
        self._follow(self._view)
        self._beat()

    def _obtain(self, view: View) -> None:
        """No state yet: from the checkpoint where the epoch begins, later from peers."""
        if view.version == view.origin[1]:
            self._changing = True
            self.node.clock.spawn(self._restore(view.origin, view.epoch, view.version, self.stage, self._generation))
            return
        position, fetch = (view.epoch, view.version, self.stage), self.fetch
        if fetch is None or (self.checks.fetch_version and fetch.position != position and not self._worth_finishing(fetch, view)):
            self._fetches += 1
            fetch = self.fetch = Fetch(self.node.name, self._fetches, position, self.settings.chunks, self.checks, self._fetch_patience)
            self.compute.expect(self.stage)
        elif not self.checks.fetch_version:
            fetch.position = position
        self._ask_for_state(fetch, view)

    def _worth_finishing(self, fetch: Fetch, view: View) -> bool:
        """Whether a state that was committed upon meanwhile is the shorter way: those who gave most of it keep it, and the sums."""
        assert self._yours is not None
        enough = len(fetch.received) >= ENOUGH * self.settings.chunks and not fetch.late(self.node.clock.now())
        return enough and fetch.position == (view.epoch, view.version - 1, self.stage) and not fetch.givers.isdisjoint(self._yours.donors)

    def _ask_for_state(self, fetch: Fetch, view: View) -> None:
        assert self._yours is not None
        donors = self._yours.donors
        if fetch.position[1] != view.version:
            donors = tuple(donor for donor in donors if donor in fetch.givers)
        fetch.ask(self.node.clock.now(), donors, self._send)

    async def _restore(self, origin: tuple[int, int], epoch: int, version: int, stage: int, generation: int) -> None:
        state = None
        if origin[1] == 0:
            state = await self.compute.initial(stage)
        else:
            snapshot = await self.checkpoints.read(origin[0], origin[1], stage)
            state = None if snapshot is None else await self.compute.restore(stage, snapshot)
        self._changing = False
        if state is None:
            return  # the store did not answer: the next announcement asks again
        if generation == self._generation and epoch == self.epoch:
            self._set_state(state, version)
        self._again()

    def _on_fetch(self, fetch: FetchState) -> None:
        if fetch.stage != self.stage:
            return
        past = self._past
        if past is not None and past.position == (fetch.epoch, fetch.version, fetch.stage):
            self._lent = True
            chunk = self.compute.read_kept(past.state, fetch.chunk)
            self._send(fetch.worker, StateChunk(fetch.nonce, *past.position, fetch.chunk, chunk))
            return
        ahead = self.checks.fetch_version and (fetch.epoch, fetch.version) > (self.epoch, self.version)
        if self._changing or ahead:
            self._early_fetches.append(fetch)  # this worker is about to have that state
            return
        if self.state is None:
            return
        if self.checks.fetch_version and (fetch.epoch, fetch.version) != (self.epoch, self.version):
            return
        self._lent = True
        payload = self.compute.read_chunk(self.state, fetch.chunk)
        self._send(fetch.worker, StateChunk(fetch.nonce, self.epoch, self.version, self.stage, fetch.chunk, payload))

    def _on_chunk(self, message: StateChunk) -> None:
        fetch = self.fetch
        if fetch is None or self._changing or self._view is None:
            return
        if fetch.on_chunk(message, self.node.clock.now()):
            self._changing = True
            self.node.clock.spawn(self._assemble(fetch, self.stage, self.epoch, self._generation))
        else:
            self._ask_for_state(fetch, self._view)

    async def _assemble(self, fetch: Fetch, stage: int, epoch: int, generation: int) -> None:
        state = await self.compute.assemble(stage, fetch.chunks())
        self._changing = False
        if generation == self._generation and epoch == self.epoch:
            self._set_state(state, fetch.position[1])
            self._givers = frozenset(fetch.givers)
        self._again()

    def _store_checkpoint(self, view: View) -> None:
        """Takes the snapshot exactly at its version, and writes it while training goes on."""
        assert self._yours is not None
        if view.checkpoint != self.version or not self._yours.store or self.stored >= self.version or self._storing:
            return
        self._storing = True
        snapshot = self.compute.snapshot(self.state) if self.checks.checkpoint_version else None
        self.node.clock.spawn(self._write_checkpoint(self.epoch, self.version, self.stage, snapshot))

    async def _write_checkpoint(self, epoch: int, version: int, stage: int, snapshot: Any) -> None:
        if snapshot is None:  # only with the check `checkpoint-version` off: whatever the state is by then
            await self.node.clock.sleep(2 * self.settings.patience_seconds)
            snapshot = self.compute.snapshot(self.state) if self.state is not None else None
        if snapshot is not None:
            await self.checkpoints.write(epoch, version, stage, snapshot)
        self._storing = False
        if epoch == self.epoch and stage == self.stage and snapshot is not None:
            self.stored = max(self.stored, version)
            self._beat()

    # --- reduction ----------------------------------------------------------------------------------------------------------

    def _start_reduction(self, order: Reduce) -> None:
        reduction = self.reduction
        position = (self.epoch, self.version, self.stage)
        if reduction is not None and reduction.round == order.round and reduction.position == position:
            self._report(reduction)
            return
        plan = order.stages[self.stage]
        listed = next((incarnation for worker, incarnation in plan.members if worker == self.node.name), 0)
        if listed and (listed == self.incarnation or not self.checks.incarnation):
            if self.to_reduce().frozen != order.round and self.checks.round_match:
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
        position, buffers = (self.epoch, self.version, self.stage), self.to_reduce().buffers
        return Reduction(self.node.name, position, self.settings, order, self.compute, buffers, self.checks, self._send)

    def _sections(self) -> tuple[int, ...]:
        return self.settings.sections(self.stage) if self.stage >= 0 else ()

    def to_reduce(self) -> _Sealed:
        """The sums of the version's step."""
        return self._sealed or _Sealed(self.buffers, self.frozen)

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
        for coordinator in self.coordinators:
            self._send(coordinator, report)

    def _here(self, message: Pull | Part | PullSum | SumChunk) -> bool:
        if message.version != self.version or message.stage not in self._sections():
            return False
        return message.epoch == self.epoch or not self.checks.epoch

    def _on_pull(self, pull: Pull) -> None:
        if self.state is None or not self._here(pull):
            return
        sealed = self.to_reduce()
        if self.checks.round_match and sealed.frozen != pull.round:
            return
        if self.checks.incarnation and pull.incarnation != self.incarnation:
            return
        section = self._sections().index(pull.stage)
        payload = self.compute.part(sealed.buffers.chosen(pull.buffers, self.stage), self.stage, section, pull.chunk)
        part = Part(pull.round, self.epoch, self.version, pull.stage, pull.chunk, self.node.name, self.incarnation, payload)
        self._send(pull.owner, part)

    def _reduction_of(self, message: Part | PullSum | SumChunk) -> Reduction | None:
        reduction = self.reduction
        if reduction is None or not self._here(message):
            return None
        if self.checks.round_match and reduction.round != message.round:
            return None
        return reduction

    def _on_part(self, part: Part) -> None:
        reduction = self._reduction_of(part)
        if reduction is not None and not reduction.complete:
            self._hear_of_sums()
            reduction.on_part(part)
            self._finish_reduction()

    def _on_pull_sum(self, pull: PullSum) -> None:
        past = self._past
        if past is not None and (past.round, *past.position[:2]) == (pull.round, pull.epoch, pull.version):
            self._lent = True
            kept = past.sum(pull.stage, pull.chunk)
            if kept is not None:
                self._send(pull.worker, SumChunk(past.round, pull.epoch, pull.version, pull.stage, pull.chunk, kept))
            return
        reduction = self._reduction_of(pull)
        if reduction is not None:
            reduction.on_pull_sum(pull)
        elif self._here(pull):
            self._early_sums.append(pull)  # the announcement of this REDUCE is on its way

    def _on_sum(self, message: SumChunk) -> None:
        reduction = self._reduction_of(message)
        if reduction is not None and not reduction.complete:
            self._hear_of_sums()
            reduction.on_sum(message)
            self._finish_reduction()

    def _hear_of_sums(self) -> None:
        now = self.node.clock.now()
        patience = self._sum_patience
        patience.measured(min(now - self._heard_at, 4 * patience.seconds()))  # one that stood still is no measure for the rest
        self._heard_at = now

    # --- work ---------------------------------------------------------------------------------------------------------------

    def _matches(self, message: Forward | Backward) -> bool:
        """Whether the message is about the state this worker has."""
        checks = self.checks
        return (
            self.state is not None
            and (message.version == self.step or not checks.version)
            and (message.stage == self.stage or not checks.stage)
            and (message.epoch == self.epoch or not checks.epoch)
        )

    def _is_early(self, message: Forward | Backward) -> bool:
        """Sent by someone who has heard more than this worker: the announcement is on its way."""
        if message.attempt.round > self._order:
            return True
        return self.checks.version and (message.epoch, message.version) > (self.epoch, self.step)

    def _superseded(self, message: Forward | Backward) -> bool:
        attempt = message.attempt
        token = (attempt.round if self.checks.token else NEVER, attempt.number)
        latest = self._latest.get(message.micro_batch)
        if latest is not None and token < latest:
            return True
        self._latest[message.micro_batch] = token
        return False

    def _on_work(self, message: Forward | Backward) -> None:
        if self.incarnation == 0:
            return
        if self._is_early(message):
            if len(self._early) >= EARLY_LIMIT:
                self._early.popleft()
            self._early.append(message)
        elif self._matches(message) and not self._superseded(message):
            if type(message) is Forward:
                self._forwards.append(message)
            else:
                self._backwards.append(message)  # type: ignore[arg-type]
            self._work_waits()

    def _admit_early(self) -> None:
        if self._early:
            early, self._early = self._early, deque()
            for message in early:
                self._on_work(message)

    def _work_waits(self) -> None:
        if self._idle:
            self._idle = False
            self._wake.put(None)

    async def _execute(self) -> None:
        while not self.finished:
            if self._urgent or self._backwards or self._forwards:
                await self._device.take()
                await self._execute_next()
                self._device.give()
            else:
                self._idle = True
                await self._wake.take()

    async def _execute_next(self) -> None:
        """Steps of the optimizer first, then backwards, since they free memory and end what was begun, then forwards."""
        if self._urgent:
            await self._apply(*self._urgent.popleft())
        elif self._backwards:
            await self._run_backward(self._backwards.popleft())
        elif self._forwards:
            await self._run_forward(self._forwards.popleft())

    def _weights(self) -> Any:
        """What the step under way is computed with: with staleness the weights before the last step."""
        if not self.settings.staleness or self.step > self.version or not self.checks.same_weights:
            return self.state
        return self.compute.delayed(self.state)

    def _key(self, message: Forward | Backward) -> tuple[int, Attempt | None]:
        return message.micro_batch, message.attempt if self.checks.token else None

    async def _run_forward(self, message: Forward) -> None:
        if not self._matches(message) or self._superseded(message):
            return
        began = self.node.clock.now()
        if message.stage == self.settings.stages - 1:
            gradient, contribution, loss, weight = await self.compute.turn(
                self._weights(), message.version, message.micro_batch, message.stage, message.payload
            )
            seconds = self._measured(1.0 + BACKWARD_WORK, began)
            owns = await self._accumulate(message, contribution, loss, weight)
            self._pass_back(message, gradient, owns, seconds)
            return
        leaving = await self.compute.forward(self._weights(), message.version, message.micro_batch, message.stage, message.payload)
        seconds = self._measured(1.0, began)
        if not self._matches(message):
            return
        self._saved[self._key(message)] = message
        onward = Forward(
            message.epoch,
            message.version,
            message.stage + 1,
            message.micro_batch,
            message.attempt,
            message.path,
            message.owned,
            leaving,
        )
        self._send(message.path[message.stage + 1], onward)
        if self.settings.acknowledge_forward:
            self._acknowledge(message, True, False, seconds)

    async def _run_backward(self, message: Backward) -> None:
        saved = self._saved.get(self._key(message))
        if saved is None or not self._matches(message) or self._superseded(message):
            return
        del self._saved[self._key(message)]
        began = self.node.clock.now()
        gradient, contribution = await self.compute.backward(
            self._weights(), message.version, message.micro_batch, message.stage, saved.payload, message.payload
        )
        seconds = self._measured(BACKWARD_WORK, began)
        owns = await self._accumulate(saved, contribution, 0.0, 0.0)
        self._pass_back(saved, gradient, owns, seconds)

    def _measured(self, work: float, began: float) -> float:
        seconds = self.node.clock.now() - began
        if self._on_kernel is not None:
            self._on_kernel(self, work, seconds)
        seconds *= self._device.workers  # the others of this process compute as long
        if seconds > 0:
            self.speed = work / seconds if self.speed == 0 else self.speed + 0.1 * (work / seconds - self.speed)
        return seconds

    async def _accumulate(self, message: Forward, contribution: Any, loss: float, weight: float) -> bool:
        """Adds to the buffer if all of rule 4 allows it; True when this worker's buffers hold the micro-batch now."""
        micro_batch = message.micro_batch
        if message.stage in message.owned or not self._matches(message):
            return False
        if self.checks.once and self.buffers.holds(micro_batch):
            return True
        if (self.frozen is not None and self.checks.freeze) or micro_batch not in self._missing:
            return False
        first = message.attempt.number == 0 and message.attempt.round == self.run_round
        buffer = self.buffers.get(0 if first else 1, self.stage)
        self._landing = buffer
        if self.checks.atomic_manifest:
            await self.compute.accumulate(buffer.value, contribution)
        else:
            self.node.clock.spawn(self.compute.accumulate(buffer.value, contribution))
        self._landing = None
        buffer.micro_batches.add(micro_batch)
        buffer.loss += loss
        buffer.weight += weight
        if self.frozen is not None and self.state is not None and self._view is not None and type(self._view.phase) is Seal:
            self._answer_seal()
        return self._matches(message) and self.buffers.holds(micro_batch)

    def _pass_back(self, message: Forward, gradient: Any, owns: bool, seconds: float) -> None:
        """The gradient goes back along the path, no further than a stage still needs it."""
        self._acknowledge(message, False, owns, seconds)
        stage = message.stage - 1
        if any(below not in message.owned for below in range(message.stage)):
            back = Backward(message.epoch, message.version, stage, message.micro_batch, message.attempt, gradient)
            self._send(message.path[stage], back)

    def _acknowledge(self, message: Forward, forward: bool, owns: bool, seconds: float) -> None:
        ack = Ack(
            message.epoch,
            message.version,
            message.stage,
            message.micro_batch,
            message.attempt,
            self.node.name,
            self.incarnation,
            forward,
            owns,
            seconds,
        )
        self._send(message.attempt.feeder, ack)
