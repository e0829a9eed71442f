"""Catching up: a joiner whose state is superseded while it arrives finishes it, and makes the missed step with the sums of its donors."""

from collections.abc import Collection, Mapping
from typing import Any

from atoll.control.messages import Reduce, Round, StageReduction

__all__ = ["ENOUGH", "Past", "sums_from"]

ENOUGH = 0.5  # of a state's chunks: with fewer, beginning anew is as quick as finishing and fetching the sums too


class Past:
    """What a donor keeps of a step, where somebody was fetching its state: the state before it, and the sums it was made with."""

    __slots__ = ("position", "round", "state", "_sums")

    def __init__(self, position: tuple[int, int, int], round: Round, state: Any, sums: Mapping[int, Mapping[int, Any]]) -> None:
        self.position = position  # epoch, version, stage
        self.round = round
        self.state = state
        self._sums = sums  # by number of the sum, and chunk

    def sum(self, number: int, chunk: int) -> Any:
        """One chunk of a committed sum; None where it is none of this stage."""
        return self._sums.get(number, {}).get(chunk)


def sums_from(donors: Collection[str], round: Round, sums: int, chunks: int) -> Reduce:
    """An order by which whoever takes no part gets every sum of a committed round from those who have kept it."""
    names = sorted(donors)
    owners = tuple(names[chunk % len(names)] for chunk in range(chunks))
    return Reduce(round, (StageReduction((), (), owners),) * sums)
