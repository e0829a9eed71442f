"""What the loss of a step is divided by, where it has several terms: known before the step to whoever loads data, from the whole batch.

The order of the data is known to everybody, so nobody has to be asked: each loader counts what the labels and masks of the batch's
micro-batches say (`atoll.graph.loss_weight.BatchWeights`). This reads every sample of the batch once more than is trained on here.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from atoll.runtime.stage.sizes import Sizes

__all__ = ["StepWeights"]

_STEPS = 4  # kept: a swarm's feeder has more than one under way


class StepWeights:
    """The weights of every step's whole batch, as the program takes them."""

    def __init__(self, sizes: Sizes, micro_batches: Sequence[tuple[int, int]], load: Callable[[int, int, int], Any]) -> None:
        """`load` gives the samples of a step (as the caller counts them) from one up to another, collated."""
        self._sizes, self._micro_batches, self._load = sizes, micro_batches, load
        self._of = lru_cache(maxsize=_STEPS)(self._count)

    def of(self, step: int) -> Tensor | None:
        """None where the program takes none."""
        return None if self._sizes.weights is None else self._of(step)

    def _count(self, step: int) -> Tensor:
        weights = self._sizes.weights
        assert weights is not None
        read = self._micro_batches if weights.inputs else ()
        counted = (weights.of(self._sizes.leaves(self._load(step, start, stop))) for start, stop in read)
        return weights.per_sample(counted, self._micro_batches[-1][1])
