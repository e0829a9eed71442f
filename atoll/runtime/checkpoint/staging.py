"""Staging: the copy in the CPU's memory that is written while training goes on. Its buffers are used again for the next save."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.runtime.checkpoint.assignment import Assigned
from atoll.runtime.checkpoint.held import Piece
from atoll.runtime.checkpoint.rectangles import intersect

__all__ = ["Staging"]


class Staging:
    """Copies of what a rank is to write."""

    def __init__(self) -> None:
        self._buffers: dict[Assigned, Tensor] = {}

    def copy(self, pieces: Sequence[Piece], assigned: Sequence[Assigned]) -> list[Piece]:
        """The assigned rectangles, copied out of the pieces that hold them. Training may go on when it returns."""
        by_key: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_key.setdefault(piece.key, []).append(piece)
        self._buffers = {one: self._buffer(one, by_key[one.key][0].view) for one in assigned}
        copies = []
        for one in assigned:
            source = by_key[one.key][0]
            for piece in by_key[one.key]:
                self._copy(one, piece)
            copies.append(Piece(one.key, source.shape, one.rectangle, self._buffers[one]))
        if any(piece.view.device.type != "cpu" for piece in pieces):
            torch.accelerator.synchronize()  # the copies were only queued
        return copies

    def _buffer(self, one: Assigned, like: Tensor) -> Tensor:
        known = self._buffers.get(one)
        if known is not None and known.dtype == like.dtype:
            return known
        return torch.empty(one.rectangle.sizes, dtype=like.dtype, pin_memory=like.device.type == "cuda")

    def _copy(self, one: Assigned, piece: Piece) -> None:
        common = intersect(one.rectangle, piece.rectangle)
        if common is not None:
            target = self._buffers[one][common.relative_to(one.rectangle).slices()]
            target.copy_(piece.view[common.relative_to(piece.rectangle).slices()], non_blocking=True)
