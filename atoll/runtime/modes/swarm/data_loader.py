"""Feed: a feeder's data, read in a thread of its own, as parcels for stage 0."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from atoll.blame import users_code
from atoll.data import to_device
from atoll.errors import JobFailedError
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.runtime.activations import Activations, leaves_from
from atoll.runtime.stage.program import StageProgram
from atoll.runtime.stage.sizes import Sizes

__all__ = ["SampleFeed"]


class SampleFeed:
    """What `atoll.control.Feeder` feeds. The order of the data is a function of the job's seed: any feeder reads the same."""

    def __init__(
        self,
        job: Job,
        captured: Captured,
        programs: Sequence[StageProgram],
        micro_batches: Sequence[tuple[int, int]],
        generators: threading.Lock,
    ) -> None:
        self._generators = generators  # loading seeds them for every sample
        self._samples, self._sizes = job.samples, Sizes(captured)
        self._needed = leaves_from(programs)[0]
        self._micro_batches = micro_batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-feed")

    async def load(self, version: int, micro_batch: int) -> Activations:
        """The same for the same (version, micro_batch), whoever asks and whenever."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, version, micro_batch)

    def _load(self, version: int, micro_batch: int) -> Activations:
        with self._generators, users_code(f"step {version + 1}: loading the batch", JobFailedError):
            batch = self._samples.batch(version, *self._micro_batches[micro_batch])
        leaves = self._sizes.leaves(to_device(batch, torch.device("cpu")))
        return Activations(self._sizes.bind(leaves), {name: leaf for name, leaf in leaves.items() if name in self._needed}, [])

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
