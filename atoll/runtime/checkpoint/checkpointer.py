"""Checkpointer: saves while training goes on, and loads under any other plan. The package's text says how to use it."""

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from atoll.errors import AtollError, CheckpointError, JobFailedError
from atoll.events import CheckpointFailed, CheckpointSaved
from atoll.runtime.checkpoint.assignment import Outline
from atoll.runtime.checkpoint.directory import partial_path, step_path, tidy
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.loading import Loaded, load_from
from atoll.runtime.checkpoint.local_shard import LocalShard, Piece, pieces
from atoll.runtime.checkpoint.manifest import MODEL, RunIdentity, SmallState
from atoll.runtime.checkpoint.optimizer_state import optimizer_state
from atoll.runtime.checkpoint.saving import Agreement, Background, Staging, explain, outlines
from atoll.runtime.checkpoint.values import to_plain

__all__ = ["Checkpointer", "Outcome"]

_GRACE_SECONDS = 10.0  # for a save under way when the run fails


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank: `error` says why it failed, or is None."""

    step: int
    path: Path
    blocked_seconds: float  # training stood still
    seconds: float
    size_bytes: int = 0
    error: str | None = None

    def event(self, at_seconds: float) -> CheckpointSaved | CheckpointFailed:
        """It as something that happened in the run."""
        if self.error is not None:
            return CheckpointFailed(at_seconds=at_seconds, step=self.step, message=self.error)
        return CheckpointSaved(
            at_seconds=at_seconds,
            step=self.step,
            path=str(self.path),
            size_bytes=self.size_bytes,
            blocked_seconds=self.blocked_seconds,
            seconds=self.seconds,
        )


@dataclass(frozen=True)
class _Content:
    """What a rank has to save."""

    pieces: list[Piece]
    outlines: dict[str, Outline]
    small: SmallState
    extra: dict[str, Any]


class Checkpointer:
    """A run's checkpoints in a directory that all ranks see. Every method but `finished` must be called by all ranks alike.

    `group` must be a Gloo group of all ranks that nothing else uses, since a save talks through it from its own thread; None: this
    process alone. Making a Checkpointer removes what a crash left half-written in the directory.
    """

    def __init__(
        self, directory: Path, group: "dist.ProcessGroup | None" = None, *, identity: RunIdentity, keep_last: int | None = 2
    ) -> None:
        assert keep_last is None or keep_last >= 1
        self.directory, self.identity, self.keep_last = directory, identity, keep_last
        self._ranks = CheckpointRanks(group)
        self._staging = Staging()
        self._agreement = Agreement(self._ranks)
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._finished: list[Outcome] = []
        self._last_saved: int | None = None
        self._prepare_directory()

    def save(
        self,
        step: int,
        tensors: Sequence[LocalShard],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        final: bool = False,
    ) -> None:
        """Save the state after `step` steps. Returns when it is copied; a thread writes it.

        A save still under way is waited for first: skipping would need the ranks to agree on who is late, and would widen the gap between
        checkpoints exactly when the disk is slow. What goes wrong is an `Outcome` in `finished` and the run goes on, except with
        `final`: then it returns only when the checkpoint is in place, and raises `JobFailedError` when it could not be put there.
        """
        began = time.perf_counter()
        self.wait()
        failed = None if self._last_saved == step else self._start(began, step, tensors, optimizers, extra or {})
        self._finished.extend([failed] if failed else [])
        if final:
            outcome = failed or self.wait()
            if outcome is not None and outcome.error is not None:
                raise JobFailedError(f"step {step}: the last checkpoint could not be saved: {outcome.error}")

    def wait(self) -> Outcome | None:
        """Wait for the save under way, if there is one, and say how it ended."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome = self._outcome
        assert outcome is not None, "the thread that writes a checkpoint ended without a word"
        self._finished.append(outcome)
        self._last_saved = outcome.step if outcome.error is None else self._last_saved
        return outcome

    def finished(self) -> list[Outcome]:
        """Saves that ended since the last call; never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        ended, self._finished = self._finished, []
        return ended

    def load(
        self,
        tensors: Sequence[LocalShard],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        step: int | None = None,
        check: bool = True,
    ) -> Loaded | None:
        """Fill the tensors and the optimizers from the checkpoint of `step`, or the latest; None when there is none.

        With `check` the ranks together compare every stored byte with its checksum. On an error every rank raises it, and the tensors
        may hold part of what was stored.
        """
        self.wait()
        loaded = load_from(self._ranks, self.directory, self.identity, tensors, optimizers, step, check)
        self._last_saved = None if loaded is None or step is not None else loaded.step
        return loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # what is being saved is good, but another rank may be gone and never answer
            self._thread.join(_GRACE_SECONDS)

    def _start(
        self, began: float, step: int, tensors: Sequence[LocalShard], optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any]
    ) -> Outcome | None:
        """Agree with the other ranks who writes what, copy it and start writing. An Outcome when that failed."""
        path = step_path(self.directory, step)
        content, problem = _Content([], {}, SmallState(), {}), None
        try:
            content = _content(tensors, optimizers, extra)
            self._prepare_step(step)
        except (AtollError, OSError) as error:
            problem = explain(path, error)
        try:
            assigned = self._agreement.reach(content.outlines, problem)
        except CheckpointError as error:
            return Outcome(step, path, time.perf_counter() - began, time.perf_counter() - began, error=str(error))
        task = Background(
            ranks=self._ranks,
            directory=self.directory,
            step=step,
            identity=self.identity,
            copies=self._staging.copy(content.pieces, assigned),
            everything=self._agreement.everything,
            small=content.small,
            extra=content.extra,
            keep_last=self.keep_last,
        )
        self._outcome, blocked = None, time.perf_counter() - began

        def write() -> None:
            error, size_bytes = task.run()
            self._outcome = Outcome(step, path, blocked, time.perf_counter() - began, size_bytes, error)

        self._thread = threading.Thread(target=write, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()
        return None

    def _prepare_directory(self) -> None:
        """Rank 0 makes and tidies the directory before any rank goes on."""
        problem = None
        if self._ranks.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                tidy(self.directory)
            except OSError as error:
                problem = explain(self.directory, error)
        problem = self._ranks.gather(problem, str | None)[0]  # type: ignore[arg-type]
        if problem is not None:
            raise CheckpointError(problem)

    def _prepare_step(self, step: int) -> None:
        """Rank 0 makes an empty directory to write into; the others hear of it when they agree."""
        if self._ranks.rank == 0:
            partial = partial_path(self.directory, step)
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()


def _content(tensors: Sequence[LocalShard], optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any]) -> _Content:
    state = optimizer_state(optimizers, tensors)
    keyed = [(MODEL + held.name, held) for held in tensors] + state.tensors
    mine = pieces(keyed)
    plain = {key: to_plain(value, key) for key, value in extra.items()}
    return _Content(mine, outlines(keyed, mine), state.small, plain)
