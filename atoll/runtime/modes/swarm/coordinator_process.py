"""The process that keeps a swarm's journal, tells its members what to do, writes the run's directory and has checkpoints evaluated.

It may be killed at any moment and started again on the same directory: members find it at the same address and go on. Evaluation runs in a
process of its own, which holds the whole model: whatever happens to it costs the workers nothing.
"""

import asyncio
import errno
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Literal, NamedTuple

import msgspec
import torch

from atoll.blame import showing_lines, users_code
from atoll.control.coordinator import Coordinator
from atoll.control.journal import FencedError, Record, replay
from atoll.control.messages import Committed, Finished, Message
from atoll.control.world import Journal, SwarmProcess
from atoll.errors import CheckpointError, JobFailedError
from atoll.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    EventLog,
    MembersAwaited,
    Note,
    Observer,
    PeerRefused,
    RunFinished,
    RunStarted,
    StepFinished,
    StopTraining,
    Warned,
    read_events,
)
from atoll.fabric.security import Authority, serve
from atoll.fabric.shaped import LinkChoice
from atoll.job import Job
from atoll.plan.modes.swarm import SwarmOptions
from atoll.runtime.checkpoint.directory import step_path
from atoll.runtime.checkpoint.manifest import EMA_KEY, MODEL
from atoll.runtime.checkpoint.rebuilt import check_rebuilt, tensor_digests
from atoll.runtime.checkpoint.state_file import BUFFER, StateReader, cut
from atoll.runtime.evaluation import ModelEvaluator, evaluates_after
from atoll.runtime.modes.swarm.files import CheckpointFiles, CheckpointService, FileJournal, Key, States
from atoll.runtime.modes.swarm.jetstream import JetStream, connect_jetstream
from atoll.runtime.modes.swarm.measurement import MeasureService
from atoll.runtime.modes.swarm.resume import all_stored, complete_checkpoint, is_complete, last_states
from atoll.runtime.modes.swarm.spec import JOURNAL, STATES, STOP, JobService, Start, SwarmSpec, read_start, since_start
from atoll.runtime.modes.swarm.stream_places import StreamPlaces, saved_places
from atoll.runtime.modes.swarm.transport import COORDINATOR, Directory, FabricTransport, LoopClock, SwarmService
from atoll.runtime.nonfinite import refused_step
from atoll.runtime.run_directory import RunDirectory

__all__ = ["StartupProgress", "coordinate", "evaluate_elsewhere", "evaluate_state"]

_MEASURES_SECONDS = 3.0  # between two writings of what workers measured
_LINKS_SECONDS = 10.0  # between two events that say what went over links
_LOOK_SECONDS = 0.5  # between looks at who leads
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES}
_FINAL_SECONDS = 120.0  # how long the last states are waited for
_NEWS_SECONDS = 2.0  # between two events that say differently who is waited for
_AGAIN_SECONDS = 15.0  # until the same is told again


Recall = Callable[[Sequence[AnyEvent]], None]


def _ignore(events: Sequence[AnyEvent]) -> None:
    """Nobody counts what was told before."""


class _Watching(NamedTuple):
    """What a coordinator of these arguments has beside its run."""

    observers: tuple[Observer, ...]
    recall: Recall
    links: LinkChoice | None = None

    def note(self, message: str) -> None:
        """For those who watch a process that stands by; the run's log is the leader's."""
        for observer in self.observers:
            observer(Note(message=message))


def coordinate(
    directory: RunDirectory,
    spec: SwarmSpec,
    job: Job,
    address: str,
    *,
    observers: tuple[Observer, ...] = (),
    recall: Recall = _ignore,
    links: LinkChoice | None = None,
) -> bool:
    """Coordinates until the run is over and its weights are in the directory. False: it was asked to stop before its last step.

    With NATS in the run's settings it stands by while another coordinates. `recall` gets what coordinators before this one have told
    since `atoll run` was started; observers do not, as they may do something at every event. `links` are those to its members in a lab
    without namespaces.
    """
    servers = directory.settings().options_as(SwarmOptions).nats
    watching = _Watching(observers, recall, links)
    try:
        if servers is None:
            return asyncio.run(_coordinate_from_files(directory, spec, job, address, watching))
        return asyncio.run(_coordinate_from_nats(directory, spec, job, address, watching, servers))
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
) -> bool:
    run = Authority.open(directory.path).run
    async with connect_jetstream(servers, run, address) as kept:
        while await _wait_to_lead(kept, address, watching):
            keeping = asyncio.ensure_future(kept.leadership.keep())
            try:
                done = await _Coordinating(directory, spec, job, watching, kept.journal, kept.checkpoints).run(address)
                await kept.checkpoints.end(address)
                return done
            except FencedError:
                watching.note("another coordinator has taken over; this one stands by")
            finally:
                keeping.cancel()
        return True


async def _wait_to_lead(kept: JetStream, address: str, watching: "_Watching") -> bool:
    """Until nobody else coordinates. False: the run is over, and whoever coordinated has its weights."""
    said = None
    while True:
        ended = await kept.checkpoints.ended()
        if ended is not None:
            watching.note(f"the run has ended; its weights are where the coordinator at {ended} ran")
            return False
        if await kept.leadership.take():
            return True
        holder = await kept.leadership.holder()
        if holder == address:  # who was here before us and died
            await kept.leadership.release()
        elif holder != said and holder is not None:
            watching.note(f"standing by: {holder} coordinates")
            said = holder
        await asyncio.sleep(_LOOK_SECONDS)


class StartupProgress:
    """What is waited for between the start of a swarm and its first step, while processes load and nothing else is to be seen.

    It reads no clock: times are given, from the start of the coordinator.
    """

    def __init__(self, workers: int, stages: int) -> None:
        """So many workers were started; each of so many stages needs one."""
        self._workers, self._stages = workers, stages
        self._said: MembersAwaited | None = None
        self._said_at = 0.0

    def event(self, now: float, joined: Sequence[int]) -> MembersAwaited | None:
        """What to tell now, if anything; `joined` are the stages of the workers that are there."""
        empty = tuple(stage for stage in range(self._stages) if stage not in joined)
        event = MembersAwaited(joined=len(joined), expected=max(self._workers, len(joined)), stages=empty)
        if now - self._said_at < (_NEWS_SECONDS if event != self._said else _AGAIN_SECONDS):
            return None
        self._said, self._said_at = event, now
        return msgspec.structs.replace(event, seconds=now)


class _Coordinating:
    def __init__(self, directory: RunDirectory, spec: SwarmSpec, job: Job, watching: _Watching, journal: Journal, states: States) -> None:
        self.directory, self.spec, self.job = directory, spec, job
        self.observers, self._recall, self._links = watching
        self._start = read_start(directory) or Start(directory.last_moment(), time.time(), "")
        self._evaluations: list[asyncio.Future[None]] = []
        self._saves: list[asyncio.Future[None]] = []  # checkpoints that are made of stored states
        self._stepped = False  # whether a step was committed since this coordinator began
        self._coordinator: Coordinator | None = None
        self._evaluated: set[int] = set()  # versions that are evaluated, or will be
        self._kept: int | None = None  # the newest checkpoint this coordinator knows of
        self._errors: list[BaseException] = []
        self._asked_to_stop = False  # by a callback
        self._callback_failed: JobFailedError | None = None
        self._unwritten = False  # whether it was said that measures cannot be written
        self._stream = StreamPlaces(saved_places(directory.checkpoints, job.batch_size))
        self.journal, self.states = journal, states

    async def run(self, address: str) -> bool:
        loop = asyncio.get_running_loop()
        clock = self._clock = LoopClock(self._errors.append)
        inbox = clock.mailbox()

        def arrived(to: str, message: Message) -> None:
            loop.call_soon_threadsafe(inbox.put, message)

        def heard(event: AnyEvent) -> None:
            loop.call_soon_threadsafe(self._emit, event)

        def tell_refusal(event: AnyEvent) -> None:
            if isinstance(event, PeerRefused) and event.what == "call":
                heard(event)

        places = Directory()
        self._measures = MeasureService(self.directory, heard, self.spec.codec)
        states = CheckpointService(
            self.states, self.directory.checkpoints, loop, lambda: self._coordinator, lambda message: self._emit(Warned(message=message))
        )
        services = [SwarmService(arrived, self.spec.settings), places, states, JobService(self.spec), self._measures, self._stream]
        authority = await asyncio.to_thread(Authority.open, self.directory.path)
        with EventLog.join(self.directory.path) as log:
            self._log = log
            saved = replay(await self.journal.read()).checkpoint
            first = self._begin(saved.version if saved is not None else 0)
            member, _ = await asyncio.to_thread(
                lambda: serve(
                    *(authority, address),
                    services=services,
                    observer=tell_refusal,
                    fingerprint=self.spec.fingerprint,
                    links=self._links,
                )
            )
            try:
                transport = FabricTransport(member, None, places)
                node = SwarmProcess(COORDINATOR, clock, transport, inbox, 0, random.Random(time.time_ns()), self._observe)
                coordinator = Coordinator(node, self.journal, self.spec.settings, self._discard)
                self._coordinator = coordinator
                clock.spawn(self._keep_measures())
                if first and self._start.workers:
                    clock.spawn(self._tell_waiting(coordinator))
                await self._until(asyncio.ensure_future(coordinator.run()), coordinator)
                if coordinator.deposed:
                    raise FencedError("another coordinator has taken over")
                records = await self._write_weights(coordinator.version)
                refused = coordinator.refused
                self._tell_links()
                failed = self._callback_failed
                self._tell(self._finished(coordinator.version, records, failed=refused is not None or failed is not None))
                if refused is not None:
                    raise refused_step(refused.step, refused.what, float(refused.value), self.directory.checkpoints)
                if failed is not None:
                    with showing_lines():
                        raise failed
                return self._asked_to_stop or not coordinator.stopped
            finally:
                await clock.close()
                await self._write_measures()
                await asyncio.to_thread(member.close)

    async def _until(self, task: "asyncio.Future[None]", coordinator: Coordinator) -> None:
        while not task.done():
            await asyncio.wait([task], timeout=0.2)
            if self._asked_to_stop or self._callback_failed is not None or (self.directory.path / STOP).exists():
                coordinator.stop()
            if self._errors:
                task.cancel()
                raise self._errors[0]
        await task

    async def _keep_measures(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_MEASURES_SECONDS)
            await self._write_measures()
            if time.monotonic() - looked > _LINKS_SECONDS:
                looked = time.monotonic()
                self._tell_links()

    def _tell_links(self) -> None:
        links = self._measures.links()
        if links is not None:
            self._emit(links)

    async def _write_measures(self) -> None:
        """Reports read them; training does not, and goes on without."""
        try:
            await asyncio.to_thread(self._measures.write)
        except OSError as error:
            if not self._unwritten:
                self._emit(Warned(message=f"what workers measured cannot be written ({error.strerror}); the report will lack it"))
            self._unwritten = True

    async def _tell_waiting(self, coordinator: Coordinator) -> None:
        """Until the first step, or those who were started would seem to do nothing for as long as they load."""
        waiting, began = StartupProgress(self._start.workers, self.spec.settings.stages), time.monotonic()
        while not self._stepped and type(coordinator.phase) is not Finished:
            event = waiting.event(time.monotonic() - began, [member.stage for member in coordinator.members if member.stage >= 0])
            if event is not None:
                self._emit(event)
            await asyncio.sleep(_LOOK_SECONDS)

    # ---- events

    def _now(self) -> float:
        return self._start.at_seconds + max(0.0, time.time() - self._start.unix_seconds)

    def _begin(self, saved: int = 0) -> bool:
        """The first coordinator since `atoll run` was started says so in the run's events; one in its place only to those who watch.
        Whether it is the first. `saved` are the steps after which it goes on.
        """
        told = since_start(tuple(read_events(self.directory.events)), self._start)
        if not told:
            self._tell(self._started())
            self._stream.remind(self.job.samples)
            for remark in self.job.remarks(saved):
                self._emit(Note(message=remark))
            return True
        self._show(self._started())
        self._recall(told)
        return False

    def _tell(self, event: AnyEvent) -> None:
        self._log(event)
        self._show(event)

    def _show(self, event: AnyEvent) -> None:
        """Callbacks may end the run, by asking for it or by failing: after the step under way, once its state is stored."""
        step = self._coordinator.version if self._coordinator is not None else 0
        for observer in self.observers:
            try:
                with users_code(f"step {step}: a callback, told of {event.kind},", JobFailedError), _no_exit():
                    try:
                        observer(event)
                    except StopTraining:
                        self._asked_to_stop = True
            except JobFailedError as error:
                self._callback_failed = self._callback_failed or error
                self.observers = tuple(other for other in self.observers if other is not observer)

    def _emit(self, event: AnyEvent) -> None:
        """For what has no time of its own yet."""
        self._tell(msgspec.structs.replace(event, at_seconds=self._now()))

    def _started(self) -> RunStarted:
        job = self.job
        return RunStarted(
            at_seconds=self._start.at_seconds,
            name=job.name,
            mode="swarm",
            steps=job.total_steps,
            batch_size=job.batch_size,
            samples=job.samples.length,
            num_workers=job.num_workers,
            parameters=self.spec.parameters,
            frozen_parameters=self.spec.frozen_parameters,
            devices=(),
            precision=job.precision,
            seed=job.seed,
            unix_seconds=time.time(),
        )

    def _observe(self, event: AnyEvent) -> None:
        """What the protocol says, which knows neither how many samples a step has nor what is stored where."""
        if isinstance(event, CheckpointSaved):
            assert self._coordinator is not None
            keys = [Key(self._coordinator.epoch, event.step, stage) for stage in range(self.spec.settings.stages)]
            self._saves.append(asyncio.ensure_future(self._complete(keys, tuple(self._saves))))
            event = self._saved(event.step, event.seconds)
        elif isinstance(event, StepFinished):
            self._stepped = True
            event = msgspec.structs.replace(event, samples=self.job.batch_size)
        self._emit(event)
        if isinstance(event, StepFinished) and event.step == self.spec.settings.steps:
            self._emit(Note(message="the last step is done; saving the final state and the weights"))

    def _saved(self, step: int, seconds: float) -> CheckpointSaved:
        path, size = f"checkpoints/{step_path(self.directory.checkpoints, step).name}", self.states.stored_bytes(step)
        return CheckpointSaved(step=step, path=path, size_bytes=size, blocked_seconds=0.0, seconds=seconds)

    def _forget_old(self, version: int) -> None:
        """Two checkpoints are kept: the newest, and the one before, which a rollback may just be reading."""
        if self._kept is not None and self._kept < version:
            self._clock.spawn(self.states.forget_before(self._kept))
        self._kept = version

    def _discard(self, epoch: int, version: int, stage: int) -> None:
        self._clock.spawn(self.states.discard(Key(epoch, version, stage)))

    async def _complete(self, keys: Sequence[Key], before: Sequence["asyncio.Future[None]"] = ()) -> None:
        """Make the stages' stored states the run's checkpoint; training goes on meanwhile, and whether it can be made or not."""
        await asyncio.gather(*before, return_exceptions=True)
        version = keys[0].version
        try:
            await self._assemble(keys)
        except (OSError, CheckpointError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._emit(CheckpointFailed(step=version, message=why))
            return
        self._forget_old(version)
        self._evaluate_when_due(version)

    async def _assemble(self, keys: Sequence[Key]) -> None:
        data = self._stream.before(keys[0].version)
        await complete_checkpoint(self.directory, self.job, self.spec, self.journal, self.states, keys, data)

    def _evaluate_when_due(self, version: int) -> None:
        """In a process of its own, one after another; training does not wait."""
        if version in self._evaluated or not evaluates_after(self.job, version, self.spec.settings.steps):
            return
        self._evaluated.add(version)
        self._evaluations.append(asyncio.ensure_future(self._evaluate(version, tuple(self._evaluations))))

    async def _evaluate(self, step: int, before: Sequence["asyncio.Future[None]"]) -> None:
        await asyncio.gather(*before)
        try:
            found = await evaluate_elsewhere(self.directory, step)
        except JobFailedError as error:
            self._emit(EvaluationFailed(step=step, message=str(error)))
            return
        self._emit(found)

    # ---- the end

    async def _write_weights(self, version: int) -> Sequence[Record]:
        """The last states are on their way when the run is over; of a run that was stopped they are stored already."""
        records = await self.journal.read()
        keys = last_states(records, self.spec.settings.stages)
        until = time.monotonic() + _FINAL_SECONDS
        begun = replay(records).origin
        if begun is not None and begun.version == version and step_path(self.directory.checkpoints, version).is_dir():
            keys = ()  # no step was made: the checkpoint it began from is the last one
            self._evaluate_when_due(version)
        while not await all_stored(self.states, keys):
            if time.monotonic() > until:
                raise JobFailedError("the last states did not all arrive; `--resume` goes on from the last checkpoint")
            await asyncio.sleep(0.2)
        await asyncio.gather(*self._saves)
        if keys and not is_complete(self.directory, keys[0], self.spec):
            began = time.monotonic()
            try:
                await self._assemble(keys)
            except (OSError, CheckpointError) as error:
                raise JobFailedError(f"step {version}: the last checkpoint could not be saved: {error}") from error
            if self._kept != version:
                self._emit(self._saved(version, time.monotonic() - began))
        if keys:
            self._evaluate_when_due(version)
        await asyncio.gather(*self._evaluations)
        self._tell_missing_evaluations(version)
        return records

    def _tell_missing_evaluations(self, version: int) -> None:
        """Those that were due and that no coordinator of this run has made or tried."""
        told = {event.step for event in read_events(self.directory.events) if isinstance(event, Evaluated | EvaluationFailed)}
        for step in range(1, version + 1):
            if step not in told and evaluates_after(self.job, step, self.spec.settings.steps):
                why = "its state was not stored whole by all stages before the next one was, or whoever coordinated then ended"
                self._emit(EvaluationFailed(step=step, message=why))

    @property
    def _early(self) -> Literal["stopped", "interrupted"]:
        return "stopped" if self._asked_to_stop else "interrupted"

    def _finished(self, version: int, records: Sequence[Record], *, failed: bool) -> RunFinished:
        losses = {record.version: record.loss / record.weight for record in records if isinstance(record, Committed)}
        return RunFinished(
            at_seconds=self._now(),
            reason="failed" if failed else "done" if version >= self.spec.settings.steps else self._early,
            steps=version,
            samples=version * self.job.batch_size,
            seconds=self._now() - self._start.at_seconds,
            loss=losses.get(version - 1),
        )


@contextmanager
def _no_exit() -> Iterator[None]:
    """A callback that ends the script has failed: the script is not what runs here."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the script exits ({error.code}) while the run is under way") from error


def evaluate_state(directory: RunDirectory, job: Job, step: int) -> Evaluated:
    """In the process of its own."""
    torch.set_num_threads(1)
    model = job.build_model("cpu")
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        saved = StateReader(cut(step_path(directory.checkpoints, step), named))
    except CheckpointError as error:
        raise JobFailedError(f"the checkpoint of step {step} is not there any more ({error})") from error
    made = tensor_digests({name: value for name, value in named.items() if name in saved.rebuilt})
    check_rebuilt(saved.where, saved.rebuilt, made)
    for name, value in named.items():
        for key in (MODEL + name, BUFFER + name, *((EMA_KEY + name,) if job.eval_ema else ())):
            if key in saved:
                saved.fill(key, value)
    assert job.eval_dataset is not None
    with closing(ModelEvaluator(job, model, torch.device("cpu"), job.eval_dataset)) as evaluator:
        return evaluator.run(step)


async def evaluate_elsewhere(directory: RunDirectory, step: int) -> Evaluated:
    """Starts that process and waits for what it found; JobFailedError with its sentence if it found nothing."""
    command = [sys.executable, "-m", "atoll.cli.swarm_process", "evaluate", str(directory.path.resolve())]
    process = await asyncio.create_subprocess_exec(
        *command, str(step), "evaluation", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaints = await process.communicate()
    if process.returncode:
        said = complaints.decode(errors="replace").strip().splitlines()
        raise JobFailedError(said[-1].removeprefix("error: ") if said else f"it ended with {process.returncode}")
    return msgspec.json.decode(out.splitlines()[-1], type=Evaluated)
