"""The data loader: each rank reads its own pieces of the data, and only those its stages look at, ahead of when they are needed."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Queue
from typing import Any

import torch

from atoll.blame import users_code
from atoll.data import Samples, to_device
from atoll.errors import JobFailedError
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.schedule_runner import StageWork
from atoll.runtime.stage.sizes import Binding, Sizes

__all__ = ["ShardLoader"]

_Piece = tuple[int, int]


class ShardLoader:
    """Loads the rank's pieces in the order of its schedule; with `ahead`, in a thread of its own, that many pieces before they are used."""

    def __init__(
        self,
        samples: Samples,
        layout: Layout,
        actions: Sequence[Action],
        stages: Sequence[StageWork],
        sizes: Sizes,
        device: torch.device,
        *,
        last_step: int,
        ahead: int = 0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._samples, self._layout, self._sizes, self._device = samples, layout, sizes, device
        self._lanes = {work.place.stage: work.place.lane for work in stages}
        self._reads = {work.place.stage: _reads_batch(work, sizes) for work in stages}
        self._actions = actions
        self._last_step = last_step
        self._current: dict[tuple[int, _Piece], tuple[dict[str, Any], Binding]] = {}
        self._order = list(self._pieces_of_a_step())
        # where sizes depend on which samples stand together (padding), lanes that meet must have them from the same batch
        self._loaded_with = {} if sizes.follow_samples else self._micro_batches_of_pieces()
        self._queue: Queue[Any] = Queue(maxsize=max(1, ahead))
        self._ahead = ahead
        self._lock = lock or nullcontext()  # loading seeds the generators, which dropout draws from too
        self._weights = StepWeights(sizes, layout.micro_batches, self._batch)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.reading = Doing(self._in_words, "user")
        """What somebody does who waits for this feed: the watcher asks for the words when it wants them."""

    def _in_words(self) -> str:
        index = self._samples.reading
        return f"reading sample {index} of the data" if index is not None else "reading the data"

    def _piece(self, stage: int, m: int) -> _Piece:
        return self._layout.pieces(stage, m)[self._lanes[stage]]

    def _pieces_of_a_step(self) -> Iterator[_Piece]:
        """Each piece once, in the order the rank first needs it."""
        seen: set[_Piece] = set()
        for action in self._actions:
            if action.kind == "F" and self._reads[action.stage]:
                piece = self._piece(action.stage, action.micro_batch)
                if piece not in seen:
                    seen.add(piece)
                    yield piece

    def _micro_batches_of_pieces(self) -> dict[_Piece, _Piece]:
        used = {(action.stage, action.micro_batch) for action in self._actions if action.kind == "F"}
        return {self._piece(stage, m): self._layout.micro_batches[m] for stage, m in used}

    def get(self, step: int, stage: int, micro_batch: int) -> tuple[dict[str, Any], Binding]:
        """The batch's leaves for the rank's piece of a micro-batch (none if the stage reads none), and the sizes they have."""
        start, stop = self._piece(stage, micro_batch)
        if not self._reads[stage]:
            return {}, self._sizes.of_samples(stop - start)
        key = (step, (start, stop))
        if key not in self._current:
            self._current = {known: value for known, value in self._current.items() if known[0] == step}
            self._fetch(key)
        return self._current[key]

    def _fetch(self, key: tuple[int, _Piece]) -> None:
        if not self._ahead:
            self._current[key] = self._load(key)
            return
        if self._thread is None:  # the first step asked for is the first to load, wherever the run continues
            self._thread = threading.Thread(target=self._load_ahead, args=(key[0],), name="atoll-feed", daemon=True)
            self._thread.start()
        while key not in self._current:
            loaded, value = self._queue.get()
            if isinstance(value, BaseException):
                raise value
            self._current[loaded] = value

    def _load(self, key: tuple[int, _Piece]) -> tuple[dict[str, Any], Binding]:
        step, (start, stop) = key
        first, last = self._loaded_with.get((start, stop), (start, stop))
        weights, batch = self._weights.of(step), self._batch(step, first, last)
        leaves = self._sizes.leaves(*to_device((batch, weights), self._device))
        if (first, last) != (start, stop):
            leaves = self._sizes.take(leaves, start - first, stop - first)
        return leaves, self._sizes.bind(leaves)

    def _batch(self, step: int, start: int, stop: int) -> Any:
        with self._lock, users_code(f"step {step}: loading the batch", JobFailedError):
            return self._samples.batch(step - 1, start, stop)

    def _load_ahead(self, first_step: int) -> None:
        for step in range(first_step, self._last_step + 1):
            for piece in self._order:
                if self._closed.is_set():
                    return
                try:
                    value: Any = self._load((step, piece))
                except BaseException as error:  # whatever it is belongs to the thread that asks for the piece
                    value = error
                self._queue.put(((step, piece), value))
                if isinstance(value, BaseException):
                    return

    def close(self) -> None:
        """Let the thread end."""
        self._closed.set()
        while self._thread is not None and self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)


def _reads_batch(work: StageWork, sizes: Sizes) -> bool:
    """Whether the stage looks at the batch, or must to know its sizes."""
    program = work.program
    batch = {name for name in program.batch if name}
    read = any(name in batch for unit in (program.prologue, *program.units) for name in unit.inputs)
    return read or not sizes.follow_samples
