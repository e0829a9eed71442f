"""Resuming: a swarm run that goes on where it was. What was committed is in the journal; states come from the checkpoint, or from workers
that are still there.
"""

from collections.abc import Sequence

import msgspec

from atoll.control.journal import Checkpointed, Epoch, Record, Term, decode, replay
from atoll.control.settings import Settings
from atoll.control.world import Journal
from atoll.errors import AtollError, JobFailedError, PlanError
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.files import CheckpointFiles, FileJournal, Key, States
from atoll.runtime.swarm.jetstream import connect_jetstream
from atoll.runtime.swarm.run_files import JOURNAL, STATES

__all__ = ["Resumed", "all_stored", "check_files", "check_same_stages", "continue_journal", "continue_run", "last_states"]


class Resumed(msgspec.Struct, frozen=True):
    """Where a run goes on."""

    committed: int  # steps
    checkpoint: int  # steps, of the last checkpoint
    lost: bool = False  # the last step's states are nowhere: it goes on from the checkpoint


async def continue_run(directory: RunDirectory, servers: str | None, run: str, settings: Settings) -> Resumed | None:
    """As `continue_journal`, wherever the run's journal and states are."""
    if servers is None:
        return await continue_journal(FileJournal(directory.path / JOURNAL), CheckpointFiles(directory.path / STATES), settings)
    async with connect_jetstream(servers, run, "atoll run") as kept:
        await kept.checkpoints.reopen()
        return await continue_journal(kept.journal, kept.checkpoints, settings)


async def continue_journal(journal: Journal, states: States, settings: Settings) -> Resumed | None:
    """Prepares a run's journal for those who start now; None where nothing was begun.

    Where the last checkpoint is of the last commit, everybody begins from it at once, under a new epoch. So it is where the last step was
    made and its states were lost with those who had them: nobody would make it again otherwise. Else nothing is decided here: workers may
    still be out there with the newest state, and the coordinator waits for them before it goes back to the checkpoint.
    """
    records = await journal.read()
    history = replay(records)
    if history.origin is None:
        return None
    saved, committed = history.checkpoint or Checkpointed(0, 0), history.version
    at_its_checkpoint = (saved.epoch, saved.version) == (history.origin.epoch, committed) and history.checkpoint is not None
    lost = committed >= settings.steps and not await all_stored(states, last_states(records, settings.stages))
    if at_its_checkpoint or lost:
        await journal.append(history.term + 1, Term(history.term + 1))
        await journal.append(history.term + 1, Epoch(history.origin.epoch + 1, saved.version, saved.epoch))
    return Resumed(committed, saved.version, lost)


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


def check_same_stages(before: Sequence[int], now: Sequence[int]) -> None:
    """PlanError where stored states are of other stages, by their bounds."""
    if tuple(before) != tuple(now):
        raise PlanError(
            f"--resume: the run's states are of stages that begin at layers {_words(before)}, the plan's stages begin at {_words(now)}; "
            "leave out --plan and --cluster to go on with the plan it had"
        )


def check_files(directory: RunDirectory, stages: int) -> None:
    """JobFailedError where a run's journal and states, on this machine's disk, do not fit together. Nothing is changed."""
    path = directory.path / JOURNAL
    try:
        history = replay(decode(path.read_bytes())[0]) if path.exists() else replay(())
    except AtollError as error:
        raise JobFailedError(f"{path}: {error}") from error
    files = CheckpointFiles(directory.path / STATES)
    newest = files.newest(history.origin.epoch if history.origin is not None else 0)
    if newest > history.version:
        raise JobFailedError(
            f"{path}: tells of {history.version} steps, but there are states after {newest} in {directory.path / STATES}; "
            "restore the journal from a copy, or begin another run"
        )
    saved = history.checkpoint
    for stage in range(stages if saved is not None else 0):
        assert saved is not None
        key = Key(saved.epoch, saved.version, stage)
        if not files.is_whole(key):
            raise JobFailedError(f"{files.path(key)}: is damaged or missing, and nothing newer is stored; restore it from a copy")


def _words(bounds: Sequence[int]) -> str:
    return ", ".join(map(str, bounds[:-1]))
