"""Saving: agreeing on who writes what, then, in the background, writing, reporting and putting the checkpoint in place."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.assignment import Assigned, Outline, assign
from atoll.runtime.checkpoint.directory import commit, partial_path, prune, step_path
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import Keyed, Piece
from atoll.runtime.checkpoint.manifest import (
    Index,
    RunIdentity,
    SmallState,
    StoredTensor,
    make_manifest,
    merge_small,
    write_description,
)
from atoll.runtime.checkpoint.rectangles import intersect
from atoll.runtime.checkpoint.safetensors_file import DTYPES, dtype_name
from atoll.runtime.checkpoint.storage import Written, write_pieces

__all__ = ["Agreement", "Background", "Staging", "explain", "outlines"]


def outlines(tensors: Sequence[Keyed], mine: Sequence[Piece]) -> dict[str, Outline]:
    """What this rank holds, for the others to know."""
    rectangles: dict[str, list[Any]] = {key: [] for key, _ in tensors}
    for piece in mine:
        rectangles[piece.key].append(piece.rectangle)
    return {
        key: Outline(shape=held.holding.shape, dtype=dtype_name(held.tensor.dtype, key), rectangles=tuple(rectangles[key]))
        for key, held in tensors
    }


class _Greeting(msgspec.Struct):
    """What a rank says before a save: a hash of what it holds, or why it cannot take part."""

    digest: str
    problem: str | None


class Agreement:
    """Who writes what. It is worked out when a rank's holdings change, and remembered."""

    def __init__(self, ranks: CheckpointRanks) -> None:
        self._ranks = ranks
        self._digests: list[str] = []
        self._mine: list[Assigned] = []
        self.everything: dict[str, Outline] = {}  # what there is to save on all ranks, without rectangles

    def reach(self, mine: Mapping[str, Outline], problem: str | None) -> list[Assigned]:
        """What this rank is to write. When any rank has a problem, every rank raises it."""
        digest = hashlib.sha256(msgspec.json.encode(dict(mine), order="sorted")).hexdigest()
        greetings = self._ranks.gather(_Greeting(digest, problem), _Greeting)
        for rank, greeting in enumerate(greetings):
            if greeting.problem is not None:
                raise CheckpointError(_of_rank(rank, len(greetings), greeting.problem))
        if self._digests != [greeting.digest for greeting in greetings]:
            layouts = self._ranks.gather(dict(mine), dict[str, Outline])
            sizes = {key: DTYPES[outline.dtype].itemsize for layout in layouts for key, outline in layout.items()}
            self._mine = assign(layouts, sizes)[self._ranks.rank]
            self.everything = {key: replace(outline, rectangles=()) for layout in layouts for key, outline in layout.items()}
            self._digests = [greeting.digest for greeting in greetings]
        return self._mine


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


class _Verdict(msgspec.Struct):
    error: str | None
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Background:
    """A save that has been copied and is to be written. `run` is called in its own thread, on every rank."""

    ranks: CheckpointRanks
    directory: Path
    step: int
    identity: RunIdentity
    copies: Sequence[Piece]
    everything: Mapping[str, Outline]  # on all ranks
    small: SmallState
    extra: dict[str, Any]
    keep_last: int | None

    def run(self) -> tuple[str | None, int]:
        """Why it failed, or None; and how many bytes the checkpoint has. All ranks get the same answer, unless one of them is gone."""
        try:
            reports = self.ranks.gather(self._write(), _Report)
            verdicts = self.ranks.gather(self._conclude(reports), _Verdict)
        except RuntimeError as error:  # what torch.distributed raises
            return f"{step_path(self.directory, self.step)}: another rank is gone: {error}", 0
        return verdicts[0].error, verdicts[0].size_bytes

    def _write(self) -> _Report:
        partial = partial_path(self.directory, self.step)
        try:
            written = write_pieces(partial, self.ranks.rank, self.copies)
        except Exception as error:  # the other ranks wait for this report, whatever happened
            return _Report(None, explain(partial, error), SmallState())
        return _Report(written, None, self.small)

    def _conclude(self, reports: Sequence[_Report]) -> _Verdict:
        """Rank 0 puts the checkpoint in place, or removes what there is of it; the others leave it to that."""
        if self.ranks.rank != 0:
            return _Verdict(None, 0)
        partial = partial_path(self.directory, self.step)
        errors = [_of_rank(rank, len(reports), report.error) for rank, report in enumerate(reports) if report.error is not None]
        try:
            if not errors:
                return _Verdict(None, self._commit(partial, reports))
        except Exception as error:  # as above
            errors = [explain(partial, error)]
        shutil.rmtree(partial, ignore_errors=True)
        return _Verdict(errors[0], 0)

    def _commit(self, partial: Path, reports: Sequence[_Report]) -> int:
        index = self._index(reports)
        manifest = make_manifest(self.step, self.identity, index, self.ranks.count)
        write_description(partial, manifest, index, merge_small([report.small for report in reports], self.extra))
        commit(self.directory, self.step)
        if self.keep_last is not None:
            with suppress(OSError):  # one too many is no reason to fail; the next save tries again
                prune(self.directory, self.step, self.keep_last)
        return sum(file.size_bytes for file in index.files.values())

    def _index(self, reports: Sequence[_Report]) -> Index:
        written = [report.written for report in reports if report.written is not None]
        tensors = {
            key: StoredTensor(
                shape=outline.shape, dtype=outline.dtype, chunks=tuple(chunk for part in written for chunk in part.chunks.get(key, ()))
            )
            for key, outline in sorted(self.everything.items())
        }
        return Index(tensors=tensors, files={name: file for part in written for name, file in part.files.items()})


def _of_rank(rank: int, count: int, text: str) -> str:
    return text if count == 1 else f"rank {rank}: {text}"


def explain(path: Path, error: Exception) -> str:
    """An error while writing as a sentence."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: cannot write it: {error.strerror or error}"
    return f"{path}: {error}" if isinstance(error, CheckpointError) else f"{path}: cannot write it: {type(error).__name__}: {error}"
