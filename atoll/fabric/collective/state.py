"""States: named tensors as one row of bytes, cut into pieces with digests. What donors offer and receivers verify. Pure."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from atoll.errors import FabricError
from atoll.fabric.headers import TensorHeader
from atoll.fabric.tensors import DTYPES, tensor_bytes, tensor_header, tensor_size

__all__ = ["PIECE_BYTES", "State", "StateManifest", "TensorPlace", "piece_digest"]

PIECE_BYTES = 4 << 20
_ALIGNMENT = 64
_MOST_PIECES = 1 << 20


class TensorPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's name, kind and first byte."""

    name: str
    header: TensorHeader
    offset: int


class StateManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a state consists of. Two donors hold the same state exactly when their manifests' digests are equal."""

    state: str
    tensors: tuple[TensorPlace, ...]
    size_bytes: int
    piece_bytes: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        edge = 0
        for place in self.tensors:
            if place.offset < edge or any(length < 0 for length in place.header.shape):
                raise FabricError(f"state {self.state!r}: tensor {place.name!r} overlaps the one before it")
            edge = place.offset + tensor_size(place.header)
        pieces = math.ceil(self.size_bytes / self.piece_bytes) if self.piece_bytes > 0 else -1
        if edge > self.size_bytes or pieces != len(self.digests) or pieces > _MOST_PIECES:
            raise FabricError(f"state {self.state!r}: {len(self.digests)} pieces of {self.piece_bytes} bytes do not make {self.size_bytes}")

    @property
    def digest(self) -> str:
        """Of everything in it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    def span(self, piece: int) -> tuple[int, int]:
        """A piece's bytes: (first, end)."""
        return piece * self.piece_bytes, min((piece + 1) * self.piece_bytes, self.size_bytes)

    def tensors_of(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, as views of all bytes."""
        found: dict[str, torch.Tensor] = {}
        for place in self.tensors:
            size = tensor_size(place.header)
            dtype = DTYPES[place.header.dtype]
            body = data[place.offset : place.offset + size]
            found[place.name] = body.view(dtype).view(place.header.shape) if size else torch.empty(place.header.shape, dtype=dtype)
        return found


class State:
    """Tensors that are offered. They must not change while they are."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor], piece_bytes: int = PIECE_BYTES) -> None:
        places: list[TensorPlace] = []
        self._bytes: list[tuple[int, torch.Tensor]] = []  # first byte, and the tensor's bytes
        offset = 0
        for key, tensor in tensors.items():
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            header = tensor_header(tensor)
            places.append(TensorPlace(key, header, offset))
            if size := tensor_size(header):
                view = torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8)
                self._bytes.append((offset, view))
                offset += size
        layout = {"state": name, "tensors": tuple(places), "size_bytes": offset, "piece_bytes": piece_bytes}
        spans = [(first, min(first + piece_bytes, offset)) for first in range(0, offset, piece_bytes)]
        digests = tuple(piece_digest(self._between(first, end)) for first, end in spans)
        self.manifest = StateManifest(**layout, digests=digests)  # type: ignore[arg-type]

    def piece(self, index: int) -> list[torch.Tensor]:
        """A piece's bytes, from the tensors' own memory; FabricError if there is no such piece."""
        if not 0 <= index < len(self.manifest.digests):
            raise FabricError(f"state {self.manifest.state!r} has {len(self.manifest.digests)} pieces, and no piece {index}")
        return self._between(*self.manifest.span(index))

    def _between(self, first: int, end: int) -> list[torch.Tensor]:
        """Bytes of tensors, and zeros where tensors were aligned."""
        found: list[torch.Tensor] = []
        here = first
        for offset, data in self._bytes:
            if offset >= end or offset + data.numel() <= here:
                continue
            if offset > here:
                found.append(torch.zeros(offset - here, dtype=torch.uint8))
                here = offset
            part = data[here - offset : end - offset]
            found.append(part)
            here += part.numel()
        return found if here == end else [*found, torch.zeros(end - here, dtype=torch.uint8)]


def piece_digest(parts: Sequence[torch.Tensor]) -> str:
    """Of a piece's bytes, however they are divided."""
    found = hashlib.sha256()
    for part in parts:
        found.update(tensor_bytes(part))
    return found.hexdigest()
