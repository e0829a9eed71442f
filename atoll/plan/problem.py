"""Problem: a rule that a plan breaks, in a sentence, and the cell of the plan's table it speaks of."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Mark", "Problem"]


@dataclass(frozen=True)
class Mark:
    """Which cell is wrong: a column of a stage (and of one replica, and one device in it), or a field of the plan when `stage` is -1."""

    column: str
    stage: int = -1
    replica: int = -1
    device: int = -1  # position among the replica's devices


class Problem(NamedTuple):
    """One broken rule: a sentence, and the cell of the table it speaks of."""

    sentence: str
    mark: Mark
