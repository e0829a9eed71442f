"""Loading: from whatever layout a checkpoint was written in to whatever layout is asked for, with every mismatch named."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.errors import CheckpointError, DamagedCheckpointError
from atoll.events import CheckpointRestored
from atoll.runtime.checkpoint.assignment import Agreement
from atoll.runtime.checkpoint.directory import candidates, none_is_whole
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import Keyed, LocalShard, pieces
from atoll.runtime.checkpoint.manifest import (
    MODEL,
    Chunk,
    Index,
    Rebuilt,
    RunIdentity,
    differences,
    model_shapes,
    read_index,
    read_manifest,
    read_state,
)
from atoll.runtime.checkpoint.rebuilt import check_rebuilt, digests, own_digests, own_part
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces
from atoll.runtime.checkpoint.training_state import allocate_state, restore_groups
from atoll.runtime.checkpoint.values import from_plain
from atoll.weights import MatchedWeights

__all__ = ["Loaded", "fill_shards", "load_from"]


@dataclass(frozen=True)
class Loaded:
    """What was loaded besides tensors."""

    step: int
    path: Path
    extra: dict[str, Any]
    differences: tuple[str, ...]  # what has changed since, but may: sentences
    rebuilt: Mapping[str, Rebuilt] = field(default_factory=dict)  # what was left out: the job has made the same

    def event(self, at_seconds: float) -> CheckpointRestored:
        """It as something that happened in the run."""
        return CheckpointRestored(at_seconds=at_seconds, step=self.step, path=str(self.path), notes=self.differences)


class _Said(msgspec.Struct):
    """What a rank says to the others: paths, names, or what went wrong."""

    error: str | None = None
    damaged: bool = False  # and not something else
    paths: list[str] = []
    names: list[str] = []


def load_from(
    ranks: CheckpointRanks,
    directory: Path,
    identity: RunIdentity,
    tensors: Sequence[LocalShard],
    optimizers: Sequence[torch.optim.Optimizer],
    step: int | None,
) -> Loaded | None:
    """Fill the tensors and optimizers from a checkpoint; None when the directory has none. When a rank fails, every rank raises.

    Where the newest is damaged the newest whole one is taken, with a note; one that was asked for by its step must be whole.
    """
    names = [held.name for held in tensors]
    damage: list[tuple[Path, str]] = []
    for path in _agreed_paths(ranks, directory, step):
        said = _Said(names=names)
        try:
            loaded, index = _load(ranks, path, identity, tensors, optimizers)
        except CheckpointError as error:
            said.error, said.damaged = str(error), isinstance(error, DamagedCheckpointError)
        heard = ranks.gather(said, _Said)
        errors = [one for one in heard if one.error is not None]
        if not errors:
            _check_nothing_is_left(loaded, index, heard)
            _check_rebuilt(ranks, path, index, tensors)
            notes = [f"{bad.name} is damaged and was passed over: {why}" for bad, why in damage]
            return dataclasses.replace(loaded, differences=(*notes, *loaded.differences))
        worst = next((one for one in errors if not one.damaged), errors[0])
        if not worst.damaged:
            raise CheckpointError(worst.error or "")
        damage.append((path, worst.error or ""))
    if damage:
        raise none_is_whole([why for _, why in damage])
    return None


def fill_shards(weights: MatchedWeights, shards: Sequence[LocalShard]) -> None:
    """Read what the shards hold of the weights that a job begins with."""
    held = pieces([(shard.name, shard) for shard in shards])
    weights.fill([(piece.key, piece.rectangle.slices(), piece.view) for piece in held])


def _agreed_paths(ranks: CheckpointRanks, directory: Path, step: int | None) -> list[Path]:
    """The checkpoints that rank 0 sees: all must read the same."""
    said = _Said()
    if ranks.rank == 0:
        try:
            said.paths = [str(path) for path in candidates(directory, step)]
        except CheckpointError as error:
            said.error = str(error)
    heard = ranks.gather(said, _Said)[0]
    if heard.error is not None:
        raise CheckpointError(heard.error)
    return [Path(path) for path in heard.paths]


def _load(
    ranks: CheckpointRanks,
    path: Path,
    identity: RunIdentity,
    tensors: Sequence[LocalShard],
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[Loaded, Index]:
    """One rank's part of loading."""
    manifest = read_manifest(path)
    if manifest.run.optimizer != identity.optimizer and optimizers:
        raise CheckpointError(
            f"{path}: it was saved with the optimizer {manifest.run.optimizer} and the job has {identity.optimizer}; "
            "start from its exported weights to change the optimizer"
        )
    index, small = read_index(path, manifest), read_state(path, manifest)
    room, put = allocate_state(optimizers, tensors, index, small)
    keyed = [(MODEL + held.name, held) for held in tensors if held.name not in index.rebuilt] + room
    _check_fits(path, index, keyed)
    read_pieces(path, index, pieces(keyed))
    check_chunks(path, index, _share(index, ranks))
    extra = {key: from_plain(value, f"{path}: extra.{key}") for key, value in small.extra.items()}
    put()
    restore_groups(optimizers, tensors, small)
    return Loaded(manifest.step, path, extra, differences(manifest.run, identity), index.rebuilt), index


def _check_rebuilt(ranks: CheckpointRanks, path: Path, index: Index, tensors: Sequence[LocalShard]) -> None:
    """That the job has made what the checkpoint leaves out, and the same as then. All ranks call it together."""
    if index.rebuilt:
        agreement = Agreement(ranks)
        part = own_part(agreement, [held for held in tensors if held.name in index.rebuilt])
        check_rebuilt(str(path), index.rebuilt, digests(agreement, ranks.gather(own_digests(part), dict[str, int])))


def _share(index: Index, ranks: CheckpointRanks) -> Iterable[tuple[str, Chunk]]:
    """The chunks this rank checks: all ranks together check every one, each about as many bytes."""
    chunks = [(key, chunk) for key, tensor in index.tensors.items() for chunk in (*tensor.chunks, *tensor.copies)]
    chunks.sort(key=lambda entry: -entry[1].rectangle.elements * DTYPES[index.tensors[entry[0]].dtype].itemsize)
    return chunks[ranks.rank :: ranks.count]


def _check_fits(path: Path, index: Index, wanted: Sequence[Keyed]) -> None:
    """That everything wanted is there, in the right shape and dtype."""
    missing = [key for key, _ in wanted if key not in index.tensors]
    if missing:
        raise CheckpointError(f"{path}: it does not have {_some(missing)}")
    for key, held in wanted:
        stored = index.tensors[key]
        if stored.shape != held.holding.shape:
            raise CheckpointError(f"{path}: {key!r} has the shape {list(stored.shape)} there and {list(held.holding.shape)} in the job")
        if DTYPES[stored.dtype] != held.tensor.dtype:
            raise CheckpointError(f"{path}: {key!r} is {DTYPES[stored.dtype]} there and {held.tensor.dtype} in the job")


def _some(names: Sequence[str]) -> str:
    """A few of the names, and how many more."""
    shown = ", ".join(repr(name.removeprefix(MODEL)) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_nothing_is_left(loaded: Loaded, index: Index, heard: Sequence[_Said]) -> None:
    wanted = {name for said in heard for name in said.names}
    extra = [name for name in model_shapes(index) if name not in wanted]
    if extra:
        raise CheckpointError(f"{loaded.path}: it has {_some(extra)}, which the job's model has not")
