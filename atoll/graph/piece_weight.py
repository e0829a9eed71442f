"""What the pieces of a batch weigh where the loss is code that could not be captured, so that no program says what it divides by.

The usual losses are tried on the first samples, whole and in pieces (`loss_check.py`): a mean over samples, a sum, a mean over the labels
that are not ignored, of all positions or of all but the first (as models that predict the next token have it).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

__all__ = ["BY_SAMPLES", "IGNORED", "PieceWeight", "possible_weights"]

IGNORED = -100  # PyTorch's, and everybody's, label that does not count


class PieceWeight(msgspec.Struct, frozen=True):
    """How the losses of pieces are put together: Σ value · factor ÷ Σ weight. It travels between processes."""

    kind: Literal["samples", "sum", "labels"] = "samples"
    leaf: int = 0  # of "labels": which tensor of the batch has them, counted as PyTorch's trees do
    first: int = 0  # of "labels": positions before this one are not predicted

    def of(self, leaves: Sequence[Any], samples: int, batch_size: int) -> tuple[float, float]:
        """Factor and weight of a piece of so many samples."""
        if self.kind == "sum":
            return 1.0, samples / batch_size
        weight = float(samples if self.kind == "samples" else self._counted(leaves[self.leaf]))
        return weight, weight

    def _counted(self, labels: Tensor) -> int:
        return int(((labels[:, self.first :] if self.first else labels) != IGNORED).sum())

    @property
    def note(self) -> str:
        """For people; nothing to say of a mean over samples."""
        if self.kind == "samples":
            return ""
        labels = f"a mean over the labels that are not {IGNORED}{', the first of each sample aside' if self.first else ''}"
        return (
            f"the loss is {labels if self.kind == 'labels' else 'a sum'}, as the first samples show; pieces of a batch are put together so"
        )


BY_SAMPLES = PieceWeight()


def possible_weights(leaves: Sequence[Any], samples: int) -> Iterator[PieceWeight]:
    """What a loss may be other than a mean over samples; whole numbers of a batch may be labels."""
    yield PieceWeight("sum")
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.dim() and leaf.shape[0] == samples:
            yield PieceWeight("labels", place)
            if leaf.dim() > 1:
                yield PieceWeight("labels", place, 1)
