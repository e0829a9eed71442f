"""Sharing: which ranks hold the same part of a parameter and must add up their gradients. Pure.

Every holder of a part contributes what its own micro-batches (or its own use of a tied parameter) made of the gradient; the gradient is the
sum. Ranks of one lane that hold the same part have the same gradient already, so each counts for its share of one.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["GradientGroup", "Share", "gradient_groups"]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's hold on a parameter through one stage."""

    rank: int
    stage: int
    tensor: int  # the rank's index along its lane
    lane: tuple[int, ...]  # ranks of the lane it is in
    holding: ShardSpec


class GradientGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a parameter, and who adds up its gradient: ranks, and how many times over each counts (1 ÷ repeats)."""

    name: str
    dim: int | None  # None: the whole
    start: int = 0
    stop: int = 0
    ranks: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()  # by rank: ranks of its lane that have the same gradient
    holders: int = 1  # ranks that hold the part, those of other groups included: what one of its numbers counts in a norm
    stages: tuple[int, ...] = ()


def gradient_groups(shares: Sequence[Share]) -> list[GradientGroup]:
    """The parts of one parameter, ascending. Where lanes line up, ranks agree with those at the same index of other lanes only."""
    dims = {share.holding.dim for share in shares} - {None}
    assert len(dims) <= 1, f"{shares[0].holding.name} is divided along {dims}"
    dim = dims.pop() if dims else None
    length = shares[0].holding.shape[dim] if dim is not None else 1
    bounds = {0, length} | {bound for share in shares for part in share.holding.parts for bound in part}
    parts: list[GradientGroup] = []
    for start, stop in pairwise(sorted(bounds)):
        holders = [share for share in shares if dim is None or _covers(share.holding, start, stop)]
        for part in _groups(holders, dim, start, stop):
            if parts and _continues(parts[-1], part):
                parts[-1] = msgspec.structs.replace(parts[-1], stop=part.stop)
            else:
                parts.append(part)
    return parts


def _covers(holding: ShardSpec, start: int, stop: int) -> bool:
    return holding.dim is None or any(first <= start and stop <= last for first, last in holding.parts)


def _groups(holders: list[Share], dim: int | None, start: int, stop: int) -> list[GradientGroup]:
    repeats = {share.rank: len({other.rank for other in holders if other.rank in share.lane}) for share in holders}
    stages = tuple(sorted({share.stage for share in holders}))
    count = len(repeats)
    rows = [sorted(repeats)]
    if len(set(repeats.values())) == 1 and next(iter(repeats.values())) > 1:
        rows = _by_index(holders)
    name = holders[0].holding.name
    return [
        GradientGroup(
            name=name,
            dim=dim,
            start=start,
            stop=stop,
            ranks=tuple(row),
            repeats=tuple(repeats[rank] if len(rows) == 1 else 1 for rank in row),
            holders=count,
            stages=stages,
        )
        for row in rows
    ]


def _by_index(holders: list[Share]) -> list[list[int]]:
    """Ranks at the same index of their lanes."""
    rows: dict[int, set[int]] = {}
    for share in holders:
        rows.setdefault(share.tensor, set()).add(share.rank)
    sizes = {len(row) for row in rows.values()}
    if len(sizes) > 1 or sum(len(row) for row in rows.values()) != len({share.rank for share in holders}):
        return [sorted({share.rank for share in holders})]
    return [sorted(row) for _, row in sorted(rows.items())]


def _continues(before: GradientGroup, part: GradientGroup) -> bool:
    same = (before.ranks, before.repeats, before.holders, before.dim) == (part.ranks, part.repeats, part.holders, part.dim)
    return same and before.stop == part.start and part.dim is not None
