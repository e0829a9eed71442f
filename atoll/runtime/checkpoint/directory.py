"""The directory of a run's checkpoints: `step-00000012/` is whole, `step-00000012.partial/` is not, `latest` names the one to resume from,
`kept` those that are kept under a name.

After a crash at any moment the last whole one can be found and read; `tidy` removes what the crash left behind.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.errors import CheckpointError, DamagedCheckpointError
from atoll.runtime.checkpoint.manifest import MANIFEST, read_manifest, seal, unseal
from atoll.runtime.checkpoint.safetensors_file import sync_directory, write_atomically

__all__ = ["candidates", "commit", "find", "keep_as", "kept", "none_is_whole", "partial_path", "prune", "step_path", "steps", "tidy"]

_LATEST, _KEPT = "latest", "kept"


class _Latest(msgspec.Struct):
    step: int


def step_path(directory: Path, step: int) -> Path:
    """Where the whole checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def partial_path(directory: Path, step: int) -> Path:
    """Where it is while it is written."""
    return directory / f"step-{step:08d}.partial"


def steps(directory: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    return [step for step in _named(directory) if (step_path(directory, step) / MANIFEST).is_file()]


def _named(directory: Path) -> list[int]:
    """Steps whose checkpoint is in its place, ascending, whatever has become of it since."""
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in directory.glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def find(directory: Path, step: int | None) -> Path | None:
    """The checkpoint of a step, or the one to resume from; None when there is no checkpoint at all.

    What `latest` names is preferred to a higher step: a run that went back to an earlier one goes on from there.
    """
    present = steps(directory)
    if step is not None:
        if step not in present:
            has = f"it has {', '.join(map(str, present))}" if present else "it has none"
            raise CheckpointError(f"{directory}: no checkpoint of step {step}; {has}")
        return step_path(directory, step)
    if not present:
        return None
    latest = _latest(directory)
    return step_path(directory, latest if latest in present else present[-1])


def candidates(directory: Path, step: int | None) -> list[Path]:
    """Where to look for what to resume from, best first: as `find` says, then the others, newest first. Whoever reads finds damage."""
    if step is not None:
        return [path for path in (find(directory, step),) if path is not None]
    latest = _latest(directory)
    return [step_path(directory, step) for step in sorted(_named(directory), key=lambda step: (step != latest, -step))]


def none_is_whole(errors: Sequence[str]) -> DamagedCheckpointError:
    """What is wrong with the newest checkpoint, where no other is whole, and what can be done."""
    others = f"; nor is any of the {len(errors) - 1} before it whole" if len(errors) > 1 else "; there is no other"
    advice = "Copy it back from where you keep copies, or begin anew in another directory; keep_last keeps more of them"
    return DamagedCheckpointError(f"{errors[0]}{others}. {advice}")


def _latest(directory: Path) -> int | None:
    try:
        return msgspec.json.decode(unseal(directory / _LATEST, (directory / _LATEST).read_bytes()), type=_Latest).step
    except (OSError, CheckpointError, msgspec.DecodeError, UnicodeDecodeError):
        return None  # lost, but the directories themselves tell


def commit(directory: Path, step: int) -> Path:
    """Put a checkpoint that is whole in its place and point `latest` at it."""
    partial, final = partial_path(directory, step), step_path(directory, step)
    replaced = final.with_name(final.name + ".old")
    sync_directory(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_directory(directory)
    write_atomically(directory / _LATEST, seal(msgspec.json.encode(_Latest(step))))
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def prune(directory: Path, newest: int, keep_last: int) -> None:
    """Remove all but the checkpoint of step `newest` and those written last before it, `keep_last` in all, and those that are kept."""
    spared = {newest, *kept(directory).values()}
    others = sorted((step for step in steps(directory) if step not in spared), key=lambda step: (_written_at(directory, step), step))
    for step in others[: len(others) - (keep_last - 1)]:
        _remove(step_path(directory, step))


def keep_as(directory: Path, name: str, step: int) -> None:
    """Keep the checkpoint of a step under a name, instead of the one that was."""
    write_atomically(directory / _KEPT, seal(msgspec.json.encode({**kept(directory), name: step}, order="sorted")))


def kept(directory: Path) -> dict[str, int]:
    """Names and the steps that are kept under them."""
    try:
        return msgspec.json.decode(unseal(directory / _KEPT, (directory / _KEPT).read_bytes()), type=dict[str, int])
    except (OSError, CheckpointError, msgspec.DecodeError, UnicodeDecodeError):
        return {}  # none, or lost with the file


def tidy(directory: Path) -> None:
    """Remove what a crash left: partial checkpoints, and replaced ones once what replaces them is in place."""
    for path in directory.glob("step-*.old"):
        final = path.with_suffix("")
        if final.exists():
            shutil.rmtree(path)
        else:  # it crashed between the two renames
            path.rename(final)
    for path in (*directory.glob("step-*.partial"), *directory.glob("step-*.removed")):
        shutil.rmtree(path)
    for name in (_LATEST, _KEPT):
        (directory / f"{name}.tmp").unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Take it out of sight first, so that a crash half-way leaves nothing that looks whole."""
    doomed = path.with_name(path.name + ".removed")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _written_at(directory: Path, step: int) -> float:
    try:
        return read_manifest(step_path(directory, step)).unix_seconds
    except CheckpointError:
        return 0.0
