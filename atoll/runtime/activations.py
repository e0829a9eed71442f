"""Activations: what travels with a micro-batch from stage to stage — activations, and what later stages need of the batch itself.

Workers therefore need no data: feeders read it, and what is not used before the last stage (labels, masks) passes through.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

if TYPE_CHECKING:  # it loads what captures models, and the coordinator, which passes their codecs on, captures none
    from atoll.runtime.stage.program import StageProgram

__all__ = ["Activations", "activations_of", "leaves_from"]


class Activations(msgspec.Struct, frozen=True, array_like=True):
    """What enters a stage."""

    binding: tuple[int, ...]  # the batch's sizes, which some shapes are computed from
    leaves: dict[str, Any]  # the batch's leaves that this stage or a later one reads
    values: list[Tensor]  # what the stage before made


def activations_of(entering: Any) -> Activations:
    """What enters, typed: messages from elsewhere bring it as plain lists."""
    if isinstance(entering, Activations):
        return entering
    binding, leaves, values = entering
    return Activations(tuple(binding), leaves, list(values))


def leaves_from(programs: "Sequence[StageProgram]") -> list[frozenset[str]]:
    """For every stage the leaves of the batch that it or a later one reads."""
    needed: frozenset[str] = frozenset()
    rows = []
    for program in reversed(programs):
        batch = {name for name in program.batch if name}
        needed |= {name for unit in (program.prologue, *program.units) for name in unit.inputs if name in batch}
        needed |= {name for name in program.results if isinstance(name, str) and name in batch}
        rows.append(needed)
    return rows[::-1]
