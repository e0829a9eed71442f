"""Export: a checkpoint as safetensors with the user's names, for plain PyTorch and transformers.

It goes block by block, so that the model may be larger than memory.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.manifest import MODEL, Index, StoredTensor
from atoll.runtime.checkpoint.rectangles import Rectangle, split_longest, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, raw_bytes, write_atomically, write_safetensors
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces
from atoll.runtime.checkpoint.weights import find_checkpoint, model_tensors

__all__ = ["Exported", "export"]

_BLOCK_BYTES = 64 * 2**20  # of a tensor in memory at a time
_LARGEST_FILE_BYTES = 5_000_000_000  # where Hugging Face divides


@dataclass(frozen=True)
class Exported:
    """What was written."""

    step: int
    files: tuple[Path, ...]  # safetensors, then JSON
    tensors: int
    size_bytes: int


def export(
    run: Path,
    to: Path,
    *,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
    largest_file_bytes: int = _LARGEST_FILE_BYTES,
) -> Exported:
    """Write a checkpoint's parameters and buffers to `to`: a file `….safetensors`, or a folder that gets `model.safetensors`.

    `run` is a run's directory, its folder of checkpoints or one checkpoint; `step` chooses another than the latest. Above
    `largest_file_bytes` there are several files and an index, as Hugging Face has them. Shared tensors are written under each of their
    names, so that a strict `load_state_dict` finds them. `config`, or in a folder the one the run was saved with, becomes `config.json`.
    """
    checkpoint = find_checkpoint(run, step)
    manifest, index = model_tensors(checkpoint)
    check_chunks(checkpoint, index, [(key, chunk) for key, stored in index.tensors.items() for chunk in stored.chunks])
    names = _names(index, manifest.run.tied)
    folder, stem = (to.parent, to.name.removesuffix(".safetensors")) if to.suffix == ".safetensors" else (to, "model")
    shards = _shards({name: index.tensors[key] for name, key in names.items()}, largest_file_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / _file_name(stem, number, len(shards)) for number in range(len(shards))]
        for path, shard in zip(files, shards, strict=True):
            _write_file(path, checkpoint, index, {name: names[name] for name in shard})
        own_config = manifest.run.model_config if folder is to else None  # beside a file it might be another model's that is replaced
        files += _write_json(folder, stem, files, shards, index, names, config or own_config)
    except OSError as error:
        raise CheckpointError(f"{error.filename or to}: cannot write it: {error.strerror or error}") from error
    size = sum(index.tensors[key].size_bytes for key in names.values())
    return Exported(manifest.step, tuple(files), len(names), size)


def _names(index: Index, tied: Mapping[str, str]) -> dict[str, str]:
    """Every name in the user's model, and the key it is stored under."""
    names = {key.removeprefix(MODEL): key for key in index.tensors}
    return names | {alias: MODEL + name for alias, name in tied.items() if MODEL + name in index.tensors}


def _shards(tensors: Mapping[str, StoredTensor], largest_bytes: int) -> list[list[str]]:
    """Names for each file, in order; a file is full when the next tensor does not fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, stored in tensors.items():
        if shards[-1] and size + stored.size_bytes > largest_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += stored.size_bytes
    return shards


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_file(path: Path, checkpoint: Path, index: Index, names: Mapping[str, str]) -> None:
    """One file, in its place only when it is whole."""

    def write(name: str, file: BinaryIO) -> None:
        stored = index.tensors[names[name]]
        only = Index(tensors={names[name]: stored}, files=index.files)
        for rectangle in _blocks(stored):
            block = torch.empty(rectangle.sizes, dtype=DTYPES[stored.dtype])
            read_pieces(checkpoint, only, [Piece(names[name], stored.shape, rectangle, block)])
            file.write(raw_bytes(block))

    entries = {name: Entry(index.tensors[key].shape, index.tensors[key].dtype) for name, key in names.items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_safetensors(temporary, entries, {"format": "pt"}, write)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _blocks(stored: StoredTensor) -> Iterator[Rectangle]:
    """The tensor in the order of its bytes, in blocks of rows; of the second dimension's where there is but one row, and so on."""
    pending = [whole(stored.shape)] if whole(stored.shape).elements else []
    while pending:
        block = pending.pop()
        dim = next((d for d, length in enumerate(block.sizes) if length > 1), None)
        count = -(-block.elements * DTYPES[stored.dtype].itemsize // _BLOCK_BYTES)
        if count == 1 or dim is None:
            yield block
            continue
        row = Rectangle((block.offsets[dim],), (block.sizes[dim],))
        parts = split_longest(row, count)
        pending.extend(block.with_range(dim, part.offsets[0], part.sizes[0]) for part in reversed(parts))


def _write_json(
    folder: Path,
    stem: str,
    files: Sequence[Path],
    shards: Sequence[Sequence[str]],
    index: Index,
    names: Mapping[str, str],
    config: Mapping[str, Any] | None,
) -> list[Path]:
    written = []
    if len(shards) > 1:
        weight_map = {name: path.name for path, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(index.tensors[key].size_bytes for key in names.values())
        written.append(folder / f"{stem}.safetensors.index.json")
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(written[-1], msgspec.json.format(msgspec.json.encode(content), indent=2))
    if config is not None:
        written.append(folder / "config.json")
        write_atomically(written[-1], msgspec.json.format(msgspec.json.encode(config), indent=2))
    return written
