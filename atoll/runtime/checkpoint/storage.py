"""Rectangles of tensors to and from safetensors files.

The files are what `torch.distributed.checkpoint` leaves with its safetensors storage: every rank its own, each tensor's offsets in the
header, no `.metadata`; its `HuggingFaceStorageReader` reads them, without Atoll. Why its own writer and reader are not used is in
docs/decisions/0009-checkpoints.md.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from atoll.errors import DamagedCheckpointError
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.manifest import Chunk, Index
from atoll.runtime.checkpoint.rectangles import Rectangle, intersect
from atoll.runtime.checkpoint.safetensors_file import Entry, StoredFile, dtype_name, raw_bytes, sharding_metadata, write_safetensors

__all__ = ["Written", "check_chunks", "read_pieces", "write_pieces"]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote: chunks by key, files with their sizes."""

    chunks: dict[str, list[Chunk]]
    files: dict[str, StoredFile]


def write_pieces(directory: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Write a rank's pieces, contiguous and on the CPU, into new files. They are on disk when it returns.

    A file holds a key once, so the second rectangle of a tensor goes to the rank's second file.
    """
    files: list[dict[str, Piece]] = []
    seen: Counter[str] = Counter()
    for piece in pieces:
        if seen[piece.key] == len(files):
            files.append({})
        files[seen[piece.key]][piece.key] = piece
        seen[piece.key] += 1
    written = Written(chunks=defaultdict(list), files={})
    for number, held in enumerate(files):
        name = f"shard-{rank + 1:05d}-model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        entries = {key: Entry(piece.rectangle.sizes, dtype_name(piece.view.dtype, key)) for key, piece in held.items()}
        metadata = sharding_metadata({key: piece.rectangle.offsets for key, piece in held.items()})
        data = {key: [raw_bytes(piece.view)] for key, piece in held.items()}
        written.files[name] = write_safetensors(directory / name, entries, metadata, data.__getitem__)
        for key, piece in held.items():
            written.chunks[key].append(Chunk(rectangle=piece.rectangle, file=name, crc32=zlib.crc32(data[key][0])))
    return written


def read_pieces(directory: Path, index: Index, pieces: Sequence[Piece]) -> None:
    """Fill the pieces' memory from the files, reading only the bytes they need. The index must have every key, in the right shape."""
    by_file: dict[str, list[tuple[Piece, Rectangle, Rectangle]]] = defaultdict(list)
    for piece in pieces:
        for chunk in index.tensors[piece.key].chunks:
            common = intersect(piece.rectangle, chunk.rectangle)
            if common is not None:
                by_file[chunk.file].append((piece, common.relative_to(chunk.rectangle), common.relative_to(piece.rectangle)))
    for name, wanted in by_file.items():
        with _opened(directory / name, index.files[name], [piece.key for piece, _, _ in wanted]) as file:
            for piece, there, here in wanted:
                piece.view[here.slices()].copy_(file.get_slice(piece.key)[there.slices()])


def check_chunks(directory: Path, index: Index, chunks: Iterable[tuple[str, Chunk]]) -> None:
    """Compare chunks with their checksums, a chunk at a time; the first that differs is an error."""
    by_file: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for key, chunk in chunks:
        by_file[chunk.file].append((key, chunk))
    for name, entries in sorted(by_file.items()):
        path = directory / name
        with _opened(path, index.files[name], [key for key, _ in entries]) as file:
            for key, chunk in entries:
                if chunk.crc32 != zlib.crc32(raw_bytes(file.get_tensor(key))):
                    raise DamagedCheckpointError(f"{path}: {key!r}: its bytes are not those that were saved: the checksum differs")


@contextmanager
def _opened(path: Path, stored: StoredFile, keys: Sequence[str]) -> Iterator[Any]:
    """A file that is there and whole; whatever reading it raises names it and what was wanted of it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            head += file.read(min(int.from_bytes(head, "little"), size))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot read it, and {keys[0]!r} is in it: {error.strerror or error}") from error
    if size != stored.size_bytes:
        raise DamagedCheckpointError(f"{path}: it has {size} bytes and should have {stored.size_bytes}; {keys[0]!r} is in it")
    if zlib.crc32(head) != stored.header_crc32:
        raise DamagedCheckpointError(f"{path}: its header is not what was saved: the checksum differs")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, RuntimeError, LookupError) as error:
        names = sorted(set(keys))
        shown = ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise DamagedCheckpointError(f"{path}: cannot read {shown}: {error}") from error
