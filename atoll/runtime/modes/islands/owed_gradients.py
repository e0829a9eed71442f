"""What a site's codec has left out of gradients, on its own disk: of every step after which all sites saved, the last few are kept.

A site keeps it before the run's checkpoint of the step is begun, so that whoever goes on from a checkpoint has what every site owes.
"""

import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.runtime.checkpoint.safetensors_file import Entry, raw_bytes, sync_directory, write_safetensors
from atoll.runtime.checkpoint.state_file import newest_whole
from atoll.runtime.modes.islands.resume import link_checkpoint
from atoll.runtime.modes.islands.spec import directory_of_site
from atoll.runtime.run_directory import RunDirectory

__all__ = ["prepare_gradients", "read_owed", "write_owed"]

_KEPT = 3


class _Head(msgspec.Struct):
    step: int
    checksums: dict[str, int]


def _path(directory: Path, step: int) -> Path:
    return directory / f"owed-{step:08d}.safetensors"


def write_owed(directory: Path, step: int, owed: Mapping[str, Tensor]) -> None:
    """On the disk, whole, when it comes back; the oldest go."""
    path = _path(directory, step)
    temporary = path.with_suffix(".tmp")
    head = msgspec.json.encode(_Head(step, {name: zlib.crc32(raw_bytes(row)) for name, row in owed.items()})).decode()
    entries = {name: Entry((row.numel(),), "F32") for name, row in owed.items()}

    def data(name: str) -> Iterable[memoryview]:
        return [raw_bytes(owed[name])]

    write_safetensors(temporary, entries, {"format": "pt", "owed": head}, data)
    temporary.replace(path)
    sync_directory(directory)
    for old in sorted(directory.glob("owed-*.safetensors"))[:-_KEPT]:
        with suppress(OSError):
            old.unlink()


def read_owed(directory: Path, step: int) -> dict[str, Tensor] | None:
    """Of that step; None where nothing whole is there."""
    try:
        with safe_open(_path(directory, step), framework="pt") as file:
            head = msgspec.json.decode(file.metadata()["owed"], type=_Head)
            owed: dict[str, Tensor] = {name: file.get_tensor(name).to(torch.float32).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.MsgspecError, LookupError, TypeError):
        return None
    whole = head.step == step and {name: zlib.crc32(raw_bytes(row)) for name, row in owed.items()} == head.checksums
    return owed if whole else None


def prepare_gradients(directory: RunDirectory, sites: Sequence[str]) -> int:
    """Every site finds the run's newest checkpoint, which is the first site's, and no other one; the step of it, or 0 where there is none.

    Weights and optimizer are the same at all sites. What was owed after later steps is gone.
    """
    found = newest_whole(directory.checkpoints)
    step = found.step if found is not None else 0
    for number, site in enumerate(sites):
        own = directory_of_site(directory, site, number == 0)
        own.path.mkdir(parents=True, exist_ok=True)
        for path in own.path.glob("owed-*.safetensors"):
            if path != _path(own.path, step):
                path.unlink()
        if number:
            shutil.rmtree(own.checkpoints, ignore_errors=True)
            if found is not None:
                link_checkpoint(found.path, own.checkpoints / found.path.name)
    return step
