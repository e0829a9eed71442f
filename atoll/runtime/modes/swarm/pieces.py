"""Pieces: a micro-batch divided by samples among the devices of a group, and what they made of it put together again. Pure."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.graph.capture import Captured
from atoll.plan.division import apportion
from atoll.runtime.activations import Activations
from atoll.runtime.stage.program import Crossing, StageProgram
from atoll.runtime.stage.sizes import Sizes

__all__ = ["Pieces", "Range", "divided"]

Range = tuple[int, int]
"""First sample and end."""


def divided(micro_batches: Sequence[Range], shares: Sequence[int]) -> list[list[Range]]:
    """For every device its samples of each micro-batch, in proportion to the shares; a device may get none of a small one."""
    rows: list[list[Range]] = [[] for _ in shares]
    for start, stop in micro_batches:
        for row, samples in zip(rows, apportion(stop - start, shares), strict=True):
            row.append((start, start + samples))
            start += samples
    return rows


class Pieces:
    """How what enters and leaves each stage is cut and joined. Ranges count from the first sample of the micro-batch."""

    def __init__(self, captured: Captured, programs: Sequence[StageProgram]) -> None:
        self.sizes, self._programs = Sizes(captured), programs

    def why_not(self, stage: int) -> str | None:
        """Why micro-batches of a stage cannot be divided; None where nothing is known against it."""
        program = self._programs[stage]
        if self.sizes.fixed is not None:
            return f"the job was captured for {self.sizes.fixed} samples only"
        for crossing in (*program.receives, *program.sends):
            if not self.sizes.divisible(crossing):
                return f"the value {crossing.name!r} that passes between stages has no dimension of its own for samples"
        return None

    def parcel(self, stage: int, entering: Activations, piece: Range) -> Activations:
        """A piece of what enters a stage."""
        start, stop = piece
        values = self._cut(self._programs[stage].receives, entering.values, piece)
        return Activations(self.sizes.of_piece(entering.binding, stop - start), self.sizes.take(entering.leaves, start, stop), values)

    def leaving(self, stage: int, entering: Activations, made: Sequence[Activations]) -> Activations:
        """What leaves a stage, from what pieces of what entered became. What does not depend on samples all have made: the first one's."""
        values = self._join(self._programs[stage].sends, [piece.values for piece in made], lambda parts: parts[0])
        return Activations(entering.binding, {name: entering.leaves[name] for name in made[0].leaves}, values)

    def gradients(self, stage: int, given: Sequence[Tensor], piece: Range) -> list[Tensor]:
        """A piece of the gradients of what left a stage; that of a value without samples goes to whoever made it, the first piece."""
        wanting = [crossing for crossing in self._programs[stage].sends if crossing.wants_gradient]
        cut = self._cut(wanting, given, piece)
        if piece[0] == 0:
            return cut
        return [value if self._dim(crossing) is not None else torch.zeros_like(value) for value, crossing in zip(cut, wanting, strict=True)]

    def gradients_back(self, stage: int, made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The gradients of what entered a stage; a value all pieces used gets the sum of theirs."""
        wanting = [crossing for crossing in self._programs[stage].receives if crossing.wants_gradient]
        return self._join(wanting, made, lambda parts: torch.stack(parts).sum(0))

    def _dim(self, crossing: Crossing) -> int | None:
        return self.sizes.sample_dim(crossing)

    def _cut(self, crossings: Sequence[Crossing], values: Sequence[Tensor], piece: Range) -> list[Tensor]:
        start, stop = piece
        dims = [self._dim(crossing) for crossing in crossings]
        return [v if d is None else v.narrow(d, start, stop - start) for v, d in zip(values, dims, strict=True)]

    def _join(
        self, crossings: Sequence[Crossing], made: Sequence[Sequence[Tensor]], otherwise: Callable[[list[Tensor]], Tensor]
    ) -> list[Tensor]:
        joined = []
        for crossing, *parts in zip(crossings, *made, strict=True):
            dim = self._dim(crossing)
            joined.append(otherwise(parts) if dim is None else torch.cat(parts, dim))
        return joined
