"""Where weights are read from: a checkpoint, or safetensors files that others wrote. Either way an Index of what is where."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.directory import find
from atoll.runtime.checkpoint.manifest import MANIFEST, MODEL, Chunk, Index, Manifest, StoredTensor, read_index, read_manifest
from atoll.runtime.checkpoint.rectangles import whole
from atoll.runtime.checkpoint.safetensors_file import read_header

__all__ = ["find_checkpoint", "index_of_files", "model_tensors", "safetensors_files"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")


class _WeightMap(msgspec.Struct):
    weight_map: dict[str, str]


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The checkpoint that a path means: itself, the latest (or that of `step`) in it, or in its folder `checkpoints`."""
    if (path / MANIFEST).is_file() and step is None:
        return path
    for directory in (path, path / "checkpoints"):
        found = find(directory, None)
        if found is not None:
            return found if step is None else find(directory, step) or found
    raise CheckpointError(f"{path}: no checkpoint there" if path.exists() else f"{path}: no such directory")


def model_tensors(checkpoint: Path) -> tuple[Manifest, Index]:
    """A checkpoint's manifest, and the index of the user's tensors in it, by their keys."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    return manifest, Index(tensors={key: stored for key, stored in index.tensors.items() if key.startswith(MODEL)}, files=index.files)


def safetensors_files(path: Path) -> list[Path]:
    """The files that a path means: itself, those that a folder's index names, or all in the folder."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.is_file():
        if path.name.endswith(".safetensors.index.json"):
            return _of_weight_map(path)
        if path.suffix in _PICKLES:
            raise CheckpointError(f"{path}: only safetensors are read, since other formats can run code when they are; convert it first")
        return [path]
    maps = sorted(path.glob("*.safetensors.index.json"))
    if len(maps) > 1:
        raise CheckpointError(f"{path}: it has {len(maps)} indexes; give the one that is meant: {', '.join(one.name for one in maps)}")
    files = _of_weight_map(maps[0]) if maps else sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(one.name for one in path.iterdir() if one.suffix in _PICKLES)
        hint = f"; {others[0]} can run code when it is read: convert it to safetensors first" if others else ""
        raise CheckpointError(f"{path}: no safetensors file in it{hint}")
    return files


def _of_weight_map(path: Path) -> list[Path]:
    try:
        names = sorted(set(msgspec.json.decode(path.read_bytes(), type=_WeightMap).weight_map.values()))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not an index of safetensors files: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {name!r} is not the name of a file beside it")
    return [path.parent / name for name in names]


def index_of_files(files: Sequence[Path]) -> Index:
    """What whole tensors the files hold. A tensor in two of them is an error."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name!r} is also in {tensors[name].chunks[0].file}")
            chunk = Chunk(rectangle=whole(entry.shape), file=str(path.resolve()))
            tensors[name] = StoredTensor(shape=entry.shape, dtype=entry.dtype, chunks=(chunk,))
    return Index(tensors=tensors, files={str(path.resolve()): path.stat().st_size for path in files})
