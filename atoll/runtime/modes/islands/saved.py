"""What a site keeps of the rounds on its own disk: the common state, what its codec left out, and up to which of its steps it has them.

A file is named by its state's position; the last two are kept. Weights and the optimizer inside are in the site's checkpoint, which is that
of every mode.
"""

import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.control.rounds.messages import Position
from atoll.runtime.checkpoint.safetensors_file import Entry, raw_bytes, sync_directory, write_safetensors
from atoll.runtime.outer_update import OuterState

__all__ = ["SavedExchange", "newest_exchange", "read_exchange", "write_exchange"]

_KEPT = 2


class SavedExchange(NamedTuple):
    """The state at a position, and what is one site's own beside it."""

    position: Position
    cursor: int
    state: OuterState
    residual: Tensor | None


class _Head(msgspec.Struct):
    position: Position
    cursor: int
    checksums: dict[str, int]


def _path(directory: Path, position: Position) -> Path:
    return directory / f"exchange-{position[0]:06d}-{position[1]:08d}.safetensors"


def write_exchange(directory: Path, saved: SavedExchange) -> None:
    """On the disk, whole, when it comes back."""
    rows = {"weights": saved.state.weights, "momentum": saved.state.momentum}
    rows |= {} if saved.residual is None else {"residual": saved.residual}
    checksums = {name: zlib.crc32(raw_bytes(row)) for name, row in rows.items()}
    head = msgspec.json.encode(_Head(saved.position, saved.cursor, checksums)).decode()
    path = _path(directory, saved.position)
    temporary = path.with_suffix(".tmp")
    entries = {name: Entry((row.numel(),), "F32") for name, row in rows.items()}

    def data(name: str) -> Iterable[memoryview]:
        return [raw_bytes(rows[name])]

    write_safetensors(temporary, entries, {"format": "pt", "exchange": head}, data)
    temporary.replace(path)
    sync_directory(directory)
    for old in sorted(directory.glob("exchange-*.safetensors"))[:-_KEPT]:
        with suppress(OSError):
            old.unlink()


def read_exchange(directory: Path, position: Position) -> SavedExchange | None:
    """Of that position; None where there is none, or it is damaged."""
    return _read(_path(directory, position))


def newest_exchange(directory: Path) -> SavedExchange | None:
    """The newest that is whole."""
    found = map(_read, sorted(directory.glob("exchange-*.safetensors"), reverse=True))
    return next((saved for saved in found if saved is not None), None)


def _read(path: Path) -> SavedExchange | None:
    try:
        with safe_open(path, framework="pt") as file:
            head = msgspec.json.decode(file.metadata()["exchange"], type=_Head)
            rows: dict[str, Tensor] = {name: file.get_tensor(name).to(torch.float32).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.MsgspecError, LookupError, TypeError):
        return None
    if {name: zlib.crc32(raw_bytes(row)) for name, row in rows.items()} != head.checksums or not {"weights", "momentum"} <= rows.keys():
        return None
    return SavedExchange(head.position, head.cursor, OuterState(rows["weights"], rows["momentum"]), rows.get("residual"))
