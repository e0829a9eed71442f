"""Batches in the order they are asked for: loaded by this process, or ahead of time by worker processes.

A worker makes whole batches. Workers are started from a fork server, a process without threads: a rank has threads (of Gloo, of autograd,
its own), and a fork of it may hang. What the data is made of must therefore be picklable, and the script is imported by every worker. A
worker ends with the process that started it, however that ends. What asks a run to stop (Ctrl-C, SIGTERM, the end of a terminal) often
asks all its processes at once; a worker goes on, since the step under way ends first and wants its data.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import torch

from atoll.blame import in_words, own_frames, with_frames
from atoll.data import Batch, BatchRequest, Samples
from atoll.data.samples import Reader
from atoll.errors import JobError, JobFailedError
from atoll.runtime.signals import signals_to_stop
from atoll.script import ImportedScript, import_again, imported_scripts

__all__ = ["BatchLoader", "LoadedBatch"]

_PREFETCHED = 2  # batches a worker that are made or under way before they are asked for, as in PyTorch


class LoadedBatch(NamedTuple):
    """A batch, and what making it took."""

    batch: Batch
    seconds: float  # of one process
    state: dict[str, Any] | None  # of a stream, where the request asks for it


class BatchLoader:
    """Loads batches of some data: with workers ahead of time, two a worker, and always in the order of the requests."""

    def __init__(self, samples: Samples, num_workers: int, lock: AbstractContextManager[Any] | None = None) -> None:
        """`lock` is held while this process itself loads, which seeds the generators."""
        if samples.most_workers is not None:
            num_workers = min(num_workers, samples.most_workers)
        self.samples, self.num_workers = samples, num_workers
        self._lock = lock or nullcontext()
        self._pool: ProcessPoolExecutor | None = None

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[LoadedBatch]:
        """The batches of these requests, in their order. What the user's code raises is raised here, wherever it ran."""
        if not self.num_workers:
            yield from map(self.load, requests)
            return
        rest = iter(requests)
        under_way = deque(self.submit(request) for request in islice(rest, _PREFETCHED * self.num_workers))
        while under_way:
            found = self.result(under_way.popleft())
            under_way.extend(self.submit(request) for request in islice(rest, 1))
            yield found

    def load(self, request: BatchRequest) -> LoadedBatch:
        """A batch, loaded by this process."""
        with self._lock:
            return _load(self.samples.reader, request)

    def submit(self, request: BatchRequest) -> "Future[bytes]":
        """Have a worker load a batch; `result` waits for it."""
        if self._pool is None:
            self._pool = _start_workers(self.samples.reader, self.num_workers)
        with _told_if_dead():
            return self._pool.submit(_Worker.load, request)

    @staticmethod
    def result(future: "Future[bytes]") -> LoadedBatch:
        """The batch that a worker was given to load."""
        with _told_if_dead():
            found = ForkingPickler.loads(future.result())
        if isinstance(found, _Failure):
            raise with_frames(found.error, found.frames)
        assert isinstance(found, LoadedBatch)
        return found

    def close(self) -> None:
        """Ends the workers at once, whatever they are doing."""
        if self._pool is not None:
            workers = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()
            self._pool = None


@contextmanager
def _told_if_dead() -> Iterator[None]:
    """A sentence where a worker is gone: the tensors of a batch it has made are fetched from it, too."""
    try:
        yield
    except (BrokenProcessPool, ConnectionError, EOFError, FileNotFoundError) as error:
        raise JobFailedError(
            "a worker process that loads data ended abruptly: it was killed, ran out of memory, or could not import the script; "
            "its own complaint is above if it had one, and num_workers=0 loads without workers"
        ) from error


def _load(reader: Reader, request: BatchRequest) -> LoadedBatch:
    began = time.perf_counter()
    batch, state = reader.load(request)
    return LoadedBatch(batch, time.perf_counter() - began, state)


def _start_workers(reader: Reader, count: int) -> ProcessPoolExecutor:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])  # imports PyTorch once for all workers
        resource_tracker.ensure_running()  # it would let the signals through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_stop())
        try:
            forkserver.ensure_running()  # it and its forks block what this thread does
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ProcessPoolExecutor(count, mp_context=context, initializer=_Worker.begin, initargs=(_SentReader(reader, imported_scripts()),))


class _Worker:
    """What is done in a worker process."""

    reader: ClassVar[Reader]

    @classmethod
    def begin(cls, sent: "_SentReader") -> None:
        """Before the first batch."""
        for number in signals_to_stop():
            signal.signal(number, _go_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals_to_stop())  # what the data starts has no use for blocked ones
        threading.Thread(target=_end_with_parent, name="atoll-parent", daemon=True).start()
        torch.set_num_threads(1)
        cls.reader = sent.reader

    @classmethod
    def load(cls, request: BatchRequest) -> bytes:
        """The pickled batch, its tensors in shared memory; or what went wrong instead."""
        try:
            return bytes(ForkingPickler.dumps(_load(cls.reader, request)))
        except Exception as error:
            frames = [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in own_frames(error)]
            return pickle.dumps(_Failure(_picklable(error), frames))


def _go_on(number: int, frame: object) -> None:
    """A run that is asked to stop ends its step, for which it wants its data. Unlike an ignored signal, this is not inherited."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Failure(NamedTuple):
    """What went wrong in a worker, and where in the user's code."""

    error: BaseException
    frames: list[tuple[str, int, str, str]]


class _SentReader:
    """A reader on its way to a worker. The scripts must have been imported where what they define is unpickled."""

    def __init__(self, reader: Reader, scripts: Sequence[ImportedScript]) -> None:
        self.reader, self.scripts = reader, scripts

    def __reduce__(self) -> Any:
        try:
            return _received, (self.scripts, bytes(ForkingPickler.dumps(self.reader)))
        except Exception as error:
            raise JobError(
                f"Job: num_workers: the data cannot be sent to worker processes: {in_words(error)}; define its class and collate_fn at the "
                "top of a module, and open files when the first sample is asked for; or load with num_workers=0"
            ) from error


def _received(scripts: Sequence[ImportedScript], reader: bytes) -> _SentReader:
    import_again(scripts)
    return _SentReader(ForkingPickler.loads(reader), scripts)


def _picklable(error: Exception) -> Exception:
    """The error itself where another process can have it, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(in_words(error))
