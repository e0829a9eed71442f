"""Starting from weights that were trained before, by the user's names: from safetensors files or from a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.runtime.checkpoint.directory import steps
from atoll.runtime.checkpoint.held import Held, pieces
from atoll.runtime.checkpoint.loading import check_fits
from atoll.runtime.checkpoint.manifest import MANIFEST, MODEL, Index
from atoll.runtime.checkpoint.source import find_checkpoint, index_of_files, model_tensors, safetensors_files
from atoll.runtime.checkpoint.storage import read_pieces

__all__ = ["import_weights"]


def import_weights(source: Path | Sequence[Path], tensors: Sequence[Held], *, tied: Mapping[str, str] | None = None) -> tuple[str, ...]:
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
    return Path(), index_of_files([file for path in paths for file in safetensors_files(path)])


def _with_ties(index: Index, tensors: Sequence[Held], tied: Mapping[str, str]) -> dict[str, str]:
    """The key each name is read from: the name itself, as the checkpoint spells it, or another name of the same tensor."""
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    result = {}
    for held in tensors:
        known = [held.name, MODEL + held.name, *aliases.get(held.name, ())]
        result[held.name] = next((key for key in known if key in index.tensors), held.name)
    return result
