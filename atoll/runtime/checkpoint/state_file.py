"""A stage's state as the bytes of one safetensors file: what a swarm's workers send each other and store, and a checkpoint's shard.

Tensors have the keys every checkpoint gives them; small values are JSON in the file's metadata. `assemble_checkpoint` makes a checkpoint
of the files of all stages without copying a byte of them; `cut` takes any stage's state out of any checkpoint, whoever wrote it.
"""

import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.errors import CheckpointError, DamagedCheckpointError
from atoll.runtime.checkpoint.directory import candidates, commit, none_is_whole, partial_path, prune
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.manifest import (
    MODEL,
    CheckpointManifest,
    Chunk,
    Index,
    Rebuilt,
    RunIdentity,
    SmallState,
    StoredTensor,
    make_manifest,
    merge_small,
    model_shapes,
    read_index,
    read_manifest,
    read_state,
    write_description,
)
from atoll.runtime.checkpoint.rectangles import whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, StoredFile, dtype_name, encode_header, sharding_metadata
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces
from atoll.runtime.checkpoint.values import from_plain

__all__ = [
    "BEFORE",
    "BUFFER",
    "StateFile",
    "StateReader",
    "WholeCheckpoint",
    "assemble_checkpoint",
    "cut",
    "newest_whole",
    "state_checksums",
]

BEFORE = "swarm/before/"  # what keys of the weights before the last step begin with, where training is stale
BUFFER = "swarm/buffer/"  # and of buffers that the user's own state_dict leaves out
_SMALL = "atoll"  # the key of small values in a file's metadata
_SIZE = 8  # bytes of the number a safetensors file begins with: its header's length


class _Small(msgspec.Struct):
    state: SmallState
    extra: dict[str, Any]  # plain, as `to_plain` makes it
    rebuilt: dict[str, Rebuilt] = {}  # parameters of the stage that are not in the file: whoever reads it has made them again


class _Stored(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StateFile:
    """The bytes of such a file, read in any order and copied only then. What the tensors hold must not change before the last is read."""

    def __init__(
        self, tensors: Mapping[str, Tensor], small: SmallState, extra: dict[str, Any], rebuilt: Mapping[str, Rebuilt] | None = None
    ) -> None:
        held = {key: tensor.detach().resolve_conj().resolve_neg() for key, tensor in tensors.items()}
        entries = {key: Entry(tuple(tensor.shape), dtype_name(tensor.dtype, repr(key))) for key, tensor in held.items()}
        text = msgspec.json.encode(_Small(small, extra, dict(rebuilt or {})), order="sorted").decode()  # equal states are equal bytes
        metadata = sharding_metadata({key: [0] * len(entry.shape) for key, entry in entries.items()})
        head, order = encode_header(entries, {**metadata, _SMALL: text})
        self._pieces = [(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))]
        self.length = len(head)
        for key in order:
            self._pieces.append((self.length, held[key]))
            self.length += entries[key].size_bytes

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of some of the bytes."""
        found = torch.empty(stop - start, dtype=torch.uint8)
        for at, tensor in self._pieces:
            first, end = max(start, at), min(stop, at + tensor.numel() * tensor.element_size())
            if first < end:
                found[first - start : end - start] = tensor.reshape(-1).view(torch.uint8)[first - at : end - at]
        return found

    def content(self) -> Tensor:
        """All of them."""
        return self.read(0, self.length)


class StateReader:
    """What such bytes hold. `DamagedCheckpointError` where they are not those of a state file."""

    def __init__(self, content: Tensor, where: str = "a stage's state") -> None:
        self.where = where
        try:
            length = int.from_bytes(content[:_SIZE].numpy().tobytes(), "little")
            if content.numel() < _SIZE or not 2 <= length <= content.numel() - _SIZE:
                raise ValueError("it does not begin as one, or is cut short")
            self.head = content[: _SIZE + length].numpy().tobytes()
            header = msgspec.json.decode(self.head[_SIZE:], type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
            found = msgspec.json.decode(metadata[_SMALL], type=_Small)
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            raise DamagedCheckpointError(f"{where} cannot be read; it is damaged, or of another version of Atoll ({error})") from error
        self.small, self.extra, self.rebuilt = found.state, found.extra, found.rebuilt
        self._data = content[_SIZE + length :]
        self._entries = {name: _entry(where, name, raw, self._data.numel()) for name, raw in header.items()}

    @property
    def index(self) -> Index:
        """Shapes and dtypes of what is there, as a checkpoint's index has them."""
        tensors = {key: StoredTensor(shape=entry.shape, dtype=entry.dtype, chunks=()) for key, (entry, _) in self._entries.items()}
        return Index(tensors=tensors, files={})

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def raw(self, key: str) -> Tensor:
        """A tensor's bytes."""
        entry, start = self._entries[key]
        return self._data[start : start + entry.size_bytes]

    def checksums(self) -> dict[str, int]:
        """Of all tensors, by key."""
        return {key: zlib.crc32(self.raw(key).numpy().data) if entry.size_bytes else 0 for key, (entry, _) in self._entries.items()}

    def fill(self, key: str, tensor: Tensor) -> None:
        """Copy a stored tensor into one of the same shape and dtype."""
        if key not in self._entries:
            raise DamagedCheckpointError(f"{self.where} does not have {key!r}")
        entry, _ = self._entries[key]
        if entry.shape != tuple(tensor.shape) or DTYPES[entry.dtype] != tensor.dtype:
            there, here = f"{DTYPES[entry.dtype]} of shape {list(entry.shape)}", f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise DamagedCheckpointError(f"{self.where}: {key!r} is {there} there and {here} in the job")
        found = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        found.reshape(-1).view(torch.uint8).copy_(self.raw(key))
        with torch.no_grad():
            tensor.copy_(found)


def _entry(where: str, name: str, raw: msgspec.Raw, data_bytes: int) -> tuple[Entry, int]:
    """A tensor as a header tells of it, and where its bytes begin after the header; `where` begins the error when that cannot be."""
    try:
        stored = msgspec.json.decode(raw, type=_Stored)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{where}: {name!r}: its header is wrong: {error}") from error
    if stored.dtype not in DTYPES:
        raise CheckpointError(f"{where}: {name!r}: unknown dtype {stored.dtype!r}")
    entry = Entry(stored.shape, stored.dtype)
    start, stop = stored.data_offsets
    if not (0 <= start <= stop and stop - start == entry.size_bytes and all(length >= 0 for length in stored.shape)):
        raise CheckpointError(f"{where}: {name!r}: {stop - start} bytes are not a {stored.dtype} of shape {list(stored.shape)}")
    if stop > data_bytes:
        raise CheckpointError(f"{where}: {name!r}: the file is cut short: it ends at byte {stop} of the data and there are {data_bytes}")
    return entry, start


def cut(checkpoint: Path, names: Iterable[str]) -> Tensor:
    """The state of those parameters and buffers, with the optimizer's and what else there is of them, as the bytes of a state file.

    Only what is wanted is read, and its checksums are compared. Names the checkpoint does not have are left out: whoever reads knows.
    """
    manifest = read_manifest(checkpoint)
    index, small = read_index(checkpoint, manifest), read_state(checkpoint, manifest)
    wanted = set(names)
    keys = [key for key in index.tensors if _name_of(key) in wanted]
    check_chunks(checkpoint, index, [(key, chunk) for key in keys for chunk in index.tensors[key].chunks])
    values = {key: torch.empty(index.tensors[key].shape, dtype=DTYPES[index.tensors[key].dtype]) for key in keys}
    read_pieces(checkpoint, index, [Piece(key, tuple(value.shape), whole(value.shape), value) for key, value in values.items()])
    own = SmallState(
        parameters={name: state for name, state in small.parameters.items() if name in wanted},
        groups=small.groups,
        group_of={name: group for name, group in small.group_of.items() if name in wanted},
    )
    rebuilt = {name: one for name, one in index.rebuilt.items() if name in wanted}
    return StateFile(values, own, {key: value for key, value in small.extra.items() if key != "losses"}, rebuilt).content()


def _name_of(key: str) -> str:
    """The user's name of what is stored as `model/<name>`, `optimizer/<state>/<name>` or `swarm/<what>/<name>`."""
    return key.removeprefix(MODEL) if key.startswith(MODEL) else key.split("/", 2)[-1]


def assemble_checkpoint(
    directory: Path,
    files: Mapping[Path, Mapping[str, int] | None],
    *,
    step: int,
    identity: RunIdentity,
    extra: dict[str, Any],
    keep_last: int,
) -> tuple[Path, int]:
    """Make the state files of all stages the checkpoint of a step: they are linked into it, and described. Returns it and its bytes.

    All or nothing, as every save. What several stages have (tied parameters) is the first one's. With files come their
    `state_checksums`, where they are known; else the files are read. `extra` is plain; schedule and loss scale come from the files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = partial_path(directory, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        tensors: dict[str, StoredTensor] = {}
        stored: dict[str, StoredFile] = {}
        smalls: list[SmallState] = []
        rebuilt: dict[str, Rebuilt] = {}
        merged: dict[str, Any] = {"scheduler": None, "loss_scale": None, "swarm": {}}
        for number, (file, checksums) in enumerate(files.items()):
            name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
            _link(file, partial / name)
            reader = _describe(partial / name, tensors, checksums)
            stored[name] = StoredFile((partial / name).stat().st_size, zlib.crc32(reader.head))
            smalls.append(reader.small)
            rebuilt |= reader.rebuilt
            _merge(merged, reader.extra)
        index = Index(tensors=dict(sorted(tensors.items())), files=stored, rebuilt=dict(sorted(rebuilt.items())))
        swarm = {**merged["swarm"], **extra.get("swarm", {})}
        manifest = make_manifest(step, identity, index, len(files))
        write_description(partial, manifest, index, merge_small(smalls, {**merged, **extra, "swarm": swarm}))
        final = commit(directory, step)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    prune(directory, step, keep_last)
    return final, sum(file.size_bytes for file in stored.values())


def _link(file: Path, target: Path) -> None:
    """The same bytes under another name; a copy where the file system has no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def state_checksums(content: Tensor) -> dict[str, int]:
    """Of the tensors in a state's bytes."""
    return StateReader(content).checksums()


def _describe(path: Path, tensors: dict[str, StoredTensor], checksums: Mapping[str, int] | None) -> StateReader:
    """Add a file's tensors, with checksums, to those there are."""
    size = path.stat().st_size
    reader = StateReader(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8), str(path))
    checksums = reader.checksums() if checksums is None else checksums
    for key, found in reader.index.tensors.items():
        chunk = Chunk(rectangle=whole(found.shape), file=path.name, crc32=checksums[key])
        known = tensors.get(key)
        if known is None:
            tensors[key] = msgspec.structs.replace(found, chunks=(chunk,))
        else:
            tensors[key] = msgspec.structs.replace(known, copies=(*known.copies, chunk))
    return reader


def _merge(merged: dict[str, Any], extra: Mapping[str, Any]) -> None:
    """A stage where nothing is trained has no schedule; the others have the same."""
    merged["scheduler"] = merged["scheduler"] if merged["scheduler"] is not None else extra.get("scheduler")
    merged["loss_scale"] = merged["loss_scale"] or extra.get("loss_scale")
    merged["swarm"] = {**extra.get("swarm", {}), **merged["swarm"]}


class WholeCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint every byte of which is what was saved."""

    step: int
    path: Path
    manifest: CheckpointManifest
    shapes: dict[str, tuple[int, ...]]  # of the model's parameters and persistent buffers
    extra: dict[str, Any]
    notes: tuple[str, ...]  # newer ones that are damaged


def newest_whole(directory: Path) -> WholeCheckpoint | None:
    """The checkpoint to go on from; None where there is none. DamagedCheckpointError where none of those there are is whole."""
    damage: list[DamagedCheckpointError] = []
    for path in candidates(directory, None):
        try:
            manifest = read_manifest(path)
            index, small = read_index(path, manifest), read_state(path, manifest)
            chunks = [(key, chunk) for key, stored in index.tensors.items() for chunk in (*stored.chunks, *stored.copies)]
            check_chunks(path, index, chunks)
        except DamagedCheckpointError as error:
            damage.append(error)
            continue
        extra = {key: from_plain(value, f"{path}: extra.{key}") for key, value in small.extra.items()}
        notes = tuple(f"a newer checkpoint is damaged and was passed over: {error}" for error in damage)
        return WholeCheckpoint(manifest.step, path, manifest, model_shapes(index), extra, notes)
    if damage:
        raise none_is_whole([str(error) for error in damage])
    return None
