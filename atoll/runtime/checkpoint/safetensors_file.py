"""Writing safetensors as a stream: the header first, then tensor after tensor, so that nothing is copied and no lock is held.

`safetensors.torch.save`, which `torch.distributed.checkpoint` calls, makes two copies of everything and holds Python's lock meanwhile: a
third of a second for 256 MB, in which training stands still (docs/decisions/0009-checkpoints.md).
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.errors import CheckpointError, DamagedCheckpointError

__all__ = [
    "DTYPES",
    "Entry",
    "StoredFile",
    "checked_entry",
    "dtype_name",
    "encode_header",
    "raw_bytes",
    "read_header",
    "sync_directory",
    "write_atomically",
    "write_safetensors",
]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes, what the safetensors library accepts


class Entry(NamedTuple):
    """A tensor in a file to be written."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it

    @property
    def size_bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class StoredFile(msgspec.Struct, frozen=True):
    """What a file must be: its size, and a checksum of its header. The tensors have checksums of their own."""

    size_bytes: int
    header_crc32: int | None = None  # None: of a file that others wrote


class _Stored(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """How safetensors spells a dtype."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{where}: {dtype} cannot be stored in a safetensors file")
    return _NAMES[dtype]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What a file with these entries begins with, and the order in which their bytes follow."""
    order = sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype].itemsize, name))  # so that every tensor is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        entry = entries[name]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (end, end + entry.size_bytes)}
        end += entry.size_bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_safetensors(
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], write: Callable[[str, BinaryIO], None]
) -> StoredFile:
    """Create a file with the entries; `write(name, file)` is called once for each, to write its bytes. It is on disk when it returns."""
    head, order = encode_header(entries, metadata)
    announced = len(head) + sum(entry.size_bytes for entry in entries.values())
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            write(name, file)
        file.flush()
        size = file.tell()
        assert size == announced, f"{path}: {size} bytes written, {announced} announced"
        os.fsync(file.fileno())
    return StoredFile(size, zlib.crc32(head))


def read_header(path: Path, crc32: int | None = None) -> dict[str, Entry]:
    """What a safetensors file holds, without reading any of it; with a checksum, that its header is what was written."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise DamagedCheckpointError(f"{path}: not a safetensors file, or cut short: {size} bytes")
            text = file.read(length)
        if crc32 is not None and crc32 != zlib.crc32(length.to_bytes(8, "little") + text):
            raise DamagedCheckpointError(f"{path}: its header is not what was saved: the checksum differs")
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot read it: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path}: not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {name: checked_entry(str(path), name, raw, size - 8 - length)[0] for name, raw in header.items()}


def checked_entry(path: str, name: str, raw: msgspec.Raw, data_bytes: int) -> tuple[Entry, int]:
    """A tensor as a header tells of it, and where its bytes begin after the header; `path` begins the error when that cannot be."""
    try:
        stored = msgspec.json.decode(raw, type=_Stored)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {name!r}: its header is wrong: {error}") from error
    if stored.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name!r}: unknown dtype {stored.dtype!r}")
    entry = Entry(stored.shape, stored.dtype)
    start, stop = stored.data_offsets
    if not (0 <= start <= stop and stop - start == entry.size_bytes and all(length >= 0 for length in stored.shape)):
        raise CheckpointError(f"{path}: {name!r}: {stop - start} bytes are not a {stored.dtype} of shape {list(stored.shape)}")
    if stop > data_bytes:
        raise CheckpointError(f"{path}: {name!r}: the file is cut short: it ends at byte {stop} of the data and there are {data_bytes}")
    return entry, start


def write_atomically(path: Path, text: bytes) -> None:
    """Replace a small file: after a crash there is the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
