"""Coordinating: the process that keeps a swarm's journal, tells its members what to do and writes the run's directory.

It may be killed at any moment and started again on the same directory: members find it at the same address and go on.
"""

import asyncio
import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from atoll.control.coordinator import Coordinator
from atoll.control.happenings import Happening, Saved, StepCommitted
from atoll.control.journal import FencedError, Record
from atoll.control.messages import Committed, Finished, Message
from atoll.control.world import Journal, Node
from atoll.errors import JobFailedError
from atoll.events import AnyEvent, EventLog, Observer, RunFinished, RunStarted, StepFinished, read_events
from atoll.fabric.security import Authority, serve
from atoll.job import Job
from atoll.runtime.refusing import refused_step
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.clock import LoopClock
from atoll.runtime.swarm.evaluating import evaluate_elsewhere, evaluates_after
from atoll.runtime.swarm.files import CheckpointFiles, CheckpointService, FileJournal, Key, States
from atoll.runtime.swarm.jetstream import JetStream, connect_jetstream
from atoll.runtime.swarm.measuring import MeasureService
from atoll.runtime.swarm.resuming import all_stored, last_states
from atoll.runtime.swarm.run_files import JOURNAL, STATES, STOP, Start, read_start, since_start
from atoll.runtime.swarm.spec import JobService, SwarmSpec
from atoll.runtime.swarm.telling import Teller, say_event
from atoll.runtime.swarm.transport import COORDINATOR, Directory, FabricTransport, SwarmService
from atoll.runtime.swarm.waiting import Waiting
from atoll.runtime.swarm.weights import save_weights, whole_state

__all__ = ["coordinate"]

_MEASURES_SECONDS = 3.0  # between two writings of what workers measured
_LOOK_SECONDS = 0.5  # between looks at who leads
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES}
_FINAL_SECONDS = 120.0  # how long the last states are waited for


Recall = Callable[[Sequence[AnyEvent]], None]


def _ignore(events: Sequence[AnyEvent]) -> None:
    """Nobody counts what was told before."""


class _Watching(NamedTuple):
    observers: tuple[Observer, ...]
    recall: Recall


def coordinate(
    directory: RunDirectory,
    spec: SwarmSpec,
    job: Job,
    address: str,
    *,
    observers: tuple[Observer, ...] = (),
    recall: Recall = _ignore,
    say: Callable[[str], None] = print,
) -> bool:
    """Coordinates until the run is over and its weights are in the directory. False: it was asked to stop before its last step.

    With NATS in the run's settings it stands by while another coordinates. `recall` gets what coordinators before this one have told
    since `atoll run` was started; observers do not, as they may do something at every event.
    """
    servers = directory.settings().nats
    watching = _Watching(observers, recall)
    try:
        if servers is None:
            return asyncio.run(_coordinate_from_files(directory, spec, job, address, watching))
        return asyncio.run(_coordinate_from_nats(directory, spec, job, address, watching, servers, say))
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        why = os.strerror(error.errno or 0)
        raise JobFailedError(f"{directory.path}: cannot be written any more ({why}); mend that, then `--resume` goes on") from error


async def _coordinate_from_files(directory: RunDirectory, spec: SwarmSpec, job: Job, address: str, watching: _Watching) -> bool:
    journal, states = FileJournal(directory.path / JOURNAL), CheckpointFiles(directory.path / STATES)
    try:
        return await _Coordinating(directory, spec, job, watching, journal, states).run(address)
    except FencedError:
        raise JobFailedError(f"{directory.path}: another coordinator runs on the same directory; this one stops") from None


async def _coordinate_from_nats(
    directory: RunDirectory,
    spec: SwarmSpec,
    job: Job,
    address: str,
    watching: _Watching,
    servers: str,
    say: Callable[[str], None],
) -> bool:
    run = Authority.open(directory.path).run
    async with connect_jetstream(servers, run, address) as kept:
        while await _wait_to_lead(kept, address, say):
            keeping = asyncio.ensure_future(kept.leadership.keep())
            try:
                done = await _Coordinating(directory, spec, job, watching, kept.journal, kept.checkpoints).run(address)
                await kept.checkpoints.end(address)
                return done
            except FencedError:
                say("another coordinator has taken over; this one stands by")
            finally:
                keeping.cancel()
        return True


async def _wait_to_lead(kept: JetStream, address: str, say: Callable[[str], None]) -> bool:
    """Until nobody else coordinates. False: the run is over, and whoever coordinated has its weights."""
    said = None
    while True:
        ended = await kept.checkpoints.ended()
        if ended is not None:
            say(f"the run has ended; its weights are where the coordinator at {ended} ran")
            return False
        if await kept.leadership.take():
            return True
        holder = await kept.leadership.holder()
        if holder == address:  # who was here before us and died
            await kept.leadership.release()
        elif holder != said and holder is not None:
            say(f"standing by: {holder} coordinates")
            said = holder
        await asyncio.sleep(_LOOK_SECONDS)


class _Coordinating:
    def __init__(self, directory: RunDirectory, spec: SwarmSpec, job: Job, watching: _Watching, journal: Journal, states: States) -> None:
        self.directory, self.spec, self.job = directory, spec, job
        self.observers, self._recall = watching
        self._start = read_start(directory) or Start(directory.last_moment(), time.time(), "")
        self._teller = Teller(self._now, job.batch_size, states.stored_bytes)
        self._evaluations: list[asyncio.Future[None]] = []
        self._replaces = False  # whether another coordinated before since `atoll run` was started
        self._stepped = False  # whether a step was committed since this coordinator began
        self._kept: int | None = None  # the newest checkpoint this coordinator knows of
        self._errors: list[BaseException] = []
        self._unwritten = False  # whether it was said that measures cannot be written
        self.journal, self.states = journal, states

    async def run(self, address: str) -> bool:
        loop = asyncio.get_running_loop()
        clock = self._clock = LoopClock(self._errors.append)
        inbox = clock.mailbox()

        def arrived(to: str, message: Message) -> None:
            loop.call_soon_threadsafe(inbox.put, message)

        places = Directory()
        self._measures = MeasureService(self.directory)
        services = [SwarmService(arrived), places, CheckpointService(self.states, loop), JobService(self.spec), self._measures]
        authority = await asyncio.to_thread(Authority.open, self.directory.path)
        with EventLog(self.directory.path, resume=self.directory.events.exists()) as log:
            self._log = log
            first = self._begin()
            member, _ = await asyncio.to_thread(lambda: serve(authority, address, services=services, fingerprint=self.spec.fingerprint))
            try:
                transport = FabricTransport(member, None, places)
                node = Node(COORDINATOR, clock, transport, inbox, 0, random.Random(time.time_ns()))
                coordinator = Coordinator(node, self.journal, self.spec.settings, observe=self._observe)
                clock.spawn(self._keep_measures())
                if first and self._start.workers:
                    clock.spawn(self._tell_waiting(coordinator))
                await self._until(asyncio.ensure_future(coordinator.run()), coordinator)
                if coordinator.deposed:
                    raise FencedError("another coordinator has taken over")
                records = await self._write_weights(coordinator.version)
                refused = coordinator.refused
                self._tell(self._finished(coordinator.version, records, failed=refused is not None))
                if refused is not None:
                    raise refused_step(refused.version + 1, refused.what, refused.value)
                return not coordinator.stopped
            finally:
                await clock.close()
                await self._write_measures()
                await asyncio.to_thread(member.close)

    async def _until(self, task: "asyncio.Future[None]", coordinator: Coordinator) -> None:
        while not task.done():
            await asyncio.wait([task], timeout=0.2)
            if (self.directory.path / STOP).exists():
                coordinator.stop()
            if self._errors:
                task.cancel()
                raise self._errors[0]
        await task

    async def _keep_measures(self) -> None:
        while True:
            await asyncio.sleep(_MEASURES_SECONDS)
            await self._write_measures()

    async def _write_measures(self) -> None:
        """Reports read them; training does not, and goes on without."""
        try:
            await asyncio.to_thread(self._measures.write)
        except OSError as error:
            if not self._unwritten:
                print(f"  what workers measured cannot be written ({error.strerror}); the report will lack it", flush=True)
            self._unwritten = True

    async def _tell_waiting(self, coordinator: Coordinator) -> None:
        """Until the first step, or those who were started would seem to do nothing for as long as they load."""
        waiting, began = Waiting(self._start.workers, self.spec.settings.stages), time.monotonic()
        while not self._stepped and type(coordinator.phase) is not Finished:
            line = waiting.line(time.monotonic() - began, [member.stage for member in coordinator.members if member.stage >= 0])
            if line is not None:
                print(f"  {line}", flush=True)
            await asyncio.sleep(_LOOK_SECONDS)

    # ---- events

    def _now(self) -> float:
        return self._start.at_seconds + max(0.0, time.time() - self._start.unix_seconds)

    def _begin(self) -> bool:
        """The first coordinator since `atoll run` was started says so in the run's events; one in its place only to those who watch.
        Whether it is the first.
        """
        told = since_start(tuple(read_events(self.directory.events)), self._start)
        self._replaces = bool(told)
        if not told:
            self._tell(self._started())
            return True
        for observer in self.observers:
            observer(self._started())
        self._recall(told)
        return False

    def _tell(self, event: AnyEvent) -> None:
        self._log(event)
        for observer in self.observers:
            observer(event)

    def _started(self) -> RunStarted:
        job = self.job
        return RunStarted(
            at_seconds=self._start.at_seconds,
            name=job.name,
            mode="swarm",
            steps=job.total_steps,
            batch_size=job.batch_size,
            samples=job.samples.length,
            parameters=self.spec.parameters,
            devices=(),
            precision=job.precision,
            seed=job.seed,
            unix_seconds=time.time(),
        )

    def _observe(self, happening: Happening) -> None:
        event = self._teller.event(happening)
        self._stepped = self._stepped or isinstance(happening, StepCommitted)
        if isinstance(happening, Saved):
            self._forget_old(happening.version)
            self._evaluate_when_due(happening.epoch, happening.version)
        if event is None:
            return
        line = say_event(event, starting=not self._replaces and not self._stepped)
        if line is not None:
            print(f"  {line}", flush=True)
        self._tell(event)
        if isinstance(event, StepFinished) and event.step == self.spec.settings.steps:
            print("  the last step is made; its states and the weights are written", flush=True)

    def _forget_old(self, version: int) -> None:
        """Two checkpoints are kept: the newest, and the one before, which a rollback may just be reading."""
        if self._kept is not None and self._kept < version:
            self._clock.spawn(self.states.forget_before(self._kept))
        self._kept = version

    def _evaluate_when_due(self, epoch: int, version: int) -> None:
        """In a process of its own, one after another; training does not wait."""
        if not evaluates_after(self.job, version, self.spec.settings.steps):
            return
        keys = [Key(epoch, version, stage) for stage in range(self.spec.settings.stages)]
        self._evaluations.append(asyncio.ensure_future(self._evaluate(keys, tuple(self._evaluations))))

    async def _evaluate(self, keys: Sequence[Key], before: Sequence["asyncio.Future[None]"]) -> None:
        await asyncio.gather(*before)
        try:
            found = await evaluate_elsewhere(self.directory, self.states, keys)
        except JobFailedError as error:
            print(f"  step {keys[0].version}: not evaluated: {error}", flush=True)
            return
        self._tell(msgspec.structs.replace(found, at_seconds=self._now()))

    # ---- the end

    async def _write_weights(self, version: int) -> Sequence[Record]:
        """The last states are on their way when the run is over; of a run that was stopped they are stored already."""
        records = await self.journal.read()
        keys = last_states(records, self.spec.settings.stages)
        until = time.monotonic() + _FINAL_SECONDS
        while not await all_stored(self.states, keys):
            if time.monotonic() > until:
                raise JobFailedError("the last states did not all arrive; `--resume` goes on from the last checkpoint")
            await asyncio.sleep(0.2)
        tensors = await whole_state(self.states, keys)
        if tensors is None:
            raise JobFailedError(f"{self.directory.path / STATES}: a state after step {version} is damaged; restore it from a copy")
        if version:
            await asyncio.to_thread(save_weights, self.directory, self.job, tensors, version)
        if version == self.spec.settings.steps and keys:
            self._evaluate_when_due(keys[0].epoch, version)
        await asyncio.gather(*self._evaluations)
        return records

    def _finished(self, version: int, records: Sequence[Record], *, failed: bool) -> RunFinished:
        losses = {record.version: record.loss / record.weight for record in records if isinstance(record, Committed)}
        return RunFinished(
            at_seconds=self._now(),
            reason="failed" if failed else "done" if version >= self.spec.settings.steps else "interrupted",
            steps=version,
            samples=version * self.job.batch_size,
            seconds=self._now() - self._start.at_seconds,
            loss=losses.get(version - 1),
        )
