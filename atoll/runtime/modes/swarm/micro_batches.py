"""A micro-batch's tensors: read from the data, checked where they come from others, divided among a group's devices and joined."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.blame import users_code
from atoll.control.messages import Backward, Forward, Message
from atoll.data import BatchRequest, StreamSamples, to_device
from atoll.errors import JobFailedError
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.plan.division import apportion
from atoll.runtime.activations import Activations, activations_of, leaves_from
from atoll.runtime.batch_loader import BatchLoader, LoadedBatch
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.modes.swarm.stream_places import RemotePlaces
from atoll.runtime.stage.program import Crossing, StageProgram
from atoll.runtime.stage.sizes import Sizes
from atoll.units import plural

__all__ = ["Pieces", "Range", "SampleFeed", "TensorChecks", "divided"]

Range = tuple[int, int]
"""First sample and end."""


class SampleFeed:
    """What `atoll.control.Feeder` feeds, read in a thread of its own. The order of the data is a function of the job's seed: any feeder
    reads the same.
    """

    def __init__(
        self,
        job: Job,
        captured: Captured,
        programs: Sequence[StageProgram],
        micro_batches: Sequence[Range],
        generators: threading.Lock,
        places: RemotePlaces | None = None,
    ) -> None:
        """`places` keeps where data that is read in order is after each step."""
        self._places = places if isinstance(job.samples, StreamSamples) else None
        self._read_to: int | None = None  # the newest step that was asked for
        self._asking = asyncio.Lock()
        self._samples, self._sizes = job.samples, Sizes(captured)
        self._loader = BatchLoader(job.samples, job.num_workers, generators)  # loading seeds the generators for every sample
        self._steps, self._submitting = job.total_steps, threading.Lock()
        self._ahead: dict[tuple[int, int], Future[bytes]] = {}  # by version and micro-batch: what workers were given to load
        self._needed = leaves_from(programs)[0]
        self._micro_batches = micro_batches
        self._weights = StepWeights(self._sizes, micro_batches, self._batch)
        # where weights are counted, which reads the whole batch, one thread does it for all
        threads = 1 if self._sizes.weights is not None else max(1, self._loader.num_workers)
        self._thread = ThreadPoolExecutor(threads, thread_name_prefix="atoll-feed")

    async def load(self, version: int, micro_batch: int) -> Activations:
        """The same for the same (version, micro_batch), whoever asks and whenever."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        async with self._asking:
            if self._places is not None and (self._read_to is None or version < self._read_to - 1):  # the first, or after going back
                await run(self._go_on_from, await self._places.ask())
                self._read_to = version
        self._read_to = max(version, self._read_to or 0)
        made, state = await run(self._load, version, micro_batch)
        if self._places is not None and state is not None and state["position"] % self._samples.batch_size == 0:
            await self._places.tell(state["position"] // self._samples.batch_size, state)
        return made

    def _go_on_from(self, places: Sequence[dict[str, Any]]) -> None:
        with self._submitting:
            self._ahead.clear()
            self._loader.close()  # a process that reads is started anew, and knows these
        for place in places:
            self._samples.go_on_from(place)

    def _load(self, version: int, micro_batch: int) -> tuple[Activations, dict[str, Any] | None]:
        """And where the data is after the step, with the last of its micro-batches."""
        weights = self._weights.of(version)
        with users_code(f"step {version + 1}: loading the batch", JobFailedError):
            if self._loader.num_workers:
                loaded = self._from_workers(version, micro_batch)
            else:
                loaded = self._loader.load(self._request(version, micro_batch))
        leaves = self._sizes.leaves(*to_device((loaded.batch, weights), torch.device("cpu")))
        needed = {name: leaf for name, leaf in leaves.items() if name in self._needed}
        return Activations(self._sizes.bind(leaves), needed, []), loaded.state

    def _request(self, version: int, micro_batch: int) -> BatchRequest:
        last = micro_batch == len(self._micro_batches) - 1
        return self._samples.part(version, *self._micro_batches[micro_batch], last=last)

    def _from_workers(self, version: int, micro_batch: int) -> LoadedBatch:
        """Whoever feeds a micro-batch of one step most likely feeds that of the next, which is therefore loaded ahead."""
        with self._submitting:
            self._ahead = {key: future for key, future in self._ahead.items() if version <= key[0] <= version + 1}
            future = self._ahead.pop((version, micro_batch), None) or self._loader.submit(self._request(version, micro_batch))
            following = (version + 1, micro_batch)
            if version + 1 < self._steps and following not in self._ahead:
                self._ahead[following] = self._loader.submit(self._request(*following))
        return self._loader.result(future)

    def _batch(self, version: int, start: int, stop: int) -> Any:
        with users_code(f"step {version + 1}: loading the batch", JobFailedError):
            return self._loader.load(self._samples.part(version, start, stop, last=False)).batch

    def close(self) -> None:
        """Ends the threads and the processes that load."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._loader.close()


class TensorChecks:
    """Whether the tensors of a `Forward` or `Backward` are those that its stage takes: how many, of which dtypes and shapes, of how many
    samples.

    Stage and micro-batch must be some there are (`message_checks.py`). Sizes that only a forward tells, a gradient's are not compared with,
    and a value may be one that no kernel takes: then the kernel fails, which costs the micro-batch and not the worker
    (`control/kernels.py`).
    """

    def __init__(self, captured: Captured, programs: Sequence[StageProgram], micro_batches: Sequence[Range]) -> None:
        self._sizes, self._programs, self._leaves = Sizes(captured), programs, leaves_from(programs)
        self._samples = [stop - start for start, stop in micro_batches]

    def why_unfit(self, message: Message) -> str | None:
        """What is wrong with a message's tensors; None: nothing."""
        if isinstance(message, Forward):
            return self._forward(message)
        return self._backward(message) if isinstance(message, Backward) else None

    def _forward(self, message: Forward) -> str | None:
        try:
            entering = activations_of(message.payload)
        except (TypeError, ValueError):
            return "it brings no activations"
        binding, sizes = entering.binding, self._sizes
        if len(binding) != len(sizes.symbols) or not all(type(size) is int and size > 0 for size in binding):
            return "its sizes are not those of a batch"
        if sizes.of_piece(binding, self._samples[message.micro_batch]) != tuple(binding):
            return f"its micro-batch has {plural(self._samples[message.micro_batch], 'sample')}, and it another number"
        if not isinstance(entering.leaves, dict) or entering.leaves.keys() != self._leaves[message.stage]:
            return "what it brings of the batch is not what its stage and those after it read"
        for name, leaf in entering.leaves.items():
            shape = sizes.leaf_shape(name, binding)
            if shape is not None and (not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape or leaf.dtype != sizes.dtypes[name]):
                return f"{name!r} is no tensor of {sizes.dtypes[name]} and shape {list(shape)}"
        crossings = self._programs[message.stage].receives
        return _why_not([(crossing, sizes.shape(crossing, binding)) for crossing in crossings], entering.values)

    def _backward(self, message: Backward) -> str | None:
        sizes = self._sizes
        binding = sizes.of_samples(self._samples[message.micro_batch]) if sizes.follow_samples else None
        wanting = [crossing for crossing in self._programs[message.stage].sends if crossing.wants_gradient]
        shapes = [crossing.shape if binding is None else sizes.shape(crossing, binding) for crossing in wanting]
        return _why_not(list(zip(wanting, shapes, strict=True)), message.payload)


def _why_not(expected: Sequence[tuple[Crossing, Sequence[Any]]], values: Any) -> str | None:
    """By shapes in which what is no number may be any."""
    if not isinstance(values, list | tuple) or len(values) != len(expected):
        return f"{plural(len(expected), 'tensor')} should come with it"
    for (crossing, shape), value in zip(expected, values, strict=True):
        if not isinstance(value, Tensor) or value.dtype != crossing.dtype:
            return f"{crossing.name!r} is no tensor of {crossing.dtype}"
        if value.dim() != len(shape) or any(isinstance(e, int) and e != n for e, n in zip(shape, value.shape, strict=True)):
            return f"{crossing.name!r} has the shape {list(value.shape)}"
    return None


def divided(micro_batches: Sequence[Range], shares: Sequence[int]) -> list[list[Range]]:
    """For every device its samples of each micro-batch, in proportion to the shares; a device may get none of a small one."""
    rows: list[list[Range]] = [[] for _ in shares]
    for start, stop in micro_batches:
        for row, samples in zip(rows, apportion(stop - start, shares), strict=True):
            row.append((start, start + samples))
            start += samples
    return rows


class Pieces:
    """How what enters and leaves each stage is cut and joined. Ranges count from the first sample of the micro-batch."""

    def __init__(self, captured: Captured, programs: Sequence[StageProgram]) -> None:
        self.sizes, self._programs = Sizes(captured), programs

    def why_not(self, stage: int) -> str | None:
        """Why micro-batches of a stage cannot be divided; None where nothing is known against it."""
        program = self._programs[stage]
        if self.sizes.fixed is not None:
            return f"the job was captured for {self.sizes.fixed} samples only"
        for crossing in (*program.receives, *program.sends):
            if not self.sizes.divisible(crossing):
                return f"the value {crossing.name!r} that passes between stages has no dimension of its own for samples"
        return None

    def parcel(self, stage: int, entering: Activations, piece: Range) -> Activations:
        """A piece of what enters a stage."""
        start, stop = piece
        values = self._cut(self._programs[stage].receives, entering.values, piece)
        return Activations(self.sizes.of_piece(entering.binding, stop - start), self.sizes.take(entering.leaves, start, stop), values)

    def leaving(self, stage: int, entering: Activations, made: Sequence[Activations]) -> Activations:
        """What leaves a stage, from what pieces of what entered became. What does not depend on samples all have made: the first one's."""
        values = self._join(self._programs[stage].sends, [piece.values for piece in made], lambda parts: parts[0])
        return Activations(entering.binding, {name: entering.leaves[name] for name in made[0].leaves}, values)

    def gradients(self, stage: int, given: Sequence[Tensor], piece: Range) -> list[Tensor]:
        """A piece of the gradients of what left a stage; that of a value without samples goes to whoever made it, the first piece."""
        wanting = [crossing for crossing in self._programs[stage].sends if crossing.wants_gradient]
        cut = self._cut(wanting, given, piece)
        if piece[0] == 0:
            return cut
        return [value if self._dim(crossing) is not None else torch.zeros_like(value) for value, crossing in zip(cut, wanting, strict=True)]

    def gradients_back(self, stage: int, made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The gradients of what entered a stage; a value all pieces used gets the sum of theirs."""
        wanting = [crossing for crossing in self._programs[stage].receives if crossing.wants_gradient]
        return self._join(wanting, made, lambda parts: torch.stack(parts).sum(0))

    def _dim(self, crossing: Crossing) -> int | None:
        return self.sizes.sample_dim(crossing)

    def _cut(self, crossings: Sequence[Crossing], values: Sequence[Tensor], piece: Range) -> list[Tensor]:
        start, stop = piece
        dims = [self._dim(crossing) for crossing in crossings]
        return [v if d is None else v.narrow(d, start, stop - start) for v, d in zip(values, dims, strict=True)]

    def _join(
        self, crossings: Sequence[Crossing], made: Sequence[Sequence[Tensor]], otherwise: Callable[[list[Tensor]], Tensor]
    ) -> list[Tensor]:
        joined = []
        for crossing, *parts in zip(crossings, *made, strict=True):
            dim = self._dim(crossing)
            joined.append(otherwise(parts) if dim is None else torch.cat(parts, dim))
        return joined
