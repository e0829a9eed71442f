"""Tensors to and from safetensors files, as a writer and a reader of `torch.distributed.checkpoint`.

The files are what its `HuggingFaceStorageWriter` leaves in distributed saving: every rank its own, each tensor's offsets in the header, no
`.metadata`; its `HuggingFaceStorageReader` reads them, without Atoll. Three things differ, for reasons in
docs/decisions/0009-checkpoints.md: a rank may write several rectangles of one tensor (they go to different files), files are streamed,
and the reader knows where everything is from `index.json`.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from atoll.errors import DamagedCheckpointError
from atoll.runtime.checkpoint.local_shard import Piece
from atoll.runtime.checkpoint.manifest import Chunk, Index, StoredTensor
from atoll.runtime.checkpoint.rectangles import Rectangle, intersect
from atoll.runtime.checkpoint.safetensors_file import DTYPES, Entry, StoredFile, dtype_name, raw_bytes, read_header, write_safetensors

__all__ = ["Written", "check_chunks", "read_pieces", "write_pieces"]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wrote: chunks by key, files with their sizes."""

    chunks: dict[str, list[Chunk]]
    files: dict[str, StoredFile]


def write_pieces(directory: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Write a rank's pieces, contiguous and on the CPU, into new files. They are on disk when it returns."""
    planner = _Pieces(pieces)
    writer = _RankWriter(directory, rank)
    results = writer.write_data(planner.create_local_plan(), planner).wait()
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for piece, result in zip(pieces, results, strict=True):
        checksum = zlib.crc32(raw_bytes(piece.view)) if piece.view.numel() else 0
        chunks[piece.key].append(Chunk(rectangle=piece.rectangle, file=result.storage_data, crc32=checksum))
    return Written(chunks=chunks, files=writer.files)


def read_pieces(directory: Path, index: Index, pieces: Sequence[Piece]) -> None:
    """Fill the pieces' memory from the files, reading only the bytes they need. The index must have every key, in the right shape."""
    planner = _Wanted(index, pieces)
    reader = _IndexReader(directory, index)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


def check_chunks(directory: Path, index: Index, chunks: Iterable[tuple[str, Chunk]]) -> None:
    """Compare chunks with their checksums, a chunk at a time; the first that differs is an error."""
    from safetensors import safe_open

    by_file: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for key, chunk in chunks:
        by_file[chunk.file].append((key, chunk))
    for name, entries in sorted(by_file.items()):
        path = directory / name
        _check_file(path, index.files[name], entries[0][0])
        with _naming(path, [key for key, _ in entries]), safe_open(path, framework="pt") as file:
            for key, chunk in entries:
                data = file.get_tensor(key)
                if chunk.crc32 is not None and chunk.crc32 != (zlib.crc32(raw_bytes(data)) if data.numel() else 0):
                    raise DamagedCheckpointError(f"{path}: {key!r}: its bytes are not those that were saved: the checksum differs")


@contextmanager
def _naming(path: Path, keys: Iterable[str]) -> Iterator[None]:
    """Whatever reading a file raises names the file and what was wanted of it."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, RuntimeError, AssertionError, LookupError) as error:
        names = sorted(set(keys))
        shown = ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise DamagedCheckpointError(f"{path}: cannot read {shown}: {error}") from error


class _Pieces(DefaultSavePlanner):
    """Plans to write what it was given; who writes what was settled before."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = pieces
        self.views = {MetadataIndex(piece.key, piece.rectangle.offsets): piece.view for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self.pieces])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.views[index]


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, piece.rectangle.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk_metadata(piece.rectangle),
            properties=TensorProperties.create_from_tensor(piece.view),
            size=torch.Size(piece.shape),
        ),
    )


def _chunk_metadata(rectangle: Rectangle) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(rectangle.offsets), sizes=torch.Size(rectangle.sizes))


class _RankWriter(HuggingFaceStorageWriter):
    """One rank's files. A file holds a key once, so the second rectangle of a tensor goes to the rank's second file."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(str(directory), save_distributed=True)
        self.directory, self.number = directory, rank + 1
        self.files: dict[str, StoredFile] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: list[dict[str, WriteItem]] = []
        places: list[int] = []
        seen: dict[str, int] = defaultdict(int)
        for item in plan.items:
            place = seen[item.index.fqn]
            seen[item.index.fqn] += 1
            files.extend([{}] if place == len(files) else [])
            files[place][item.index.fqn] = item
            places.append(place)
        names = [f"shard-{self.number:05d}-model-{place + 1:05d}-of-{len(files):05d}.safetensors" for place in range(len(files))]
        for name, items in zip(names, files, strict=True):
            self.files[name] = self._write_file(self.directory / name, items, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result([_result(item, names[place]) for item, place in zip(plan.items, places, strict=True)])
        return done

    def _write_file(self, path: Path, items: Mapping[str, WriteItem], planner: SavePlanner) -> StoredFile:
        entries: dict[str, Entry] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for key, item in items.items():
            assert item.tensor_data is not None
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            entries[key] = Entry(tuple(chunk.sizes), dtype_name(dtype, key))
            offsets[key] = {"saved_offsets": list(chunk.offsets)}
        metadata = {"DCP_SHARDING_INFO": msgspec.json.encode(offsets).decode(), "DCP_VERSION": "1.0", "format": "pt"}

        def write(key: str, file: BinaryIO) -> None:
            data = planner.resolve_data(items[key])
            assert isinstance(data, Tensor)
            if data.numel():
                file.write(raw_bytes(data))

        return write_safetensors(path, entries, metadata, write)


def _result(item: WriteItem, name: str) -> WriteResult:
    assert item.tensor_data is not None
    elements = torch.Size(item.tensor_data.chunk.sizes).numel()
    return WriteResult(index=item.index, size_in_bytes=elements * item.tensor_data.properties.dtype.itemsize, storage_data=name)


class _Wanted(DefaultLoadPlanner):
    """Plans to read each piece from every stored chunk that shares indices with it."""

    def __init__(self, index: Index, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.index, self.pieces = index, pieces

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                _read_item(piece, number, chunk.rectangle, common)
                for number, piece in enumerate(self.pieces)
                for chunk in self.index.tensors[piece.key].chunks
                if (common := intersect(piece.rectangle, chunk.rectangle)) is not None
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self.pieces[index.index].view


def _read_item(piece: Piece, number: int, stored: Rectangle, common: Rectangle) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(piece.key, piece.rectangle.offsets, number),
        dest_offsets=torch.Size(common.relative_to(piece.rectangle).offsets),
        storage_index=MetadataIndex(piece.key, stored.offsets),
        storage_offsets=torch.Size(common.relative_to(stored).offsets),
        lengths=torch.Size(common.sizes),
    )


class _FileOf:
    """What the reader of `torch.distributed.checkpoint` asks of a storage entry."""

    def __init__(self, path: Path) -> None:
        self.relative_path = str(path)


class _IndexReader(HuggingFaceStorageReader):
    """Finds tensors through an index instead of opening every file; its errors name the file and the tensor."""

    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__(str(directory))
        self.directory, self.index = directory, index
        self._names = {str(directory / name): name for name in index.files}

    def read_metadata(self) -> Metadata:
        tensors = {key: _tensor_metadata(tensor) for key, tensor in self.index.tensors.items()}
        places = {
            MetadataIndex(key, chunk.rectangle.offsets): _FileOf(self.directory / chunk.file)
            for key, tensor in self.index.tensors.items()
            for chunk in tensor.chunks
        }
        return Metadata(state_dict_metadata=dict(tensors), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: DefaultLoadPlanner) -> Future[None]:  # type: ignore[override]
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            path, key = Path(name), items[0].storage_index.fqn
            _check_file(path, self.index.files[self._names[name]], key)
            with _naming(path, (item.storage_index.fqn for item in items)):
                super().read_data(LoadPlan(items), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=torch.Size(tensor.shape),
        chunks=[_chunk_metadata(chunk.rectangle) for chunk in tensor.chunks],
    )


def _check_file(path: Path, stored: StoredFile, key: str) -> None:
    """That the file is there and whole, before it is mapped into memory."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot read it, and {key!r} is in it: {error.strerror or error}") from error
    if size != stored.size_bytes:
        raise DamagedCheckpointError(f"{path}: it has {size} bytes and should have {stored.size_bytes}; {key!r} is in it")
    read_header(path, stored.header_crc32)
