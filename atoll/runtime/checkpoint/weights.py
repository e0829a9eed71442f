"""Weights by the user's names, from a checkpoint or from safetensors files that others wrote: either way an Index of what is where."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.directory import find, steps
from atoll.runtime.checkpoint.loading import check_fits
from atoll.runtime.checkpoint.local_shard import LocalShard, pieces
from atoll.runtime.checkpoint.manifest import MANIFEST, MODEL, CheckpointManifest, Chunk, Index, StoredTensor, read_index, read_manifest
from atoll.runtime.checkpoint.rectangles import whole
from atoll.runtime.checkpoint.safetensors_file import StoredFile, read_header
from atoll.runtime.checkpoint.storage import read_pieces

__all__ = ["find_checkpoint", "import_weights", "model_tensors"]

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


def model_tensors(checkpoint: Path) -> tuple[CheckpointManifest, Index]:
    """A checkpoint's manifest, and the index of the user's tensors in it, by their keys."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    return manifest, Index(tensors={key: stored for key, stored in index.tensors.items() if key.startswith(MODEL)}, files=index.files)


def _safetensors_files(path: Path) -> list[Path]:
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


def _index_of_files(files: Sequence[Path]) -> Index:
    """What whole tensors the files hold. A tensor in two of them is an error."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, entry in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name!r} is also in {tensors[name].chunks[0].file}")
            chunk = Chunk(rectangle=whole(entry.shape), file=str(path.resolve()))
            tensors[name] = StoredTensor(shape=entry.shape, dtype=entry.dtype, chunks=(chunk,))
    return Index(tensors=tensors, files={str(path.resolve()): StoredFile(path.stat().st_size) for path in files})


def import_weights(
    source: Path | Sequence[Path], tensors: Sequence[LocalShard], *, tied: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Fill this rank's tensors from files, reading only the bytes it needs; returns the names in the files that it did not want.

    `source` is a safetensors file, several, a folder of them (with or without Hugging Face's index), or a checkpoint of Atoll's
    (or a run: its latest).
    Numbers are converted to the tensors' dtypes. A tensor that is missing, under its own name and under those `tied` gives it, is an error,
    and so is another shape. Ranks call it by themselves; nothing is exchanged.
    """
    paths = [source] if isinstance(source, Path) else list(source)
    directory, index = _index(paths)
    names = _with_ties(index, tensors, tied or {})
    wanted = [(names[held.name], held) for held in tensors]
    check_fits(paths[0], index, wanted, any_dtype=True)
    read_pieces(directory, index, pieces(wanted))
    used = {key for key, _ in wanted}
    return tuple(key for key in index.tensors if key not in used)


def _index(paths: Sequence[Path]) -> tuple[Path, Index]:
    if len(paths) == 1 and ((paths[0] / MANIFEST).is_file() or any(steps(folder) for folder in (paths[0], paths[0] / "checkpoints"))):
        checkpoint = find_checkpoint(paths[0])
        return checkpoint, model_tensors(checkpoint)[1]
    return Path(), _index_of_files([file for path in paths for file in _safetensors_files(path)])


def _with_ties(index: Index, tensors: Sequence[LocalShard], tied: Mapping[str, str]) -> dict[str, str]:
    """The key each name is read from: the name itself, as the checkpoint spells it, or another name of the same tensor."""
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    result = {}
    for held in tensors:
        known = [held.name, MODEL + held.name, *aliases.get(held.name, ())]
        result[held.name] = next((key for key in known if key in index.tensors), held.name)
    return result
