"""Resuming: a swarm run that goes on where it was, or where another mode or other stages left it. What was committed is in the journal;
states come from the run's checkpoint, which is that of every mode, or from workers that are still there.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from atoll.control.journal import Checkpointed, Epoch, History, Record, Term, read_records, replay
from atoll.control.messages import Committed
from atoll.control.settings import Settings
from atoll.control.world import Journal
from atoll.errors import AtollError, CheckpointError, JobFailedError
from atoll.job import Job
from atoll.model_identity import identify
from atoll.runtime.checkpoint.directory import candidates, step_path
from atoll.runtime.checkpoint.manifest import RunIdentity, read_manifest, read_state
from atoll.runtime.checkpoint.state_file import WholeCheckpoint, assemble_checkpoint, newest_whole
from atoll.runtime.modes.swarm.files import CheckpointFiles, FileJournal, Key, States
from atoll.runtime.modes.swarm.jetstream import connect_jetstream
from atoll.runtime.modes.swarm.spec import JOURNAL, STATES, SwarmSpec, read_start
from atoll.runtime.modes.swarm.stream_places import StreamPlaces, saved_places
from atoll.runtime.run_directory import RunDirectory

__all__ = [
    "Resumed",
    "all_stored",
    "check_journal",
    "complete_checkpoint",
    "continue_journal",
    "continue_run",
    "is_complete",
    "last_states",
]

_KEPT = 2  # checkpoints: the newest, and the one before, which a rollback may just be reading


class Resumed(msgspec.Struct, frozen=True):
    """Where a run goes on."""

    committed: int  # steps
    checkpoint: int  # steps, of the last checkpoint
    lost: bool = False  # the last step's states are nowhere: it goes on from the checkpoint
    notes: tuple[str, ...] = ()  # what was found damaged


async def continue_run(directory: RunDirectory, servers: str | None, run: str, spec: SwarmSpec, job: Job) -> Resumed | None:
    """As `continue_journal`, wherever the run's journal and states are. A new run is left as it is."""
    if read_start(directory) is None and not candidates(directory.checkpoints, None):
        return None
    files = CheckpointFiles(directory.path / STATES)
    if servers is None:
        journal = FileJournal(directory.path / JOURNAL)
        await _complete_last(directory, job, spec, journal, files)
        found = _fitting(newest_whole(directory.checkpoints), job)
        saved = replay(await journal.read()).checkpoint
        if found is None and saved is not None and saved.version:
            raise JobFailedError(
                f"{directory.checkpoints}: the checkpoint of step {saved.version} is damaged or missing; restore it from a copy"
            )
        return await continue_journal(journal, spec.settings, spec.bounds, found, files)
    async with connect_jetstream(servers, run, "atoll run") as kept:
        await kept.checkpoints.reopen()
        found = _fitting(newest_whole(directory.checkpoints), job)
        return await continue_journal(kept.journal, spec.settings, spec.bounds, found, None)


async def continue_journal(
    journal: Journal,
    settings: Settings,
    bounds: Sequence[int] = (),
    found: WholeCheckpoint | None = None,
    files: CheckpointFiles | None = None,
) -> Resumed | None:
    """Prepares a run's journal for those who start now; None where nothing was begun. `files` are the states where they are all local.

    Where another mode or other stages wrote the checkpoint, or the journal's own is damaged, a new epoch begins from the newest whole one.
    Else, where the last checkpoint is of the last commit, everybody begins from it at once, under a new epoch. So it is where the last
    step was made and its states were lost with those who had them: nobody would make it again otherwise. Else nothing is decided here:
    workers may still be out there with the newest state, and the coordinator waits for them before it goes back to the checkpoint.
    """
    records = await journal.read()
    history = replay(records)
    if found is not None and _is_others(found, history, bounds, local=files is not None):
        return await _begin_from(journal, history, found, files)
    if history.origin is None:
        return None
    saved, committed = history.checkpoint or Checkpointed(0, 0), history.version
    at_its_checkpoint = (saved.epoch, saved.version) == (history.origin.epoch, committed) and history.checkpoint is not None
    lost = committed >= settings.steps and not history.stored
    if at_its_checkpoint or lost:
        await journal.append(history.term + 1, Term(history.term + 1))
        await journal.append(history.term + 1, Epoch(history.origin.epoch + 1, saved.version, saved.epoch))
    return Resumed(committed, saved.version, lost)


def _is_others(found: WholeCheckpoint, history: History, bounds: Sequence[int], *, local: bool) -> bool:
    """Whether the newest whole checkpoint is not the journal's own, or not of these stages."""
    mark = found.extra.get("swarm")
    if history.origin is None or found.step > history.version or mark is None or tuple(mark["bounds"]) != tuple(bounds):
        return True
    return local and history.checkpoint is not None and found.step < history.checkpoint.version  # its own is damaged


async def _begin_from(journal: Journal, history: History, found: WholeCheckpoint, files: CheckpointFiles | None) -> Resumed:
    """A new epoch from a checkpoint, which states are cut out of as workers ask for them."""
    before = history.origin.epoch if history.origin is not None else 0
    if files is not None:
        files.clear()  # states of other stages, or after steps that are made again
    term = history.term + 1
    for record in (Term(term), Checkpointed(before, found.step), Epoch(before + 1, found.step, before)):
        await journal.append(term, record)
    saved, notes = history.checkpoint, found.notes
    if saved is not None and saved.version > found.step and not notes:
        notes = (f"the checkpoint of step {saved.version} is damaged or missing",)
    return Resumed(found.step, found.step, notes=notes)


def _fitting(found: WholeCheckpoint | None, job: Job) -> WholeCheckpoint | None:
    """CheckpointError where the checkpoint is of another model or optimizer: before anybody is started."""
    if found is None:
        return None
    model, known = job.build_model("meta"), checkpoint_identity(job, "")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in known.tied}
    for name in shapes.keys() | found.shapes.keys():
        if shapes.get(name) != found.shapes.get(name):
            there, here = (f"of shape {list(of[name])}" if name in of else "not" for of in (found.shapes, shapes))
            raise CheckpointError(f"{found.path}: {name!r} is {there} there and {here} in the job's model")
    if found.manifest.run.optimizer != known.optimizer:
        raise CheckpointError(
            f"{found.path}: it was saved with the optimizer {found.manifest.run.optimizer} and the job has {known.optimizer}; "
            "start from its exported weights to change the optimizer"
        )
    return found


def checkpoint_identity(job: Job, plan: str) -> RunIdentity:
    """What a checkpoint of the job belongs to."""
    model = job.build_model("meta")
    optimizer = type(job.build_optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__
    return RunIdentity.of(identify(model), job=job.name, optimizer=optimizer, seed=job.seed, batch_size=job.batch_size, plan=plan)


async def complete_checkpoint(
    directory: RunDirectory, job: Job, spec: SwarmSpec, journal: Journal, states: States, keys: Sequence[Key], data: Any = None
) -> None:
    """Make the stored states of all stages the run's checkpoint of their step. States that are kept elsewhere are brought here first.

    `data` is where data that is read in order is then, or was before, as a checkpoint keeps it.
    """
    files = states if isinstance(states, CheckpointFiles) else CheckpointFiles(directory.path / STATES)
    for key in keys:
        if files is not states and (content := await states.read(key)) is not None:
            await files.write(key, content)
    paths = {path: files.checksums(path) for key in keys if (path := await files.whole(key)) is not None}
    if len(paths) != len(keys):
        raise CheckpointError(f"{directory.path / STATES}: a state after step {keys[0].version} is damaged or missing")
    losses = _losses(directory, await journal.read(), keys[0].version)
    extra = {"losses": losses, "data": data, "swarm": {"epoch": keys[0].epoch, "bounds": list(spec.bounds)}}
    keep_last = max(_KEPT, directory.settings().keep_last)

    def assembled() -> None:
        identity = checkpoint_identity(job, str(directory.plan()))
        assemble_checkpoint(directory.checkpoints, paths, step=keys[0].version, identity=identity, extra=extra, keep_last=keep_last)

    await asyncio.to_thread(assembled)


def is_complete(directory: RunDirectory, key: Key, spec: SwarmSpec) -> bool:
    """Whether the run has the checkpoint of that epoch and step, of these stages."""
    path = step_path(directory.checkpoints, key.version)
    try:
        mark = read_state(path, read_manifest(path)).extra.get("swarm")
    except CheckpointError:
        return False
    return mark is not None and (mark["epoch"], tuple(mark["bounds"])) == (key.epoch, tuple(spec.bounds))


async def _complete_last(directory: RunDirectory, job: Job, spec: SwarmSpec, journal: Journal, files: CheckpointFiles) -> None:
    """A run that was killed after its last states were stored, before they were a checkpoint; the stages may be others now."""
    history = replay(await journal.read())
    if history.checkpoint is None or not history.checkpoint.version:
        return
    stages = files.stages(history.checkpoint.epoch, history.checkpoint.version)
    keys = [Key(history.checkpoint.epoch, history.checkpoint.version, stage) for stage in range(stages)]
    if stages == spec.settings.stages and not is_complete(directory, keys[0], spec):
        data = StreamPlaces(saved_places(directory.checkpoints, job.batch_size)).before(history.checkpoint.version)
        with suppress(CheckpointError):  # then it goes on from the one before, and says so
            await complete_checkpoint(directory, job, spec, journal, files, keys, data)


def _losses(directory: RunDirectory, records: Sequence[Record], step: int) -> list[float]:
    """Of every step: from the journal, and before it began from the checkpoint it began from."""
    committed = {record.version: record.loss / record.weight for record in records if isinstance(record, Committed)}
    missing = [version for version in range(step) if version not in committed]
    before: list[float] = []
    if missing:
        path = candidates(directory.checkpoints, None)[0]
        before = [float(loss) for loss in read_state(path, read_manifest(path)).extra["losses"]]
    return [committed[version] if version in committed else before[version] for version in range(step)]


def last_states(records: Sequence[Record], stages: int) -> tuple[Key, ...]:
    """Where the states everybody should have are, or will be, stored; none where no step was made."""
    history = replay(records)
    version, saved, origin = history.version, history.checkpoint, history.origin
    epoch = origin.epoch if origin is not None else 0
    if saved is not None and saved.version == version:
        epoch = saved.epoch
    elif origin is not None and origin.version == version:
        epoch = origin.from_epoch
    return tuple(Key(epoch, version, stage) for stage in range(stages if version else 0))


async def all_stored(states: States, keys: Sequence[Key]) -> bool:
    """Whether all of these are there."""
    return all([await states.exists(key) for key in keys])


def check_journal(directory: RunDirectory) -> None:
    """JobFailedError where a run's journal, on this machine's disk, cannot be read. Nothing is changed."""
    path = directory.path / JOURNAL
    try:
        read_records(path.read_bytes() if path.exists() else b"")
    except AtollError as error:
        raise JobFailedError(f"{path}: {error}") from error
