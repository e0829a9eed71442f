"""Samples: the data in the order training visits it. Any batch of any step can be asked for, by any worker."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple, Protocol

from atoll.data.device import Batch
from atoll.data.order import SampleOrder, epoch_order
from atoll.errors import JobError
from atoll.randomness import generator_states, mix, own_randomness, seed_everything

__all__ = ["EVALUATION", "TRAINING", "BatchRequest", "Collate", "Dataset", "MapReader", "Reader", "Samples", "WatchedCollate", "noting"]

TRAINING, EVALUATION = 1, 7  # what the seeds of samples are mixed with
Collate = Callable[[list[Any]], Batch]


class Dataset(Protocol):
    """Map-style data: a length, and a sample for every index below it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class BatchRequest(NamedTuple):
    """The samples of a batch: their positions in the endless row, and their indices where the data has such."""

    positions: Sequence[int]
    indices: Sequence[Any]
    until: int | None = None  # of a stream: read on to this position, and say what state it has there


class Reader(Protocol):
    """Makes batches of requested samples: here, or in a worker process that it was sent to."""

    reading: object | None  # the sample that is asked for right now, in words; for whoever wants to know why it takes long

    def load(self, request: BatchRequest) -> tuple[Batch, dict[str, Any] | None]:
        """The batch; and the state of a stream at `until`, where that is asked for."""
        ...


class WatchedCollate:
    """`collate_fn`, and whether it draws from the global generators: seen when it is first called."""

    def __init__(self, collate_fn: Collate) -> None:
        self.collate_fn = collate_fn
        self.draws: bool | None = None  # None: it was not called yet

    def __call__(self, samples: list[Any]) -> Batch:
        if self.draws is not None:
            return self.collate_fn(samples)
        before = generator_states()
        batch = self.collate_fn(samples)
        self.draws = generator_states() != before
        return batch


class MapReader:
    """Reads data with a length. The generators are seeded anew for every sample, so that random augmentation gives the same sample
    whoever loads it.
    """

    def __init__(self, dataset: Dataset, collate_fn: Collate, seed: int, purpose: int) -> None:
        self.dataset, self.collate_fn, self.seed, self.purpose = dataset, WatchedCollate(collate_fn), seed, purpose
        self.length = len(dataset)
        self.reading: object | None = None

    def load(self, request: BatchRequest) -> tuple[Batch, None]:
        """The samples, collated."""
        if len(self.dataset) != self.length:
            raise JobError(
                f"Job: data: its length changed from {self.length} to {len(self.dataset)} while it was in use; "
                "every worker computes the order of the samples from it, so it must stay the same"
            )
        with own_randomness(devices=False):
            samples = [self._sample(position, index) for position, index in zip(request.positions, request.indices, strict=True)]
            with noting(lambda: f"collating samples {few(request.indices)}"):
                return self.collate_fn(samples), None

    def _sample(self, position: int, index: Any) -> Any:
        seed_everything(mix(self.seed, self.purpose, position), devices=False)
        self.reading = index
        with noting(lambda: f"sample {index} of {self.length}"):
            sample = self.dataset[index]
        self.reading = None
        return sample


class Samples:
    """A data set in the order training visits it. Holds no position: any batch of any step can be asked for, on any worker."""

    most_workers: int | None = None  # that can load it; None: any number
    length: int  # samples of an epoch; 0: not known

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Collate,
        seed: int,
        batch_size: int,
        *,
        sampler: SampleOrder | None = None,
        drop_last: bool = False,
        purpose: int = TRAINING,
    ) -> None:
        self._begin(dataset, seed, batch_size)
        self.reader: Any = MapReader(dataset, collate_fn, seed, purpose)
        self._order = epoch_order(sampler, seed, len(dataset))
        self.length = self._order.length - (self._order.length % batch_size if drop_last else 0)
        if not self.length:
            raise JobError(
                f"Job: drop_last: an epoch has {self._order.length} samples, no whole batch of {batch_size}; make batch_size smaller"
            )

    def _begin(self, dataset: object, seed: int, batch_size: int) -> None:
        """What samples of all kinds have."""
        self.dataset: Any = dataset
        self.seed, self.batch_size = seed, batch_size
        self._every, self._first = batch_size, 0  # a step's samples begin so many after those of the step before, at this place
        self._growth: tuple[tuple[int, int], ...] = ()  # from which step on global batches have so many samples more
        self.asked = -1  # the last step whose samples somebody wanted to know

    @property
    def reading(self) -> object | None:
        """The sample that is asked for right now by this process."""
        reading: object | None = self.reader.reading
        return reading

    def index(self, position: int) -> Any:
        """The sample at a position of the endless row."""
        return self._order.index(*divmod(position, self.length))

    def request(self, positions: Sequence[int], until: int | None = None) -> BatchRequest:
        """What is to be loaded for a batch of these positions; and of a stream its state at `until`, if that is given."""
        return BatchRequest(positions, [self.index(position) for position in positions], until)

    def go_on_from(self, state: dict[str, Any]) -> None:
        """The state of a stream that a run is to go on with; data with a length needs none."""

    def forget(self) -> None:
        """Let go of what reading has open: nothing, of data with a length, but what its own code opened."""

    def reads_before(self, position: int) -> int:
        """How many samples must be read before the one at a position: none, of data with a length."""
        return 0

    def part(self, step: int, start: int, stop: int, *, last: bool) -> BatchRequest:
        """Samples `start` up to `stop` of the global batch of `step` (counted from 0); `last`: a process asks for no more of that step."""
        return self.request(self.positions(step, start, stop), (step + 1) * self.batch_size if last else None)

    def positions(self, step: int, start: int = 0, stop: int | None = None) -> range:
        """Where samples `start` up to `stop` of the global batch of `step` (counted from 0) stand in the endless row."""
        self.asked = max(self.asked, step)
        grown = sum((step - since) * more for since, more in self._growth if step > since)
        first = step * self._every + self._first + grown
        return range(first + start, first + (self.batch_size if stop is None else stop))

    def share(self, start: int, stop: int) -> "Samples":
        """Samples `start` up to `stop` of every global batch, as whoever trains by itself on that part of the data sees them."""
        part = copy(self)
        part.batch_size, part._first = stop - start, self._first + start
        return part

    def grow(self, since: int, more: int) -> None:
        """Global batches have so many samples more from the step `since` (counted from 0) on, which are not of this share."""
        assert self.asked < since, "what was asked for stands where it stood"
        self._growth += ((since, more),)

    @property
    def first(self) -> int:
        """Where in a global batch those of a `share` begin."""
        return self._first

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Samples `start` up to `stop` of the global batch of `step` (counted from 0), collated."""
        return self.at(self.positions(step, start, stop))

    def at(self, positions: Sequence[int]) -> Batch:
        """The samples at these positions of the endless row, collated."""
        return self.reader.load(self.request(positions))[0]

    @property
    def collates_randomly(self) -> bool:
        """Whether `collate_fn` draws random numbers, so that a batch's pieces, each collated by itself, are not what the batch is."""
        collate: WatchedCollate = self.reader.collate_fn
        if collate.draws is None:
            self.at(range(1))
        return bool(collate.draws)

    def loading_seconds(self, most: int = 64) -> float:
        """Processor time that loading a step's batch takes this process, judged by the best of three tries at up to `most` samples."""
        count = min(self.batch_size, most)
        taken = []
        for number in range(3):
            began = time.process_time()
            self.at(range(number * count, (number + 1) * count))
            taken.append(time.process_time() - began)
        return min(taken) * self.batch_size / count


@contextmanager
def noting(note: Callable[[], str]) -> Iterator[None]:
    """What the user's code raises passes as it is, with a note of what it was given."""
    try:
        yield
    except Exception as error:
        error.add_note(note())
        raise


def few(indices: Sequence[Any]) -> str:
    """Some of many, in words."""
    return ", ".join(map(str, indices[:4])) + (f" … {indices[-1]}" if len(indices) > 4 else "")
