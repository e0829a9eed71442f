"""Loading: from whatever layout a checkpoint was written in to whatever layout is asked for, with every mismatch named."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.directory import find
from atoll.runtime.checkpoint.exchange import Ranks
from atoll.runtime.checkpoint.held import Held, Keyed, pieces
from atoll.runtime.checkpoint.manifest import (
    MODEL,
    Chunk,
    Index,
    Manifest,
    RunIdentity,
    differences,
    model_shapes,
    read_index,
    read_manifest,
    read_state,
)
from atoll.runtime.checkpoint.optimizer_state import allocate_state, restore_groups
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces
from atoll.runtime.checkpoint.values import from_plain

__all__ = ["Loaded", "check_fits", "load_from", "some"]


@dataclass(frozen=True)
class Loaded:
    """What was loaded besides tensors."""

    step: int
    path: Path
    manifest: Manifest
    extra: dict[str, Any]
    differences: tuple[str, ...]  # what has changed since, but may: sentences


class _Said(msgspec.Struct):
    """What a rank says to the others: a path, names, or what went wrong."""

    error: str | None = None
    path: str | None = None
    names: list[str] = []


def load_from(
    ranks: Ranks,
    directory: Path,
    identity: RunIdentity,
    tensors: Sequence[Held],
    optimizers: Sequence[torch.optim.Optimizer],
    step: int | None,
    check: bool,
) -> Loaded | None:
    """Fill the tensors and optimizers from a checkpoint; None when the directory has none. When a rank fails, every rank raises."""
    path = _agreed_path(ranks, directory, step)
    if path is None:
        return None
    task = _Task(ranks, path, identity, tensors, optimizers, check)
    try:
        loaded, error = task.run(), None
    except CheckpointError as caught:
        loaded, error = None, str(caught)
    heard = ranks.gather(_Said(error, names=[held.name for held in tensors]), _Said)
    for said in heard:
        if said.error is not None:
            raise CheckpointError(said.error)
    assert loaded is not None
    _check_nothing_is_left(loaded, task.index, heard)
    return loaded


def _agreed_path(ranks: Ranks, directory: Path, step: int | None) -> Path | None:
    """The checkpoint that rank 0 sees: all must read the same."""
    said = _Said()
    if ranks.rank == 0:
        try:
            found = find(directory, step)
            said.path = None if found is None else str(found)
        except CheckpointError as error:
            said.error = str(error)
    heard = ranks.gather(said, _Said)[0]
    if heard.error is not None:
        raise CheckpointError(heard.error)
    return None if heard.path is None else Path(heard.path)


class _Task:
    """One rank's part of loading."""

    def __init__(
        self,
        ranks: Ranks,
        path: Path,
        identity: RunIdentity,
        tensors: Sequence[Held],
        optimizers: Sequence[torch.optim.Optimizer],
        check: bool,
    ) -> None:
        self.ranks, self.path, self.identity, self.check = ranks, path, identity, check
        self.tensors, self.optimizers = tensors, optimizers
        self.index = Index(tensors={}, files={})

    def run(self) -> Loaded:
        manifest = read_manifest(self.path)
        if manifest.run.optimizer != self.identity.optimizer and self.optimizers:
            raise CheckpointError(
                f"{self.path}: it was saved with the optimizer {manifest.run.optimizer} and the job has {self.identity.optimizer}; "
                "start from its exported weights to change the optimizer"
            )
        self.index, small = read_index(self.path, manifest), read_state(self.path, manifest)
        room, put = allocate_state(self.optimizers, self.tensors, self.index, small)
        keyed = [(MODEL + held.name, held) for held in self.tensors] + room
        check_fits(self.path, self.index, keyed)
        read_pieces(self.path, self.index, pieces(keyed))
        if self.check:
            check_chunks(self.path, self.index, _share(self.index, self.ranks))
        extra = {key: from_plain(value, f"{self.path}: extra.{key}") for key, value in small.extra.items()}
        put()
        restore_groups(self.optimizers, self.tensors, small)
        return Loaded(manifest.step, self.path, manifest, extra, differences(manifest.run, self.identity))


def _share(index: Index, ranks: Ranks) -> Iterable[tuple[str, Chunk]]:
    """The chunks this rank checks: all ranks together check every one, each about as many bytes."""
    chunks = [(key, chunk) for key, tensor in index.tensors.items() for chunk in tensor.chunks]
    chunks.sort(key=lambda entry: -entry[1].rectangle.elements * DTYPES[index.tensors[entry[0]].dtype].itemsize)
    return chunks[ranks.rank :: ranks.count]


def check_fits(path: Path, index: Index, wanted: Sequence[Keyed], any_dtype: bool = False) -> None:
    """That everything wanted is there, in the right shape and dtype."""
    missing = [key for key, _ in wanted if key not in index.tensors]
    if missing:
        raise CheckpointError(f"{path}: it does not have {some(missing)}")
    for key, held in wanted:
        stored = index.tensors[key]
        if stored.shape != held.holding.shape:
            raise CheckpointError(f"{path}: {key!r} has the shape {list(stored.shape)} there and {list(held.holding.shape)} in the job")
        if DTYPES[stored.dtype] != held.tensor.dtype and not any_dtype:
            raise CheckpointError(f"{path}: {key!r} is {DTYPES[stored.dtype]} there and {held.tensor.dtype} in the job")


def some(names: Sequence[str]) -> str:
    """A few of the names, and how many more."""
    shown = ", ".join(repr(name.removeprefix(MODEL)) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_nothing_is_left(loaded: Loaded, index: Index, heard: Sequence[_Said]) -> None:
    wanted = {name for said in heard for name in said.names}
    extra = [name for name in model_shapes(index) if name not in wanted]
    if extra:
        raise CheckpointError(f"{loaded.path}: it has {some(extra)}, which the job's model has not")
