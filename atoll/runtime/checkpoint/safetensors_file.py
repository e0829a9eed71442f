"""Writing safetensors as a stream: the header first, then tensor after tensor, so that nothing is copied and no lock is held.

`safetensors.torch.save`, which `torch.distributed.checkpoint` calls, makes two copies of everything and holds Python's lock meanwhile: a
third of a second for 256 MB, in which training stands still (docs/decisions/0009-checkpoints.md).
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.errors import CheckpointError

__all__ = [
    "DTYPES",
    "Entry",
    "StoredFile",
    "dtype_name",
    "encode_header",
    "raw_bytes",
    "sharding_metadata",
    "sync_directory",
    "write_atomically",
    "write_durably",
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
_STRETCH_BYTES = 8 << 20


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
    header_crc32: int


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """How safetensors spells a dtype."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{where}: {dtype} cannot be stored in a safetensors file")
    return _NAMES[dtype]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def sharding_metadata(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """What `torch.distributed.checkpoint` writes into the header of a file that has parts of tensors, given where each begins."""
    info = msgspec.json.encode({key: {"saved_offsets": list(at)} for key, at in offsets.items()}, order="sorted").decode()
    return {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"}


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
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], data: Callable[[str], Iterable[memoryview]]
) -> StoredFile:
    """Create a file with the entries; `data(name)` has the bytes of each, block by block. It is on disk when it returns."""
    head, order = encode_header(entries, metadata)
    announced = len(head) + sum(entry.size_bytes for entry in entries.values())
    with path.open("wb") as file:
        write_durably(file, (memoryview(head), *(block for name in order for block in data(name))))
        size = file.tell()
        assert size == announced, f"{path}: {size} bytes written, {announced} announced"
    return StoredFile(size, zlib.crc32(head))


def write_durably(file: BinaryIO, blocks: Iterable[memoryview]) -> None:
    """Write bytes to a new file. They are on disk when it returns, and the kernel keeps no copy of what is read only after a failure.

    A stretch at a time: the next one takes the pages of the one before. Fresh ones are slow to come by, in virtual machines above all
    (200 ms of processor time for 100 MB, against 40), and what the copy took would be missing to training.
    """
    at = settled = 0
    for block in blocks:
        for start in range(0, len(block), _STRETCH_BYTES):
            at += file.write(block[start : start + _STRETCH_BYTES])
            if at - settled >= _STRETCH_BYTES:
                settled = _settle(file, settled, at)
    file.flush()
    os.fsync(file.fileno())


def _settle(file: BinaryIO, start: int, stop: int) -> int:
    """Has written bytes go to the disk, and their pages be free."""
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
    return stop


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
