"""Checkpointer: saves while training goes on, and loads under any other plan. The package's text says how to use it. SavePolicy: when."""

import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.errors import AtollError, CheckpointError, JobFailedError
from atoll.events import CheckpointFailed, CheckpointIntervalChosen, CheckpointSaved
from atoll.plan.checkpoint_interval import CheckpointInterval, checkpoint_interval
from atoll.runtime.checkpoint.assignment import Agreement, Assigned, of_rank, outlines
from atoll.runtime.checkpoint.directory import commit, keep_as, partial_path, prune, step_path, tidy
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.loading import Loaded, load_from
from atoll.runtime.checkpoint.local_shard import LocalShard, Piece, pieces
from atoll.runtime.checkpoint.manifest import (
    MODEL,
    Index,
    Rebuilt,
    RunIdentity,
    SmallState,
    StoredTensor,
    make_manifest,
    merge_small,
    write_description,
)
from atoll.runtime.checkpoint.rebuilt import OwnPart, digests, own_digests, own_part
from atoll.runtime.checkpoint.rectangles import intersect
from atoll.runtime.checkpoint.storage import Written, write_pieces
from atoll.runtime.checkpoint.training_state import optimizer_state
from atoll.runtime.checkpoint.values import to_plain

__all__ = ["Checkpointer", "Outcome", "SavePolicy", "Staging"]

_GRACE_SECONDS = 10.0  # for a save under way when the run fails
_MARKED = 1.5  # another interval is told where it is so many times the one before, or less than that part of it


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank: `error` says why it failed, or is None."""

    step: int
    path: Path
    blocked_seconds: float  # training stood still
    seconds: float
    size_bytes: int = 0
    error: str | None = None
    changed: tuple[str, ...] = ()  # what was not to be stored, and must be: the next save does

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


class Staging:
    """Copies of what a rank is to write, in the CPU's memory, so that training goes on. Its buffers are used again for the next save."""

    def __init__(self) -> None:
        self._buffers: dict[Assigned, Tensor] = {}

    def copy(self, pieces: Sequence[Piece], assigned: Sequence[Assigned]) -> list[Piece]:
        """The assigned rectangles, copied out of the pieces that hold them. Training may go on when it returns."""
        by_key: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_key.setdefault(piece.key, []).append(piece)
        self._buffers = {one: self._buffer(one, by_key[one.key][0].view) for one in assigned}
        copies = []
        for one in assigned:
            source = by_key[one.key][0]
            for piece in by_key[one.key]:
                self._copy(one, piece)
            copies.append(Piece(one.key, source.shape, one.rectangle, self._buffers[one]))
        if any(piece.view.device.type != "cpu" for piece in pieces):
            torch.accelerator.synchronize()  # the copies were only queued
        return copies

    def _buffer(self, one: Assigned, like: Tensor) -> Tensor:
        known = self._buffers.get(one)
        if known is not None and known.dtype == like.dtype:
            return known
        return torch.empty(one.rectangle.sizes, dtype=like.dtype, pin_memory=like.device.type == "cuda")

    def _copy(self, one: Assigned, piece: Piece) -> None:
        common = intersect(one.rectangle, piece.rectangle)
        if common is not None:
            target = self._buffers[one][common.relative_to(one.rectangle).slices()]
            target.copy_(piece.view[common.relative_to(piece.rectangle).slices()], non_blocking=True)


class _Report(msgspec.Struct):
    """What a rank says after writing its part."""

    written: Written | None
    error: str | None
    small: SmallState
    rebuilt: dict[str, int] = {}  # its part of the digests of what is left out


class _Verdict(msgspec.Struct):
    error: str | None
    size_bytes: int
    changed: tuple[str, ...] = ()


class Checkpointer:
    """A run's checkpoints in a directory that all ranks see. Every method but `finished` and `tried` must be called by all ranks alike.

    `group` must be a Gloo group of all ranks that nothing else uses, since a save talks through it from its own thread; None: this
    process alone. Making a Checkpointer removes what a crash left half-written in the directory.
    """

    def __init__(
        self,
        directory: Path,
        group: "dist.ProcessGroup | None" = None,
        *,
        identity: RunIdentity,
        keep_last: int | None = 2,
        rebuilt: Collection[str] = (),
    ) -> None:
        """What is `rebuilt`, by name, is not stored: the job makes it again and training never changes it. Where it does all the same,
        that is found out, and it is stored. `load` must be called before the first step, also where there is nothing to load."""
        assert keep_last is None or keep_last >= 1
        self.directory, self.identity, self.keep_last = directory, identity, keep_last
        self._ranks = CheckpointRanks(group)
        self._staging = Staging()
        self._agreement = Agreement(self._ranks)
        self._left_out = set(rebuilt)
        self._whole = Agreement(self._ranks)  # on who digests what of that
        self._made: Mapping[str, Rebuilt] | None = None  # as the job made it
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._finished: list[Outcome] = []
        self._last_saved: int | None = None
        self._last_tried: int | None = None
        self._prepare_directory()

    def save(
        self,
        step: int,
        tensors: Sequence[LocalShard],
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        final: bool = False,
        keep: str | None = None,
    ) -> None:
        """Save the state after `step` steps. Returns when it is copied; a thread writes it. Under a name to `keep`, it is not removed
        before another is kept under that name.

        A save still under way is waited for first: skipping would need the ranks to agree on who is late, and would widen the gap between
        checkpoints exactly when the disk is slow. What goes wrong is an `Outcome` in `finished` and the run goes on, except with
        `final`: then it returns only when the checkpoint is in place, and raises `JobFailedError` when it could not be put there.
        """
        began = time.perf_counter()
        self.wait()
        if self._last_saved == step and keep is not None and self._ranks.rank == 0:
            keep_as(self.directory, keep, step)
        failed = None
        if self._last_saved != step:
            self._last_tried = step
            failed = self._start(began, step, tensors, optimizers, extra or {}, keep, at_once=final)
        self._finished.extend([failed] if failed else [])
        if final:
            outcome = failed or self.wait()
            if outcome is not None and outcome.changed:
                self._start(began, step, tensors, optimizers, extra or {}, keep, at_once=True)
                outcome = self.wait()
            if outcome is not None and outcome.error is not None:
                raise JobFailedError(f"step {step}: the last checkpoint could not be saved: {outcome.error}")

    def wait(self) -> Outcome | None:
        """Wait for the save under way, if there is one, and say how it ended."""
        if self._thread is None:
            return None
        if self._thread.ident is not None:  # else it was written at once
            self._thread.join()
        self._thread = None
        outcome = self._outcome
        assert outcome is not None, "the thread that writes a checkpoint ended without a word"
        self._finished.append(outcome)
        self._last_saved = outcome.step if outcome.error is None else self._last_saved
        self._left_out -= set(outcome.changed)
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
    ) -> Loaded | None:
        """Fill the tensors and the optimizers from the checkpoint of `step`, or the latest; None when there is none.

        The ranks together compare every stored byte with its checksum, and what is not stored with its digest. On an error every rank
        raises it, and the tensors may hold part of what was stored.
        """
        self.wait()
        loaded = load_from(self._ranks, self.directory, self.identity, tensors, optimizers, step)
        if loaded is not None:
            self._left_out &= loaded.rebuilt.keys()  # what was stored may be other than what the job makes: it stays stored
            self._made = loaded.rebuilt
        elif self._made is None and self._left_out:
            part = own_part(self._whole, [held for held in tensors if held.name in self._left_out])
            self._made = digests(self._whole, self._ranks.gather(own_digests(part), dict[str, int]))
        self._last_saved = self._last_tried = None if loaded is None or step is not None else loaded.step
        return loaded

    def tried(self, step: int) -> bool:
        """Whether that step was saved, or could not be."""
        return step == self._last_tried

    def replace_next(self) -> None:
        """Save anew what is asked for next, though its step may be saved: there is more to say of it by now."""
        self._last_saved = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # what is being saved is good, but another rank may be gone and never answer
            self._thread.join(_GRACE_SECONDS)

    def _start(
        self,
        began: float,
        step: int,
        tensors: Sequence[LocalShard],
        optimizers: Sequence[torch.optim.Optimizer],
        extra: Mapping[str, Any],
        keep: str | None,
        *,
        at_once: bool,
    ) -> Outcome | None:
        """Agree with the other ranks who writes what, copy it and start writing. An Outcome when that failed.

        `at_once`: it is written when this returns, without a thread, which Python does not start while a script ends.
        """
        path, mine, held, state, plain, problem = step_path(self.directory, step), [], {}, None, {}, None
        try:
            state = optimizer_state(optimizers, tensors)
            keyed = [(MODEL + part.name, part) for part in tensors if part.name not in self._left_out] + state.tensors
            mine = pieces(keyed)
            held = outlines(keyed, mine)
            plain = {key: to_plain(value, key) for key, value in extra.items()}
            if self._ranks.rank == 0:  # makes an empty directory to write into; the others hear of it when they agree
                partial = partial_path(self.directory, step)
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir()
        except (AtollError, OSError) as error:
            problem = _explain(path, error)
        try:
            assigned = self._agreement.reach(held, problem)
            left_out = own_part(self._whole, [part for part in tensors if part.name in self._left_out]) if self._left_out else []
        except CheckpointError as error:
            return Outcome(step, path, time.perf_counter() - began, time.perf_counter() - began, error=str(error))
        assert state is not None  # else there was a problem
        copies, small = self._staging.copy(mine, assigned), state.small
        self._outcome, blocked = None, time.perf_counter() - began

        def write() -> None:
            verdict = self._save_copies(step, copies, small, plain, keep, left_out)
            self._outcome = Outcome(
                step, path, blocked, time.perf_counter() - began, verdict.size_bytes, verdict.error, tuple(verdict.changed)
            )

        self._thread = threading.Thread(target=write, name=f"checkpoint of step {step}", daemon=True)
        write() if at_once else self._thread.start()
        return None

    def _save_copies(
        self, step: int, copies: Sequence[Piece], small: SmallState, extra: dict[str, Any], keep: str | None, left_out: OwnPart
    ) -> _Verdict:
        """Called in its own thread, on every rank. All ranks get the same answer, unless one of them is gone."""
        partial = partial_path(self.directory, step)
        try:
            report = _Report(write_pieces(partial, self._ranks.rank, copies), None, small, own_digests(left_out))
        except Exception as error:  # the other ranks wait for this report, whatever happened
            report = _Report(None, _explain(partial, error), SmallState())
        try:
            reports = self._ranks.gather(report, _Report)
            verdict = self._conclude(step, reports, extra, keep) if self._ranks.rank == 0 else _Verdict(None, 0)
            return self._ranks.gather(verdict, _Verdict)[0]
        except RuntimeError as error:  # what torch.distributed raises
            return _Verdict(f"{step_path(self.directory, step)}: another rank is gone: {error}", 0)

    def _conclude(self, step: int, reports: Sequence[_Report], extra: dict[str, Any], keep: str | None) -> _Verdict:
        """Rank 0 puts the checkpoint in place, or removes what there is of it."""
        partial = partial_path(self.directory, step)
        errors = [of_rank(rank, len(reports), report.error) for rank, report in enumerate(reports) if report.error is not None]
        changed: list[str] = []
        try:
            if not errors and self._left_out:
                assert self._made is not None, "load is called before the first step"
                found = digests(self._whole, [report.rebuilt for report in reports])
                changed = [name for name in sorted(self._left_out) if found[name] != self._made[name]]
                if changed:
                    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                    errors = [f"{changed[0]!r}{more} changed, which is not trained; from the next checkpoint on it is stored"]
            if not errors:
                return _Verdict(None, self._commit(step, [report.written for report in reports if report.written], reports, extra, keep))
        except Exception as error:  # the other ranks wait for this, too
            errors = [_explain(partial, error)]
        shutil.rmtree(partial, ignore_errors=True)
        return _Verdict(errors[0], 0, tuple(changed))

    def _commit(self, step: int, written: Sequence[Written], reports: Sequence[_Report], extra: dict[str, Any], keep: str | None) -> int:
        tensors = {
            key: StoredTensor(
                shape=outline.shape, dtype=outline.dtype, chunks=tuple(chunk for part in written for chunk in part.chunks.get(key, ()))
            )
            for key, outline in sorted(self._agreement.everything.items())
        }
        made = {name: self._made[name] for name in sorted(self._left_out)} if self._made is not None else {}
        index = Index(tensors=tensors, files={name: file for part in written for name, file in part.files.items()}, rebuilt=made)
        manifest = make_manifest(step, self.identity, index, self._ranks.count)
        write_description(partial_path(self.directory, step), manifest, index, merge_small([report.small for report in reports], extra))
        commit(self.directory, step)
        if keep is not None:
            keep_as(self.directory, keep, step)
        if self.keep_last is not None:
            with suppress(OSError):  # one too many is no reason to fail; the next save tries again
                prune(self.directory, step, self.keep_last)
        return sum(file.size_bytes for file in index.files.values())

    def _prepare_directory(self) -> None:
        """Rank 0 makes and tidies the directory before any rank goes on."""
        problem = None
        if self._ranks.rank == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                tidy(self.directory)
            except OSError as error:
                problem = _explain(self.directory, error)
        problem = self._ranks.gather(problem, str | None)[0]  # type: ignore[arg-type]
        if problem is not None:
            raise CheckpointError(problem)


def _explain(path: Path, error: Exception) -> str:
    """An error while writing as a sentence."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: cannot write it: {error.strerror or error}"
    return f"{path}: {error}" if isinstance(error, CheckpointError) else f"{path}: cannot write it: {type(error).__name__}: {error}"


class SavePolicy:
    """Says after which steps to save: as told, or by what saving costs and how often something fails. `moment` is the caller's own time.

    Where ranks save together one of them is asked and tells the others, since their clocks differ; `ask_again` says when next.
    """

    def __init__(self, every: int | None, *, step: int, moment: float, failures_per_hour: float | None = None) -> None:
        self.every, self.failures_per_hour = every, failures_per_hour
        self._save_seconds = 0.0  # that the last one took; not known before the first
        self._began, self._saved_at, self._saving = (step, moment), step, False
        self._told: int | None = None  # the interval, in steps, that was last told

    def begun(self, step: int) -> None:
        """A save of that step is under way."""
        self._saved_at, self._saving = step, True

    def ended(self, seconds: float) -> None:
        """It took so long, whatever became of it."""
        self._save_seconds, self._saving = seconds, False

    def due(self, step: int, moment: float) -> bool:
        """Whether to save after this step."""
        if self.every is not None:
            return step % self.every == 0
        return not self._saving and step >= self._saved_at + self._interval(step, moment).steps

    def ask_again(self, step: int, moment: float) -> int:
        """The step after which `due` may hold next. It is looked at while speeds may still be learnt, so at most at twice the steps."""
        if self.every is not None:
            return step - step % self.every + self.every
        made = step - self._began[0]
        return max(step + 1, min(self._saved_at + self._interval(step, moment).steps, step + made))

    def decision(self, step: int, moment: float) -> CheckpointIntervalChosen | None:
        """How often it saves from now on, where that is markedly another interval than was last told."""
        if self.every is not None:
            return None
        chosen = self._interval(step, moment)
        if self._told is not None and 1 / _MARKED < chosen.steps / self._told < _MARKED:
            return None
        self._told = chosen.steps
        return CheckpointIntervalChosen(at_seconds=moment, steps=chosen.steps, reason=chosen.reason)

    def _interval(self, step: int, moment: float) -> CheckpointInterval:
        made = max(step - self._began[0], 1)
        return checkpoint_interval(self._save_seconds, self.failures_per_hour, (moment - self._began[1]) / made)
