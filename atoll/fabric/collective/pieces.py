"""Where a receiver keeps the pieces of a state: in memory, or in files that outlive it, so that a later attempt goes on from there."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from atoll.errors import FabricError
from atoll.fabric.collective.state import StateManifest, piece_digest

__all__ = ["FilePieces", "MemoryPieces", "PieceStore"]


class PieceStore(Protocol):
    """Keeps verified pieces."""

    def begin(self, manifest: StateManifest) -> set[int]:
        """Makes room; which pieces of exactly this state are here already. Of another state nothing is kept."""

    def write(self, index: int, parts: Sequence[torch.Tensor]) -> None:
        """Keeps a verified piece."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state."""


class MemoryPieces:
    """In memory: kept as long as this object."""

    def __init__(self) -> None:
        self._manifest: StateManifest | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        self._held: set[int] = set()

    def begin(self, manifest: StateManifest) -> set[int]:
        """Makes room."""
        if self._manifest != manifest:
            self._manifest, self._held = manifest, set()
            self._data = torch.zeros(manifest.size_bytes, dtype=torch.uint8)
        return set(self._held)

    def write(self, index: int, parts: Sequence[torch.Tensor]) -> None:
        """Copies a piece to its place."""
        assert self._manifest is not None
        _place(self._data, self._manifest.span(index), parts)
        self._held.add(index)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state."""
        assert self._manifest is not None
        return self._manifest.tensors_of(self._data)


class FilePieces:
    """In a directory: `pieces.bin` holds the bytes, `pieces.txt` which of them were verified. Kept when the process dies.

    What the list names is verified again at the beginning, as a crash may have come between a piece and its bytes on disk.
    """

    def __init__(self, directory: Path | str) -> None:
        directory = Path(directory)
        self._data_path, self._list_path = directory / "pieces.bin", directory / "pieces.txt"
        self._manifest: StateManifest | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FabricError(f"{directory}: cannot keep a state there: {error.strerror or error}") from None

    def begin(self, manifest: StateManifest) -> set[int]:
        """Opens what is there, or makes it anew."""
        self._manifest = manifest
        listed = self._listed(manifest)
        try:
            if not listed:
                self._list_path.unlink(missing_ok=True)
                with self._data_path.open("wb") as file:
                    file.truncate(manifest.size_bytes)
                self._list_path.write_text(f"{manifest.digest}\n", "utf-8")
        except OSError as error:
            raise FabricError(f"{self._data_path}: cannot keep a state there: {error.strerror or error}") from None
        if manifest.size_bytes:
            self._data = torch.from_file(str(self._data_path), shared=True, size=manifest.size_bytes, dtype=torch.uint8)
        return {index for index in listed if piece_digest([self._data[slice(*manifest.span(index))]]) == manifest.digests[index]}

    def write(self, index: int, parts: Sequence[torch.Tensor]) -> None:
        """Copies a piece to its place, then lists it."""
        assert self._manifest is not None
        _place(self._data, self._manifest.span(index), parts)
        with self._list_path.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state, read from the file as it is used."""
        assert self._manifest is not None
        return self._manifest.tensors_of(self._data)

    def _listed(self, manifest: StateManifest) -> set[int]:
        """Pieces an earlier attempt at the same state listed."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            first, *rest = self._list_path.read_text("utf-8").split("\n")
            if first == manifest.digest and os.path.getsize(self._data_path) == manifest.size_bytes:
                return {int(line) for line in rest if line.isdigit() and int(line) < len(manifest.digests)}
        return set()


def _place(data: torch.Tensor, span: tuple[int, int], parts: Sequence[torch.Tensor]) -> None:
    here, end = span
    for part in parts:
        data[here : here + part.numel()] = part
        here += part.numel()
    assert here == end, "a verified piece has its length"
