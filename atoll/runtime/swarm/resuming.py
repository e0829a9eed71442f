"""Resuming: a swarm run that goes on where it was. What was committed is in the journal; states come from the checkpoint, or from workers
that are still there.
"""

import msgspec

from atoll.control.journal import Epoch, Term, replay
from atoll.control.world import Journal
from atoll.errors import PlanError
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.files import FileJournal
from atoll.runtime.swarm.jetstream import connect_jetstream
from atoll.runtime.swarm.run_files import JOURNAL
from atoll.runtime.swarm.spec import SwarmSpec

__all__ = ["Resumed", "check_same_stages", "continue_journal", "continue_run"]


class Resumed(msgspec.Struct, frozen=True):
    """Where a run goes on."""

    committed: int  # steps
    checkpoint: int  # steps, of the last checkpoint


async def continue_run(directory: RunDirectory, servers: str | None, run: str) -> Resumed | None:
    """As `continue_journal`, wherever the run's journal is."""
    if servers is None:
        return await continue_journal(FileJournal(directory.path / JOURNAL))
    async with connect_jetstream(servers, run, "atoll run") as kept:
        await kept.checkpoints.reopen()
        return await continue_journal(kept.journal)


async def continue_journal(journal: Journal) -> Resumed | None:
    """Prepares a run's journal for those who start now; None where nothing was begun.

    Where the last checkpoint is of the last commit, everybody begins from it at once, under a new epoch. Otherwise nothing is decided here:
    workers may still be out there with the newest state, and the coordinator waits for them before it goes back to the checkpoint.
    """
    history = replay(await journal.read())
    if history.origin is None:
        return None
    saved = history.checkpoint
    if saved is not None and (saved.epoch, saved.version) == (history.origin.epoch, history.version):
        await journal.append(history.term + 1, Term(history.term + 1))
        await journal.append(history.term + 1, Epoch(history.origin.epoch + 1, saved.version, saved.epoch))
    return Resumed(history.version, saved.version if saved is not None else 0)


def check_same_stages(before: SwarmSpec, now: SwarmSpec) -> None:
    """PlanError where stored states are of other stages."""
    if before.bounds != now.bounds:
        raise PlanError(
            f"--resume: the run's states are of stages that begin at layers {_words(before)}, the plan's stages begin at {_words(now)}; "
            "leave out --plan and --cluster to go on with the plan it had"
        )


def _words(spec: SwarmSpec) -> str:
    return ", ".join(map(str, spec.bounds[:-1]))
