"""The order in which epochs visit data that has a length: shuffled by the job's seed, in sequence, or as a sampler says."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from atoll.blame import users_code
from atoll.errors import JobError
from atoll.randomness import Order, mix, own_randomness

__all__ = ["EpochOrder", "SampleOrder", "epoch_order"]

SampleOrder: TypeAlias = Sampler[Any] | Callable[[int], Iterable[Any]]
"""What `Job.sampler` may be: a sampler, or a callable from the epoch, counted from 0, to the indices it visits."""

_KEPT = 3  # epochs whose drawn indices are kept: the one under way, the one a batch reaches into, and one to go back to


class EpochOrder(Protocol):
    """Which sample stands where in an epoch; every epoch visits equally many."""

    length: int

    def index(self, epoch: int, place: int) -> Any:
        """The sample at a place of an epoch; both count from 0."""
        ...


def epoch_order(sampler: SampleOrder | None, seed: int, length: int) -> EpochOrder:
    """The order of a data set of that length. The job's seed decides what is random in it: all ranks draw the same, at any time."""
    if isinstance(sampler, DistributedSampler):
        raise JobError("Job: sampler: a DistributedSampler divides the data among ranks, which Atoll does itself; leave it out")
    if sampler is None or _shuffles(sampler, length):
        return _Shuffled(seed, length)
    if isinstance(sampler, SequentialSampler) and len(sampler) == length:
        return _InSequence(length)
    return _DrawnFromSampler(sampler, seed) if isinstance(sampler, Sampler) else _DrawnByEpoch(sampler, seed)


def _shuffles(sampler: object, length: int) -> bool:
    """Whether a sampler does nothing but visit all of the data in a random order."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length


class _Shuffled:
    def __init__(self, seed: int, length: int) -> None:
        self.length = length
        self._order = lru_cache(maxsize=2)(lambda epoch: Order(seed, epoch, length))

    def index(self, epoch: int, place: int) -> int:
        return self._order(epoch)[place]


class _InSequence:
    def __init__(self, length: int) -> None:
        self.length = length

    def index(self, epoch: int, place: int) -> int:
        return place


class _Drawn:
    """Indices that are drawn an epoch at a time, with generators that are seeded by the job's seed and the epoch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epochs: dict[int, Sequence[Any]] = {}
        self.length = len(self._indices(0))
        if not self.length:
            raise JobError("Job: sampler: it gives no index")

    def index(self, epoch: int, place: int) -> Any:
        return self._indices(epoch)[place]

    def _indices(self, epoch: int) -> Sequence[Any]:
        if epoch not in self._epochs:
            with users_code(f"Job: sampler: drawing the indices of epoch {epoch}"):
                drawn = self._draw(epoch)
            if self._epochs and len(drawn) != self.length:
                raise JobError(
                    f"Job: sampler: it gives {len(drawn)} indices in epoch {epoch} and {self.length} in the first; "
                    "every epoch must have as many, so that the step says where in the data training is"
                )
            self._epochs[epoch] = drawn
            for old in sorted(self._epochs)[:-_KEPT] if len(self._epochs) > _KEPT else ():
                del self._epochs[old]
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Sequence[Any]:
        raise NotImplementedError

    def _seeded(self, epoch: int) -> int:
        return mix(self._seed, 6, epoch)


class _DrawnByEpoch(_Drawn):
    """What a callable from epochs to indices says."""

    def __init__(self, function: Callable[[int], Iterable[Any]], seed: int) -> None:
        self._function = function
        super().__init__(seed)

    def _draw(self, epoch: int) -> Sequence[Any]:
        with own_randomness(self._seeded(epoch), devices=False):
            return _compact(self._function(epoch))


class _DrawnFromSampler(_Drawn):
    """What a sampler says. PyTorch's own draw from generators alone; another may remember what it drew, so its epochs are drawn in turn."""

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self._sampler, self._drawn = sampler, 0  # so many epochs were drawn
        self._any_time = type(sampler).__module__.partition(".")[0] == "torch"
        super().__init__(seed)

    def _draw(self, epoch: int) -> Sequence[Any]:
        if self._any_time or hasattr(self._sampler, "set_epoch"):
            return self._draw_next(epoch)
        if epoch < self._drawn:
            raise JobError(
                f"Job: sampler: the order of epoch {epoch} is asked for again after {self._drawn} were drawn, and a "
                f"{type(self._sampler).__name__} cannot go back; give it a set_epoch, or give a callable from the epoch to its indices"
            )
        for earlier in range(self._drawn, epoch):
            self._draw_next(earlier)
        return self._draw_next(epoch)

    def _draw_next(self, epoch: int) -> Sequence[Any]:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        generator = getattr(self._sampler, "generator", None)
        with own_randomness(self._seeded(epoch), devices=False):
            if callable(set_epoch):
                set_epoch(epoch)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self._seeded(epoch))
            drawn = _compact(self._sampler)
        self._drawn = epoch + 1
        return drawn


def _compact(indices: Iterable[Any]) -> Sequence[Any]:
    """Eight bytes an index where all are whole numbers."""
    listed = [index.item() if isinstance(index, torch.Tensor) else index for index in indices]
    return array("q", listed) if all(type(index) is int for index in listed) else listed
