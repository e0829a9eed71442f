"""The data loader: each rank reads its own pieces of the data, and only those its stages look at, ahead of when they are needed."""

import threading
import time
from collections.abc import Iterator, Sequence
from queue import Queue
from typing import Any

import torch

from atoll.blame import users_code
from atoll.data import BatchRequest, to_device
from atoll.errors import JobFailedError
from atoll.runtime.batch_loader import BatchLoader, LoadedBatch
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.schedule_runner import StageWork
from atoll.runtime.stage.sizes import Binding, Sizes

__all__ = ["ShardLoader"]

_Piece = tuple[int, int]
_STATES = 8  # steps that are loaded and not yet made are fewer


class ShardLoader:
    """Loads the rank's pieces in the order of its schedule; with `ahead`, in a thread of its own, that many pieces before they are used."""

    def __init__(
        self,
        loader: BatchLoader,
        layout: Layout,
        actions: Sequence[Action],
        stages: Sequence[StageWork],
        sizes: Sizes,
        device: torch.device,
        *,
        last_step: int,
        ahead: int = 0,
    ) -> None:
        self._loader, self._layout, self._sizes, self._device = loader, layout, sizes, device
        self._lanes = {work.place.stage: work.place.lane for work in stages}
        self._reads = {work.place.stage: _reads_batch(work, sizes) for work in stages}
        self._actions = actions
        self._last_step = last_step
        self._current: dict[tuple[int, _Piece], tuple[dict[str, Any], Binding]] = {}
        self._order = list(self._pieces_of_a_step())
        # where sizes or numbers depend on which samples stand together (padding, masks drawn), lanes that meet must have them from the
        # same batch
        whole = self._micro_batches_of_pieces()
        divided = any(piece != micro_batch for piece, micro_batch in whole.items())
        self._loaded_with = whole if divided and (not sizes.follow_samples or loader.samples.collates_randomly) else {}
        self._queue: Queue[Any] = Queue(maxsize=max(1, ahead))
        self._ahead = ahead
        self._states: dict[int, dict[str, Any]] = {}  # of a stream, after the last steps that were read
        self._waited = self._loading = 0.0
        self._weights = StepWeights(sizes, layout.micro_batches, self._batch)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.reading = Doing(self._in_words, "user")
        """What somebody does who waits for this feed: the watcher asks for the words when it wants them."""

    def _in_words(self) -> str:
        index = self._loader.samples.reading
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
            began = time.perf_counter()
            self._fetch(key)
            self._waited += time.perf_counter() - began
        return self._current[key]

    def _fetch(self, key: tuple[int, _Piece]) -> None:
        if not self._ahead:
            self._current[key], seconds = self._prepare(key, self._loader.batches([self._request(key)]))
            self._loading += seconds
            return
        if self._thread is None:  # the first step asked for is the first to load, wherever the run continues
            self._thread = threading.Thread(target=self._load_ahead, args=(key[0],), name="atoll-feed", daemon=True)
            self._thread.start()
        while key not in self._current:
            loaded, value = self._queue.get()
            if isinstance(value, BaseException):
                raise value
            self._current[loaded], seconds = value
            self._loading += seconds

    def _keys(self, first_step: int) -> Iterator[tuple[int, _Piece]]:
        return ((step, piece) for step in range(first_step, self._last_step + 1) for piece in self._order)

    def _request(self, key: tuple[int, _Piece]) -> BatchRequest:
        step, piece = key
        return self._loader.samples.part(step - 1, *self._loaded_with.get(piece, piece), last=piece == self._order[-1])

    def _prepare(self, key: tuple[int, _Piece], batches: Iterator[LoadedBatch]) -> tuple[tuple[dict[str, Any], Binding], float]:
        """The next batch, which is the one with this piece, as the stages want it; and the seconds that loading it took."""
        step, (start, stop) = key
        first, last = self._loaded_with.get((start, stop), (start, stop))
        weights = self._weights.of(step)
        with users_code(f"step {step}: loading the batch", JobFailedError):
            loaded = next(batches)
        if loaded.state is not None:
            self._states = {**dict(list(self._states.items())[-_STATES:]), step: loaded.state}
        leaves = self._sizes.leaves(*to_device((loaded.batch, weights), self._device))
        if (first, last) != (start, stop):
            leaves = self._sizes.take(leaves, start - first, stop - first)
        return (leaves, self._sizes.bind(leaves)), loaded.seconds

    def _batch(self, step: int, start: int, stop: int) -> Any:
        with users_code(f"step {step}: loading the batch", JobFailedError):
            return self._loader.load(self._loader.samples.part(step - 1, start, stop, last=False)).batch

    def _load_ahead(self, first_step: int) -> None:
        batches = self._loader.batches(map(self._request, self._keys(first_step)))
        for key in self._keys(first_step):
            if self._closed.is_set():
                return
            try:
                value: Any = self._prepare(key, batches)
            except BaseException as error:  # whatever it is belongs to the thread that asks for the piece
                value = error
            self._queue.put((key, value))
            if isinstance(value, BaseException):
                return

    @property
    def reads(self) -> bool:
        """Whether this rank reads any data."""
        return bool(self._order)

    def take_times(self) -> tuple[float, float]:
        """Seconds waited for data, and seconds that loading what came took, since this was last asked."""
        times = self._waited, self._loading
        self._waited = self._loading = 0.0
        return times

    def state_after(self, step: int) -> dict[str, Any] | None:
        """The state of the stream after a step that was just made; None where this rank reads none, or it says none."""
        return self._states.get(step)

    def close(self) -> None:
        """Let the thread end, and the processes that load."""
        self._closed.set()
        while self._thread is not None and self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)
        self._loader.close()


def _reads_batch(work: StageWork, sizes: Sizes) -> bool:
    """Whether the stage looks at the batch, or must to know its sizes."""
    program = work.program
    batch = {name for name in program.batch if name}
    read = any(name in batch for unit in (program.prologue, *program.units) for name in unit.inputs)
    return read or not sizes.follow_samples
