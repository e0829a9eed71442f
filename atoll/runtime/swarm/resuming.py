"""Resuming: a swarm run that goes on where it was. What was committed is in the journal; states come from the checkpoint, or from workers
that are still there.
"""

import asyncio
from pathlib import Path

import msgspec

from atoll.control.journal import Epoch, Term, replay
from atoll.errors import PlanError
from atoll.runtime.swarm.files import FileJournal
from atoll.runtime.swarm.spec import SwarmSpec

__all__ = ["Resumed", "check_same_stages", "continue_journal"]


class Resumed(msgspec.Struct, frozen=True):
    """Where a run goes on."""

    committed: int  # steps
    checkpoint: int  # steps, of the last checkpoint
    starts: int  # coordinators there were before


def continue_journal(path: Path) -> Resumed | None:
    """Prepares a run's journal for those who start now; None where nothing was begun.

    Where the last checkpoint is of the last commit, everybody begins from it at once, under a new epoch. Otherwise nothing is decided here:
    workers may still be out there with the newest state, and the coordinator waits for them before it goes back to the checkpoint.
    """
    if not path.exists():
        return None
    journal = FileJournal(path)
    history = replay(asyncio.run(journal.read()))
    if history.origin is None:
        return None
    saved = history.checkpoint
    if saved is not None and (saved.epoch, saved.version) == (history.origin.epoch, history.version):
        asyncio.run(_begin_epoch(journal, history.term + 1, Epoch(history.origin.epoch + 1, saved.version, saved.epoch)))
    return Resumed(history.version, saved.version if saved is not None else 0, history.term)


async def _begin_epoch(journal: FileJournal, term: int, epoch: Epoch) -> None:
    await journal.append(term, Term(term))
    await journal.append(term, epoch)


def check_same_stages(before: SwarmSpec, now: SwarmSpec) -> None:
    """PlanError where stored states are of other stages."""
    if before.bounds != now.bounds:
        raise PlanError(
            f"--resume: the run's states are of stages that begin at layers {_words(before)}, the plan's stages begin at {_words(now)}; "
            "leave out --plan and --cluster to go on with the plan it had"
        )


def _words(spec: SwarmSpec) -> str:
    return ", ".join(map(str, spec.bounds[:-1]))
