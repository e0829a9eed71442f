"""Catching up: a joiner whose state is superseded while it arrives finishes it, and makes the missed step with the sums of its donors."""

from collections.abc import Collection

from atoll.control.messages import Reduce, Round, StageReduction

__all__ = ["DONORS", "ENOUGH", "sums_from"]

DONORS = 4  # of a joiner, at most
ENOUGH = 0.5  # of a state's chunks: with fewer, beginning anew is as quick as finishing and fetching the sums too


def sums_from(donors: Collection[str], round: Round, sums: int, chunks: int) -> Reduce:
    """An order by which whoever takes no part gets every sum of a committed round from those who have kept it."""
    names = sorted(donors)
    owners = tuple(names[chunk % len(names)] for chunk in range(chunks))
    return Reduce(round, (StageReduction((), (), owners),) * sums)
