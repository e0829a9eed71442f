"""Reduction: what a round gave one member, and what it may conclude from it."""

import hashlib

import msgspec
import torch

from atoll.errors import CollectiveError

__all__ = ["PartOutcome", "Reduction"]


class PartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Elements `start` to `stop` of the result: whose contributions are in them. None are: the part is missing, and why."""

    start: int
    stop: int
    owner: str
    contributors: tuple[str, ...]
    blamed: tuple[str, ...] = ()
    reason: str = ""
    digest: str = ""  # of the bytes everybody decoded


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    """The result at one member. Where a part is missing, `value` there is zero and must not be used.

    Members whose digests are equal hold bit-identical values with the same contributions in them. `digest` is None when parts are missing.
    """

    round: str
    value: torch.Tensor
    parts: tuple[PartOutcome, ...]
    expected: tuple[str, ...]  # whose contributions should be in it

    @property
    def missing(self) -> tuple[PartOutcome, ...]:
        """Parts nobody could give."""
        return tuple(part for part in self.parts if not part.contributors)

    @property
    def complete(self) -> bool:
        """Whether every contribution is in every part."""
        return all(set(part.contributors) == set(self.expected) for part in self.parts)

    @property
    def blamed(self) -> tuple[str, ...]:
        """Who was lost, or did not deliver, so that something is missing."""
        left_out = {name for part in self.parts for name in self.expected if part.contributors and name not in part.contributors}
        return tuple(sorted(left_out | {name for part in self.parts for name in part.blamed}))

    @property
    def digest(self) -> str | None:
        """Equal for members that hold the same values; None where some are missing."""
        if self.missing:
            return None
        found = hashlib.sha256(self.round.encode())
        for part in self.parts:
            found.update(msgspec.msgpack.encode((part.start, part.stop, part.contributors, part.digest)))
        return found.hexdigest()

    def require_complete(self) -> torch.Tensor:
        """The value, if every contribution is in every part; CollectiveError naming who is missing otherwise."""
        if self.complete:
            return self.value
        texts = [f"elements {part.start}–{part.stop}: {_shortage(part, self.expected)}" for part in self.parts]
        short = [text for text, part in zip(texts, self.parts, strict=True) if set(part.contributors) != set(self.expected)]
        more = f"; and {len(short) - 3} parts more" if len(short) > 3 else ""
        raise CollectiveError(f"round {self.round} is not complete: {'; '.join(short[:3])}{more}", self.blamed)


def _shortage(part: PartOutcome, expected: tuple[str, ...]) -> str:
    if not part.contributors:
        return f"missing, {part.reason}"
    return f"without {', '.join(name for name in expected if name not in part.contributors)}"
