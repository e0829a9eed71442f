"""Export: a checkpoint as safetensors with the user's names, for plain PyTorch, transformers and peft.

It goes block by block, so that the model may be larger than memory; all but `export_merged`, where peft computes.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.errors import CheckpointError
from atoll.model_identity import Adapter, ModelIdentity
from atoll.runtime.checkpoint.directory import find, kept
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.made_again import make_again
from atoll.runtime.checkpoint.manifest import EMA_KEY, MANIFEST, MODEL, Index, read_index, read_manifest
from atoll.runtime.checkpoint.rectangles import Rectangle, split_longest, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, raw_bytes, write_atomically, write_safetensors
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces

__all__ = ["Exported", "export", "export_merged", "kept_step"]

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
    ema: bool = False,
    largest_file_bytes: int = _LARGEST_FILE_BYTES,
) -> Exported:
    """Write a checkpoint's parameters and buffers to `to`: a file `….safetensors`, or a folder that gets `model.safetensors`.

    `run` is a run's directory, its folder of checkpoints or one checkpoint; `step` chooses another than the latest. Above
    `largest_file_bytes` there are several files and an index, as Hugging Face has them. Shared tensors are written under each of their
    names, so that a strict `load_state_dict` finds them. A folder of a Hugging Face model is one that `from_pretrained` loads, with the
    configuration the run was saved with; of a PEFT model it is the adapter's, for `PeftModel.from_pretrained`. With `ema` trained
    parameters are the averages the run kept of them.
    """
    checkpoint = _find_checkpoint(run, step)
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    in_folder = to.suffix != ".safetensors"
    adapter = manifest.run.adapter if in_folder else None
    names = _names(checkpoint, index, manifest.run.tied, ema)
    if adapter is not None:
        names = _adapter_names(adapter, names)
        largest_file_bytes = sys.maxsize  # PEFT reads one file
    contents = _Contents(run, checkpoint, index, set(names.values()))
    folder, stem = (to, "model" if adapter is None else "adapter_model") if in_folder else (to.parent, to.name.removesuffix(".safetensors"))
    shards = _shards({name: contents.entries[key] for name, key in names.items()}, largest_file_bytes)
    parts = [""] if len(shards) == 1 else [f"-{number + 1:05d}-of-{len(shards):05d}" for number in range(len(shards))]
    files = [folder / f"{stem}{part}.safetensors" for part in parts]
    size = sum(contents.entries[key].size_bytes for key in names.values())
    described: dict[Path, Mapping[str, Any]] = {}
    if len(files) > 1:
        weight_map = {name: path.name for path, shard in zip(files, shards, strict=True) for name in shard}
        described[folder / f"{stem}.safetensors.index.json"] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    if in_folder:  # beside a file they might be another model's that are replaced
        described |= {folder / name: content for name, content in _descriptions(manifest.run).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, shard in zip(files, shards, strict=True):
            _write_file(path, contents, {name: names[name] for name in shard})
        for path, content in described.items():
            write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=2))
    except OSError as error:
        raise CheckpointError(f"{error.filename or to}: cannot write it: {error.strerror or error}") from error
    return Exported(manifest.step, (*files, *described), len(names), size)


class _Contents:
    """What a checkpoint has, and what it leaves out if any of that is wanted. The stored bytes are compared with their checksums."""

    def __init__(self, run: Path, checkpoint: Path, index: Index, keys: set[str]) -> None:
        self._checkpoint, self._index = checkpoint, index
        stored = sorted(key for key in keys if key in index.tensors)
        check_chunks(checkpoint, index, [(key, chunk) for key in stored for chunk in index.tensors[key].chunks])
        left_out = {name: one for name, one in index.rebuilt.items() if MODEL + name in keys}
        self._made = make_again(run, checkpoint, left_out) if left_out else None
        self.entries = {key: Entry(index.tensors[key].shape, index.tensors[key].dtype) for key in stored}
        self.entries |= {MODEL + name: Entry(one.shape, one.dtype) for name, one in left_out.items()}
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)  # of what is made again

    def read(self, key: str, rectangle: Rectangle) -> torch.Tensor:
        """A part of a tensor."""
        entry = self.entries[key]
        if key in self._index.tensors:
            block = torch.empty(rectangle.sizes, dtype=DTYPES[entry.dtype])
            read_pieces(self._checkpoint, self._index, [Piece(key, entry.shape, rectangle, block)])
            return block
        assert self._made is not None
        if self._last[0] != key:
            self._last = key, self._made[key.removeprefix(MODEL)]
        return self._last[1][rectangle.slices()].contiguous()


def kept_step(run: Path, name: str) -> int:
    """The step of the checkpoint that is kept under a name."""
    for directory in (run, run / "checkpoints"):
        if name in kept(directory):
            return kept(directory)[name]
    raise CheckpointError(f"{run}: no checkpoint was kept as {name!r}; give the job the callback atoll.BestCheckpoint()")


def _names(checkpoint: Path, index: Index, tied: Mapping[str, str], ema: bool) -> dict[str, str]:
    """Every name in the user's model, and the key it is stored under."""
    names = {key.removeprefix(MODEL): key for key in index.tensors if key.startswith(MODEL)}
    names |= {name: MODEL + name for name in index.rebuilt}
    if ema:
        averages = {name: EMA_KEY + name for name in names if EMA_KEY + name in index.tensors}
        if not averages:
            raise CheckpointError(f"{checkpoint}: it has no averages; give the job ema_decay, such as 0.999")
        names |= averages
    return names | {alias: names[name] for alias, name in tied.items() if name in names}


def _adapter_names(adapter: Adapter, names: Mapping[str, str]) -> dict[str, str]:
    """Every name in the adapter's file, and the key it is stored under."""
    if adapter.problem:
        advice = "export to a file whose name ends in .safetensors and load it into the model with load_state_dict"
        raise CheckpointError(f"this adapter cannot be written as peft has it: {adapter.problem}; {advice}")
    return {name: names[known] for name, known in adapter.names.items()}


def _descriptions(identity: ModelIdentity) -> dict[str, dict[str, Any]]:
    """The JSON files of a folder of the model."""
    if identity.adapter is not None:
        return {"adapter_config.json": identity.adapter.config}
    files = {"config.json": identity.model_config, "generation_config.json": identity.generation_config}
    return {name: content for name, content in files.items() if content is not None}


def export_merged(run: Path, to: Path, *, step: int | None = None, ema: bool = False) -> Exported:
    """Write a PEFT model's base model with its adapter merged into it, as transformers' own `save_pretrained` does; it needs its memory."""
    checkpoint = _find_checkpoint(run, step)
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    names = _names(checkpoint, index, manifest.run.tied, ema)
    contents = _Contents(run, checkpoint, index, set(names.values()))
    model = _peft_model(checkpoint, manifest.run)
    state = {key: contents.read(key, whole(contents.entries[key].shape)) for key in set(names.values())}
    try:
        model.load_state_dict({name: state[key] for name, key in names.items()}, assign=True)
        model.get_base_model().tie_weights()
        merged = model.merge_and_unload()
    except Exception as error:  # what peft and transformers raise, which differs by the kind of adapter
        raise CheckpointError(f"{checkpoint}: peft cannot merge this adapter: {type(error).__name__}: {error}") from error
    merged.save_pretrained(to)
    files = tuple(sorted(to.glob("*.safetensors")) + sorted(to.glob("*.json")))
    return Exported(manifest.step, files, len(merged.state_dict()), sum(path.stat().st_size for path in files))


def _peft_model(checkpoint: Path, identity: ModelIdentity) -> Any:
    """The run's model without its weights, made of its configurations."""
    if identity.adapter is None:
        raise CheckpointError(f"{checkpoint}: its model has no adapter to merge; leave out --merge")
    import peft
    import transformers

    config = dict(identity.model_config or {})
    made = getattr(transformers, (config.get("architectures") or [""])[0], None)
    if made is None or "model_type" not in config:
        raise CheckpointError(
            f"{checkpoint}: the model that was adapted is not one of transformers' own, so it cannot be made here; "
            "export the adapter without --merge, load it in Python and call merge_and_unload()"
        )
    with torch.device("meta"):
        base = made(transformers.AutoConfig.for_model(**config))
        options: dict[str, Any] = {**identity.adapter.config, "inference_mode": False}
        adapter = peft.PeftConfig.from_peft_type(**options)  # type: ignore[no-untyped-call]
        return peft.get_peft_model(base, adapter, autocast_adapter_dtype=False)


def _shards(tensors: Mapping[str, Entry], largest_bytes: int) -> list[list[str]]:
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


def _write_file(path: Path, contents: _Contents, names: Mapping[str, str]) -> None:
    """One file, in its place only when it is whole."""

    def data(name: str) -> Iterator[memoryview]:
        for rectangle in _blocks(contents.entries[names[name]]):
            yield raw_bytes(contents.read(names[name], rectangle))

    entries = {name: contents.entries[key] for name, key in names.items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_safetensors(temporary, entries, {"format": "pt"}, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _blocks(stored: Entry) -> Iterator[Rectangle]:
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


def _find_checkpoint(path: Path, step: int | None) -> Path:
    """The checkpoint that a path means: itself, the latest (or that of `step`) in it, or in its folder `checkpoints`."""
    if (path / MANIFEST).is_file() and step is None:
        return path
    for directory in (path, path / "checkpoints"):
        found = find(directory, None)
        if found is not None:
            return found if step is None else find(directory, step) or found
    raise CheckpointError(f"{path}: no checkpoint there" if path.exists() else f"{path}: no such directory")
