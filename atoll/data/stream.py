"""Streams: data that is read in order and has no length. Position p of the endless row is the sample that comes p-th.

A stream is anything that can be iterated over, again and again: an `IterableDataset`, an object with `__iter__`, or what a callable makes
anew for every epoch. It must give the same samples whenever an epoch is read again; what it draws from the global generators is the same,
since they are seeded for every sample by its position, and `set_epoch` is called if it has one. Whoever needs some of its samples reads
all before them. With `state_dict` and `load_state_dict`, of the stream or of its iterator, a position is gone to without that.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from atoll.data.device import Batch
from atoll.data.samples import TRAINING, BatchRequest, Collate, Samples, WatchedCollate, noting
from atoll.errors import JobError
from atoll.randomness import mix, own_randomness, seed_everything

__all__ = ["FromCallable", "StreamReader", "StreamSamples", "StreamState", "is_stream"]


_PLACES = 4  # in a stream that are remembered, to go back to


class FromCallable:
    """The stream of a callable that makes an iterator of an epoch's samples, such as a generator function."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self._function()


class StreamState(NamedTuple):
    """Where in a stream the next sample comes from."""

    position: int  # of the next sample
    epoch: int
    epoch_began: int  # the position of its first sample
    state: Any  # what the stream, or its iterator, says of itself; None: nothing


class StreamReader:
    """Reads a stream. The last samples are kept, so that those of a step can be asked for in any order and again."""

    def __init__(self, stream: Iterable[Any], collate_fn: Collate, seed: int, batch_size: int, purpose: int) -> None:
        self.stream, self.collate_fn, self.seed, self.purpose = stream, WatchedCollate(collate_fn), seed, purpose
        self.reading: object | None = None
        self._keep = 2 * batch_size  # samples
        self._batch_size = batch_size if purpose == TRAINING else 0  # at whose multiples states are asked for, be it later
        self._kept: dict[int, Any] = {}  # by position: the last ones that were read, without a gap
        self._iterator: Iterator[Any] | None = None  # of the epoch under way
        self._next: StreamState | None = None  # where it is, without its own state; None: nothing was read
        self._given: list[StreamState] = []  # that can be gone to: the beginning, as soon as something is read, and what others have said
        self._passed: list[StreamState] = []  # and the last ones that were passed here

    def __getstate__(self) -> dict[str, Any]:
        """As a worker process gets it: nothing was read there."""
        return {**vars(self), "_kept": {}, "_iterator": None, "_next": None, "reading": None}

    def forget(self) -> None:
        """As if nothing was read yet: the stream's iterator, and so what it has open, is let go."""
        vars(self).update(self.__getstate__())

    def go_on_from(self, place: StreamState) -> None:
        """A place to begin from that another process has come to."""
        self._given = [*(known for known in self._given if known.position != place.position), place]

    @property
    def _places(self) -> list[StreamState]:
        return [*self._given, *self._passed]

    def reads_before(self, position: int) -> int:
        """How many samples must be read before the one at a position when nothing has been read."""
        return position - max((place.position for place in self._places if place.position <= position), default=0)

    def load(self, request: BatchRequest) -> tuple[Batch, dict[str, Any] | None]:
        """The samples, collated; they may lie before those of the last request, which may mean to read from the beginning."""
        positions = request.positions
        with own_randomness(devices=False):
            samples = [self._at(position) for position in positions]
            with noting(lambda: f"collating samples {positions[0]} to {positions[-1]} of the stream"):
                batch = self.collate_fn(samples)
            if request.until is None:
                return batch, None
            self._read_up_to(request.until)
            return batch, self._state_at(request.until)._asdict()

    def _at(self, position: int) -> Any:
        if self._next is None or position < self._next.position - len(self._kept) or self._nearest(position).position > self._next.position:
            self._go_to(position)
        self._read_up_to(position + 1)
        return self._kept[position]

    def _nearest(self, position: int) -> StreamState:
        return max((place for place in self._places if place.position <= position), key=lambda place: place.position)

    def _go_to(self, position: int) -> None:
        """To the last place before a position that can be gone to."""
        if not any(place.position == 0 for place in self._given):
            beginning = StreamState(0, 0, 0, self.stream.state_dict() if _is_stateful(self.stream) else None)  # type: ignore[attr-defined]
            self._given.append(copy.deepcopy(beginning))
        self._next, self._kept = self._nearest(position), {}
        self._iterator = None

    def _read_up_to(self, position: int) -> None:
        assert self._next is not None
        while self._next.position < position:
            at = self._next
            seed_everything(mix(self.seed, self.purpose, at.position), devices=False)
            self.reading = at.position
            with noting(lambda: f"sample {at.position} of the stream"):  # noqa: B023 (it is asked at once)
                at, sample = self._read(at)
            self.reading = None
            self._next = at._replace(position=at.position + 1, state=None)
            self._kept[at.position] = sample
            self._kept.pop(at.position - self._keep, None)
            if self._batch_size and self._next.position % self._batch_size == 0:
                self._remember()

    def _read(self, at: StreamState) -> tuple[StreamState, Any]:
        """The next sample, of the next epoch where this one has ended."""
        if self._iterator is None:
            self._iterator = self._iterate(at)
        for sample in self._iterator:
            return at, sample
        begun = StreamState(at.position, at.epoch + 1, at.position, None)
        self._iterator = self._iterate(begun)
        for sample in self._iterator:
            return begun, sample
        if not at.position:
            raise JobError("Job: data: the stream is empty")
        raise JobError(
            f"Job: data: the stream ended after {at.position - at.epoch_began} samples and gives none when it is read again; "
            "it must begin anew with every __iter__, or have as many samples as the job's steps need"
        )

    def _iterate(self, at: StreamState) -> Iterator[Any]:
        stream: Any = self.stream
        if callable(getattr(stream, "set_epoch", None)):
            stream.set_epoch(at.epoch)
        of_stream = at.state is not None and _is_stateful(stream)
        if of_stream:
            stream.load_state_dict(copy.deepcopy(at.state))
        iterator: Any = iter(stream)
        if at.state is not None and not of_stream:
            iterator.load_state_dict(copy.deepcopy(at.state))
        if iterator is stream and not of_stream:
            raise JobError(
                f"Job: data: a {type(stream).__name__} can be read only once; give a callable that makes it, such as the generator "
                "function itself, or an IterableDataset"
            )
        return iterator  # type: ignore[no-any-return]

    def _state_at(self, position: int) -> StreamState:
        """Of the stream at a position up to which it was read, or further by one who asked for what follows."""
        known = [place for place in self._places if place.position == position]
        return known[-1] if known else self._remember()

    def _remember(self) -> StreamState:
        """Where it is; a place that can be gone to, where the stream says what state it is in."""
        assert self._next is not None
        owner: Any = self.stream if _is_stateful(self.stream) else self._iterator
        if not _is_stateful(owner):
            return self._next
        place = self._next._replace(state=copy.deepcopy(owner.state_dict()))
        self._passed = [*(known for known in self._passed[-_PLACES:] if known.position != place.position), place]
        return place


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_stream(data: object) -> bool:
    """Whether data is to be read in order: it can be iterated over, and not asked for a sample by its index."""
    if isinstance(data, IterableDataset):
        return True
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return hasattr(data, "__iter__") and not indexed and not isinstance(data, type)


class StreamSamples(Samples):
    """A stream's samples, in its order. Any batch can be asked for; those in order cost least."""

    most_workers = 1

    def __init__(self, stream: Iterable[Any], collate_fn: Collate, seed: int, batch_size: int, *, purpose: int = TRAINING) -> None:
        self._begin(stream, seed, batch_size)
        self.reader = StreamReader(stream, collate_fn, seed, batch_size, purpose)
        self.length = 0  # which is not known

    def count(self) -> None:
        """Find out how many samples an epoch has, by reading it if need be."""
        self.length = len(self.dataset) if hasattr(self.dataset, "__len__") else sum(1 for _ in self.dataset)

    def forget(self) -> None:
        """Let go of what reading has open; what is asked for next is read anew."""
        self.reader.forget()

    def index(self, position: int) -> int:
        """The place in the row itself."""
        return position

    def go_on_from(self, state: dict[str, Any]) -> None:
        """A state that another process said when it was there."""
        self.reader.go_on_from(StreamState(**state))

    def reads_before(self, position: int) -> int:
        """How many samples must be read before the one at a position."""
        needed: int = self.reader.reads_before(position)
        return needed
