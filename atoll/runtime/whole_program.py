"""How one process computes pieces of a batch that add up to its loss: by the user's own code, each value by what the piece weighs.

Where the loss has several terms, which a value does not show, the captured program is run on the model's own parameters and buffers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError, DividedLossError
from atoll.graph.capture import Captured
from atoll.graph.eager import capture_for_pieces
from atoll.graph.loss_check import check_eagerly, notes_on_pieces
from atoll.graph.loss_weight import BatchWeights
from atoll.graph.piece_weight import PieceWeight
from atoll.job import Job, LossValue
from atoll.runtime.activations import Activations
from atoll.runtime.executor import Accumulated, BuiltStage, Loss, StageExecutor, Updater, WorkItem
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.module import SharingBuilder
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState

__all__ = ["Divided", "OwnCounts", "PieceCounts", "WholeProgram", "divided_program"]


class Divided(NamedTuple):
    """How pieces of a batch are computed here: by the user's own code, by samples or as `counts` says, or by the program."""

    program: Captured | None = None
    counts: "PieceCounts | None" = None
    own_counts: "OwnCounts | None" = None  # the same of a loss that could not be captured
    notes: tuple[str, ...] = ()  # what could not be found out

    @classmethod
    def of(cls, captured: Captured, notes: tuple[str, ...] = ()) -> "Divided":
        """The user's own code wherever it can be."""
        form = captured.loss_form
        if form.counts is not None:
            return cls(counts=PieceCounts(Sizes(captured), form.counts), notes=notes)
        return cls(captured if form.kind in ("counted", "terms") else None, notes=notes)


class PieceCounts:
    """What the pieces of a batch weigh, where a loss is a mean over what the batch's labels or mask count."""

    def __init__(self, sizes: Sizes, weights: BatchWeights) -> None:
        self._sizes, self._weights = sizes, weights
        (self.floor,) = weights.floors

    def of(self, batch: Any) -> float:
        """What the value of a piece is divided by."""
        return max(float(self._weights.of(self._sizes.leaves(batch))), self.floor)

    def shares(self, batches: Sequence[Any]) -> tuple[list[float], float]:
        """The share each piece has in the batch's loss, and what that is divided by."""
        counted = [float(self._weights.of(self._sizes.leaves(batch))) for batch in batches]
        whole = max(sum(counted), self.floor)
        return [max(count, self.floor) / whole if whole else 0.0 for count in counted], whole


class OwnCounts:
    """What the pieces of a batch weigh, where the loss could not be captured."""

    def __init__(self, weight: PieceWeight, pieces: Sequence[tuple[int, int]]) -> None:
        self._weight, self._samples = weight, [stop - start for start, stop in pieces]

    def shares(self, batches: Sequence[Any]) -> tuple[list[float], float]:
        """The share each piece has in the batch's loss, and what that is divided by."""
        size = sum(self._samples)
        weighed = [self._weight.of(pytree.tree_leaves(batch), own, size) for batch, own in zip(batches, self._samples, strict=True)]
        whole = sum(weight for _, weight in weighed)
        return [factor / whole if whole else 0.0 for factor, _ in weighed], whole


def divided_program(job: Job, model: nn.Module) -> Divided:
    """What computes micro-batches whose losses add up to the batch's; DividedLossError where nothing does."""
    try:
        captured = capture_for_pieces(job, check=True)
    except DividedLossError:
        raise
    except CaptureError as error:
        found = check_eagerly(job, model)
        model.train()
        by_samples = found.weight.kind == "samples"
        averaged = f"{'micro-batches are averaged by samples' if by_samples else found.weight.note}; the job cannot be captured: {error}"
        counts = None if by_samples else OwnCounts(found.weight, job.micro_batches)
        return Divided(own_counts=counts, notes=tuple(filter(None, (averaged, found.note))))
    return Divided.of(captured, notes_on_pieces(captured.notes))


class WholeProgram:
    """All layers of a program on one device; training leaves gradients in the model's `.grad`."""

    def __init__(
        self, job: Job, captured: Captured, model: nn.Module, device: torch.device, updater: Updater, compiler: Compiler | None = None
    ) -> None:
        key = DrawKey(job.seed)
        builder = SharingBuilder(InitialState(captured, model), device=device, key=key)
        program = cut_stage(captured, 0, len(captured.graph.layers))
        self.sizes = Sizes(captured)
        self._executor = StageExecutor(
            {0: BuiltStage(program=program, module=builder.stage(program))},
            sizes=self.sizes,
            loss=captured.program.call_spec.out_spec,
            key=key,
            autocast=lambda: job.autocast(device),
            generators=key.lock,
            gradients=Accumulated(job.batch_size),
            updater=updater,
            compiler=compiler,
        )

    @property
    def deferred(self) -> bool:
        """Whether gradients are to be divided by the weight of the batch when all its pieces are in."""
        return self._executor.deferred

    def train(self, work: WorkItem, batch: Any, weights: torch.Tensor | None) -> Loss:
        """Forward and backward of a piece; what it adds to the batch's loss."""
        self._executor.forward(work, self._activations(batch, weights))
        loss = self._executor.loss(work)
        self._executor.backward(work, [])
        return loss

    def evaluate(self, work: WorkItem, batch: Any) -> LossValue:
        """What the program returns for a piece."""
        found = self._executor.evaluate(work, self._activations(batch, None))
        assert isinstance(found, LossValue)
        return found

    def _activations(self, batch: Any, weights: torch.Tensor | None) -> Activations:
        leaves = self.sizes.leaves(batch, weights)
        return Activations(self.sizes.bind(leaves), leaves, [])
