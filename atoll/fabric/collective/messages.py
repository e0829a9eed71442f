"""What members of a reduction say to each other."""

from typing import TypeAlias

import msgspec
import torch

from atoll.codec.encoded import Encoded, Header

__all__ = ["EncodedChunk", "Failed", "Item", "CellProgress", "PullChunks", "Settled"]


class PullChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for chunks of a cell of a round, from `first` on, up to but not including `until` (None: to the end)."""

    round: str
    cell: int
    first: int = 0
    until: int | None = None


class EncodedChunk(msgspec.Struct, frozen=True, tag="chunk", forbid_unknown_fields=True):
    """A sum over some elements, encoded; the places of those members in it."""

    index: int
    contributors: tuple[int, ...]
    header: Header
    parts: tuple[torch.Tensor, ...]

    def encoded(self) -> Encoded:
        """As codecs know it."""
        return Encoded(self.header, self.parts)


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """A cell cannot be reduced, and because of whom."""

    blamed: tuple[str, ...]
    reason: str


Item: TypeAlias = EncodedChunk | Failed


class CellProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many chunks of a reduced cell a member holds, and whether more may come to it without help."""

    held: int
    final: bool


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a round ended for a member: the digest of the whole result, or None."""

    round: str
    digest: str | None
