"""Compute: what a worker of the swarm does with the stage executor, in one thread of its own, so that heartbeats go on.

Gradients are of the batch's *total* loss, undivided: who shares a step's micro-batches does not matter, and the commit says what the sum is
divided by. After the parameters' gradients a sum holds one number for each parameter: how many micro-batches gave it a gradient at all,
since an optimizer leaves a parameter without one alone. Parameters that several stages use are in sections of their own, after the
stage's: each stage has a copy, gets the sum over all of them and makes the same step.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atoll.control.messages import Committed
from atoll.data import to_device
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.runtime.activations import Activations, activations_of, leaves_from
from atoll.runtime.checkpoint.loading import fill_shards
from atoll.runtime.checkpoint.manifest import MODEL, Rebuilt
from atoll.runtime.checkpoint.rebuilt import check_rebuilt, tensor_digests
from atoll.runtime.checkpoint.safetensors_file import dtype_name
from atoll.runtime.checkpoint.state_file import BEFORE, BUFFER, StateFile, StateReader
from atoll.runtime.checkpoint.training_state import allocate_state, optimizer_state, restore_groups, restore_training, training_state
from atoll.runtime.checkpoint.values import from_plain, to_plain
from atoll.runtime.executor import BuiltStage, Contributed, LossScale, StageExecutor, Update, Updater, WorkItem
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.swarm.staleness import check_rebindable, rebind
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import StageProgram, cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState, unread_names, unread_state

__all__ = [
    "CPU",
    "Contribution",
    "DividedJob",
    "StageCompute",
    "StageState",
    "Sum",
    "chunk_range",
    "programs_of",
    "stage_names",
    "tied_parameters",
]

Result = TypeVar("Result")
_BLOCK = 4096
CPU = torch.device("cpu")


@dataclass
class StageState:
    """A stage's weights and optimizer. With staleness `before` has the weights before the last step, to compute with."""

    executor: StageExecutor
    sizes: list[list[int]]  # of the trained parameters, by section
    rebuilt: dict[str, Rebuilt] = field(default_factory=dict)  # what is not trained and whoever has the stage makes again: it is not sent
    packing: StateFile | None = None  # as bytes, until the next step
    before: "StageState | None" = None

    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that the user's state_dict leaves out."""
        stored = {part.name for part in self.executor.shards()}
        return {name: value for name, value in self.module.buffers_by_name().items() if name not in stored}

    @property
    def module(self) -> StageModule:
        """Of its one stage."""
        (stage,) = self.executor.stages.values()
        assert isinstance(stage.module, StageModule)  # a swarm runs nothing else
        return stage.module

    def share_frozen(self, other: "StageState") -> None:
        """Have the other's parameters in place of its own where they are not trained: they stay as they are."""
        own, theirs = self.module.parameters_by_name(), other.module.parameters_by_name()
        self.module.share_parameters({name: value if value.requires_grad else theirs[name] for name, value in own.items()})

    def trained_by_name(self) -> dict[str, nn.Parameter]:
        """The trained parameters, section by section, by the user's names."""
        names = {id(parameter): name for name, parameter in self.module.parameters_by_name().items()}
        return {names[id(parameter)]: parameter for parameter in self.parameters}

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that are trained, section by section."""
        return self.executor.updater.parameters


@dataclass
class Sum:
    """A buffer: section by section, gradients one after another, then how often each parameter had one."""

    flat: Tensor
    views: list[Tensor]  # of each parameter
    counts: list[Tensor]  # of each section


Contribution = list[Tensor | None]
"""A micro-batch's gradients, in the order of the stage's parameters."""


@dataclass(frozen=True)
class DividedJob:
    """A job, how it is cut into stages and micro-batches, and what all of a process that compute for it share.

    Of stages that `recompute` says it of, layers' activations are not kept: backward runs every layer again, all but the model's last one.
    """

    job: Job
    captured: Captured
    bounds: Sequence[int]  # the stages' first layers and the end of the last
    micro_batches: Sequence[tuple[int, int]]  # first sample and end of each, in the global batch
    generators: threading.Lock  # held while somebody of this process seeds the global generators and draws from them
    chunks: int = 1
    staleness: int = 0
    recompute: Sequence[bool] = ()
    compiler: Compiler | None = None  # of its stages, where they are compiled


class StageCompute:
    """What `atoll.control.Worker` computes with, on one device."""

    def __init__(self, divided: DividedJob, device: torch.device = CPU) -> None:
        job, captured, bounds = divided.job, divided.captured, divided.bounds
        self._staleness = divided.staleness
        self._recompute = divided.recompute or [False] * (len(bounds) - 1)
        self.pace: Pace | None = None  # where speeds are imposed
        self.loss_is_mean = False  # of the last micro-batch
        self._job, self._captured, self._bounds, self._chunks = job, captured, bounds, divided.chunks
        self._generators, self._compiler = divided.generators, divided.compiler
        self._drawing: AbstractContextManager[Any] = divided.generators  # around kernels that draw
        self._micro_batches = divided.micro_batches
        self._programs = programs_of(captured, bounds)
        self._leaves = leaves_from(self._programs)
        self._sizes, self._key = Sizes(captured), DrawKey(job.seed)
        self._device = device  # of weights, sums and kernels; what comes from others and goes to them is in main memory
        self._spec = captured.program.call_spec.out_spec
        self._tied = tied_parameters(self._programs)
        self._sizes_of: dict[int, list[list[int]]] = {}  # of a stage's parameters, by section
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-compute")
        self._expected: tuple[int, Future[StageState]] | None = None  # a stage whose state is on its way, built meanwhile

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- states

    def expect(self, stage: int) -> None:
        """Builds the stage while its state is on its way; what is in it is overwritten by what arrives."""
        expected = self._expected  # taken by the other thread
        if expected is None or expected[0] != stage:
            self._expected = stage, self._thread.submit(self._build, stage)

    async def initial(self, stage: int) -> StageState:
        """The state before step 0."""
        self._expected = None
        return await self._run(lambda: self._build(stage))

    def _build(self, stage: int) -> StageState:
        with self._generators:
            model, read = self._job.build_to_take_parts_from()
            names = self._job.rebuilt(model)
        state = self._weights_of(stage, model)
        if read is not None:
            fill_shards(read, state.executor.shards())
        for part in state.executor.shards():
            dtype_name(part.tensor.dtype, repr(part.name))  # what cannot be stored is refused before it is trained
        self._sizes_of = {stage: state.sizes}  # a worker is on one stage at a time
        state.rebuilt = tensor_digests({part.name: part.tensor for part in state.executor.shards() if part.name in names})
        if self._staleness:
            state.before = self._weights_of(stage, model)
            state.before.share_frozen(state)
            if read is not None:
                fill_shards(read, state.before.executor.shards())
        if state.parameters:
            updater = state.executor.updater
            updater.optimizer = self._job.build_part_optimizer(state.trained_by_name(), self._job.group_names(model.named_parameters()))
            updater.scheduler = self._job.build_scheduler(updater.optimizer)
            if self._staleness:
                check_rebindable(updater.optimizer)
        if self._compiler is not None:
            for one in filter(None, (state, state.before)):
                self._compile(stage, one)
        return state

    def _compile(self, stage: int, state: StageState) -> None:
        """Compiles by a forward and a backward of each size, before a micro-batch waits for it. The state stays as it is."""
        sizes = {stop - start: number for number, (start, stop) in reversed(list(enumerate(self._micro_batches)))}
        before = {name: buffer.clone() for name, buffer in state.module.buffers_by_name().items()}
        for samples, number in sizes.items():
            with self._generators:
                leaves = self._sizes.leaves(self._job.example_batch(samples))
            if self._sizes.weights is not None:
                leaves[self._sizes.weights.leaf] = self._sizes.weights.of(leaves)
            binding, program = self._sizes.bind(leaves), self._programs[stage]
            entering = [torch.zeros(self._sizes.shape(one, binding), dtype=one.dtype) for one in program.receives]
            work = self._work(0, number, stage)
            made = self._compute(state, work, Activations(binding, leaves, entering))
            leaving = [value for value, one in zip(made.values, program.sends, strict=True) if one.wants_gradient]
            state.executor.backward(work, [torch.zeros_like(value) for value in leaving])
        for name, buffer in state.module.buffers_by_name().items():
            buffer.copy_(before[name])

    def _adapt(self, module: StageModule, stage: int) -> None:
        """Before a stage is used."""

    def _weights_of(self, stage: int, model: nn.Module) -> StageState:
        """A stage with a copy of the model's weights, without an optimizer."""
        order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
        builder = StageBuilder(InitialState(self._captured, model), device=self._device, key=self._key)
        # the builder writes the device into a program's graphs: every state gets graphs of its own
        program = cut_stage(self._captured, self._bounds[stage], self._bounds[stage + 1])
        last_layer = len(self._captured.graph.layers) - 1
        module = builder.stage(program, [self._recompute[stage] and last_layer not in unit.layers for unit in program.units])
        self._adapt(module, stage)
        held = sorted(module.parameters_by_name().items(), key=lambda item: order[item[0]])
        shared = [names for together, names in self._tied.items() if stage in together]
        own = {name for name, _ in held}.difference(*shared)
        sections = [[parameter for name, parameter in held if name in names and parameter.requires_grad] for names in (own, *shared)]
        sizes = [[parameter.numel() for parameter in section] for section in sections]
        parameters = [parameter for section in sections for parameter in section]
        job, scale = self._job, LossScale(self._job.precision == "fp16")
        updater = Updater(parameters, None, None, scale, steps=job.total_steps, ema_decay=job.ema_decay)
        executor = StageExecutor(
            {stage: BuiltStage(program=program, module=module, turn_to=self._turn_to)},
            sizes=self._sizes,
            loss=self._captured.program.call_spec.out_spec,
            key=self._key,
            autocast=lambda: self._job.autocast(self._device),
            generators=self._drawing,
            gradients=Contributed(self._job.batch_size, lambda: updater.parameters),
            updater=updater,
            persistent=frozenset(model.state_dict()),
            unread=unread_state(self._captured, model) if stage == 0 else {},  # a checkpoint has it all the same
            compiler=self._compiler,
        )
        return StageState(executor, sizes)

    @staticmethod
    def _packing(state: StageState) -> StateFile:
        if state.packing is None:
            held, before, updater = state.executor.shards(), state.before, state.executor.updater
            kept = optimizer_state([updater.optimizer] if updater.optimizer is not None else [], held)
            tensors = {MODEL + part.name: part.tensor for part in held if part.name not in state.rebuilt}
            tensors |= {key: part.tensor for key, part in kept.tensors}
            tensors |= {BUFFER + name: buffer for name, buffer in state.own_buffers().items()}
            if before is not None:
                tensors |= {BEFORE + name: parameter for name, parameter in before.trained_by_name().items()}
            extra = training_state(updater.scheduler, state.executor.scale, ())
            extra["swarm"] = {"scale_before": before.executor.scale.state()} if before is not None else {}
            del extra["losses"]  # the journal has them
            plain = {key: to_plain(value, key) for key, value in extra.items()}
            state.packing = StateFile(tensors, kept.small, plain, state.rebuilt)
        return state.packing

    def _unpack(self, stage: int, packed: Tensor) -> StageState:
        saved, state = StateReader(packed), self._empty(stage)
        held, updater = state.executor.shards(), state.executor.updater
        self._check_rebuilt(state, saved)
        for part in held:
            if part.name not in saved.rebuilt:
                saved.fill(MODEL + part.name, part.tensor)
        for name, buffer in state.own_buffers().items():
            if BUFFER + name in saved:  # another mode does not store them
                saved.fill(BUFFER + name, buffer)
        if updater.optimizer is not None:
            room, put = allocate_state([updater.optimizer], held, saved.index, saved.small)
            for key, part in room:
                saved.fill(key, part.tensor)
            put()
            restore_groups([updater.optimizer], held, saved.small)
        extra = {key: from_plain(value, key) for key, value in saved.extra.items()}
        restore_training({**extra, "losses": ()}, 0, updater.scheduler, state.executor.scale)
        if state.before is not None:
            self._restore_before(state, state.before, saved, extra)
        return state

    @staticmethod
    def _check_rebuilt(state: StageState, saved: StateReader) -> None:
        """What is not in a state was made here, and must be what the sender has. What is in it stays in the states that follow."""
        tensors = {part.name: part.tensor for part in state.executor.shards()}
        unknown = {name: tensors[name] for name in saved.rebuilt if name in tensors and name not in state.rebuilt}
        check_rebuilt(saved.where, saved.rebuilt, state.rebuilt | tensor_digests(unknown))
        state.rebuilt = {name: state.rebuilt[name] for name in state.rebuilt if name in saved.rebuilt}

    @staticmethod
    def _restore_before(state: StageState, before: StageState, saved: StateReader, extra: dict[str, Any]) -> None:
        """Where training was without staleness until now, the weights before the last step are the present ones."""
        present = state.module.parameters_by_name()
        for name, parameter in before.trained_by_name().items():
            if BEFORE + name in saved:
                saved.fill(BEFORE + name, parameter)
            else:
                _copy([parameter], [present[name]])
        before.executor.scale.restore(extra.get("swarm", {}).get("scale_before") or state.executor.scale.state())

    def _empty(self, stage: int) -> StageState:
        """A state of the stage with whatever weights, the one that was expected where there is one."""
        expected, self._expected = self._expected, None
        return expected[1].result() if expected is not None and expected[0] == stage else self._build(stage)

    def read_chunk(self, state: StageState, chunk: int) -> Tensor:
        """A copy of one chunk of the state, weights and optimizer."""
        packing = self._packing(state)
        return packing.read(*chunk_range(packing.length, self._chunks, chunk))

    async def keep(self, state: StageState) -> Tensor:
        """A copy that later steps do not change, made in the thread."""
        return await self._run(lambda: self.snapshot(state))

    def read_kept(self, kept: Tensor, chunk: int) -> Tensor:
        """A copy of one chunk of it."""
        start, stop = chunk_range(kept.numel(), self._chunks, chunk)
        return kept[start:stop].clone()

    async def assemble(self, stage: int, chunks: Sequence[Tensor]) -> StageState:
        """The state from all its chunks."""
        return await self._run(lambda: self._unpack(stage, torch.cat(list(chunks))))

    def delayed(self, state: StageState) -> StageState:
        """The weights before the last step."""
        assert state.before is not None
        return state.before

    def snapshot(self, state: StageState) -> Tensor:
        """A copy that later steps do not change."""
        packing = self._packing(state)
        return packing.read(0, packing.length)

    async def restore(self, stage: int, snapshot: Tensor) -> StageState:
        """The state a snapshot was taken of."""
        return await self._run(lambda: self._unpack(stage, snapshot))

    # ---- micro-batches

    def _work(self, version: int, micro_batch: int, stage: int) -> WorkItem:
        start, stop = self._micro_batches[micro_batch]
        return WorkItem(stage, version + 1, micro_batch, start, stop - start)

    def _turn_to(self, work: WorkItem) -> None:
        """What is computed next."""

    def _compute(self, state: StageState, work: WorkItem, entering: Activations) -> Activations:
        """The forward; what leaves is in this device's memory."""
        leaves = to_device(entering.leaves, self._device)
        return state.executor.forward(work, Activations(entering.binding, leaves, [value.to(self._device) for value in entering.values]))

    async def forward(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any) -> Activations:
        """What leaves the stage. The graph is kept for the backward."""
        return await self._run(lambda: self._forward(state, self._work(version, micro_batch, stage), activations_of(entering)))

    def _paced(self, work: WorkItem, *directions: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.pace is None else self.pace.imposed(work.stage, work.micro_batch, *directions)

    def _forward(self, state: StageState, work: WorkItem, entering: Activations) -> Activations:
        with self._paced(work, False):
            made = self._compute(state, work, entering)
        state.executor.forget(before_step=work.step)
        leaves = {name: leaf for name, leaf in entering.leaves.items() if name in self._leaves[work.stage + 1]}
        return Activations(entering.binding, leaves, [value.cpu() for value in made.values])

    async def turn(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any
    ) -> tuple[list[Tensor], Contribution, float, float]:
        """Forward, loss and backward of the last stage."""
        return await self._run(lambda: self._turn(state, self._work(version, micro_batch, stage), activations_of(entering)))

    def _turn(self, state: StageState, work: WorkItem, entering: Activations) -> tuple[list[Tensor], Contribution, float, float]:
        with self._paced(work, False, True):
            self._compute(state, work, entering)
            loss = state.executor.loss(work)
            self.loss_is_mean = loss.is_mean
            back, own = state.executor.backward(work, [])
        return [value.cpu() for value in back], own, float(loss.total), float(loss.weight)

    async def backward(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any
    ) -> tuple[list[Tensor], Contribution]:
        """Of what the forward kept; where it was forgotten, the forward is run again and gives the same numbers."""
        return await self._run(lambda: self._backward(state, self._work(version, micro_batch, stage), activations_of(entering), gradient))

    def _backward(
        self, state: StageState, work: WorkItem, entering: Activations, gradient: list[Tensor]
    ) -> tuple[list[Tensor], Contribution]:
        with self._paced(work, True):
            if not state.executor.keeps(work):
                self._compute(state, work, entering)
            back, own = state.executor.backward(work, [given.to(self._device) for given in gradient])
        return [value.cpu() for value in back], own

    # ---- sums

    def buffer(self, stage: int) -> Sum:
        """An empty sum of contributions."""
        sections = self._sizes_of[stage]
        flat = torch.zeros(sum(map(_length, sections)), device=self._device)
        views, counts = _split(flat, sections)
        return Sum(flat, views, counts)

    async def accumulate(self, buffer: Sum, contribution: Contribution) -> None:
        """Adds in place; the sum has landed when this comes back."""

        def add() -> None:
            pairs = [(view, given) for view, given in zip(buffer.views, contribution, strict=True) if given is not None]
            if pairs:
                torch._foreach_add_([view for view, _ in pairs], [given.reshape(-1).float() for _, given in pairs])
            found = iter([float(given is not None) for given in contribution])
            for counts in buffer.counts:
                counts += torch.tensor([next(found) for _ in range(counts.numel())], device=self._device)

        await self._run(add)

    def _range(self, stage: int, section: int, chunk: int) -> tuple[int, int]:
        lengths = [_length(sizes) for sizes in self._sizes_of[stage]]
        first = sum(lengths[:section])
        start, stop = chunk_range(lengths[section], self._chunks, chunk)
        return first + start, first + stop

    def part(self, buffers: Sequence[Sum], stage: int, section: int, chunk: int) -> Tensor:
        """A copy of one chunk of the sum of buffers."""
        start, stop = self._range(stage, section, chunk)
        total = buffers[0].flat[start:stop].clone()
        for buffer in buffers[1:]:
            total += buffer.flat[start:stop]
        return total.cpu()

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Whether something that came from a peer has the form of that chunk of a sum."""
        start, stop = self._range(stage, section, chunk)
        return isinstance(part, Tensor) and part.dtype == torch.float32 and part.shape == (stop - start,)

    def zero(self, stage: int, chunk: int) -> Tensor:
        """A sum of no parts: nothing yet, so that the first part is the sum and not added to zeros."""
        return torch.empty(0)

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        """The sum. Parts are copies that nobody else holds."""
        return total.add_(part) if total.numel() else part

    def digest(self, sums: Sequence[Tensor]) -> str:
        """A fingerprint of a stage's reduced gradient, bit for bit."""
        found = hashlib.sha256()  # twice as fast as BLAKE2 where processors have instructions for it
        for part in sums:
            found.update(part.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()[:32]

    def norm_squared(self, stage: int, section: int, sums: Sequence[Tensor]) -> float:
        """Of one section of a stage's reduced gradient, undivided; not finite when the gradient is not."""
        left = sum(self._sizes_of[stage][section])
        total = 0.0
        for part in sums:
            total += _norm_squared(part[: max(0, left)])
            left -= part.numel()
        return total

    async def apply(self, state: StageState, sums: Sequence[Tensor], commit: Committed) -> StageState:
        """The state after the step; unchanged where the commit says the step is skipped."""
        return await self._run(lambda: self._apply(state, sums, commit))

    def _apply(self, state: StageState, sums: Sequence[Tensor], commit: Committed) -> StageState:
        for each in (state, state.before):
            if each is not None:
                each.executor.forget(before_step=commit.version + 2)
        state.packing = None
        after = state if state.before is None else self._step_aside(state, state.before)
        gradients = None if commit.skipped else self._mean_gradients(after, sums, commit.clip / commit.weight)
        after.executor.apply(Update(commit.version + 1, overflowed=commit.skipped, gradients=gradients))
        return after

    def _mean_gradients(self, state: StageState, sums: Sequence[Tensor], factor: float) -> list[Tensor | None]:
        """What a sum is times a factor, parameter by parameter; None for those that no micro-batch had a gradient for."""
        flat = torch.empty(sum(part.numel() for part in sums), device=self._device)
        for part, own in zip(sums, torch.split(flat, [part.numel() for part in sums]), strict=True):
            torch.mul(part.to(self._device), factor, out=own)
        views, counts = _split(flat, state.sizes)
        found = zip(state.parameters, views, torch.cat(counts).tolist(), strict=True)
        return [view.view_as(parameter).to(parameter.dtype) if count else None for parameter, view, count in found]

    @staticmethod
    def _step_aside(present: StageState, after: StageState) -> StageState:
        """The present weights stay as they are, as those before the step; the step is made in the tensors of the ones before them."""
        _copy(after.parameters, present.parameters)
        old, new = present.executor.updater, after.executor.updater
        new.optimizer, new.scheduler, old.optimizer, old.scheduler = old.optimizer, old.scheduler, None, None
        new.scale.restore(old.scale.state())
        if new.optimizer is not None:
            rebind(new.optimizer, old.parameters, new.parameters)
        after.before, present.before = present, None
        after.rebuilt = present.rebuilt
        return after


def chunk_range(length: int, chunks: int, chunk: int) -> tuple[int, int]:
    """Where a chunk begins and ends; chunks differ by one at most."""
    return length * chunk // chunks, length * (chunk + 1) // chunks


def _length(sizes: Sequence[int]) -> int:
    """Of a section: gradients and counts."""
    return sum(sizes) + len(sizes)


def _split(flat: Tensor, sections: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Where in it each parameter's gradient is, and the counts of each section."""
    views: list[Tensor] = []
    counts: list[Tensor] = []
    for sizes, section in zip(sections, torch.split(flat, [_length(sizes) for sizes in sections]), strict=True):
        *gradients, count = torch.split(section, [*sizes, len(sizes)])
        views += gradients
        counts.append(count)
    return views, counts


@torch.no_grad()
def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def _norm_squared(values: Tensor) -> float:
    """In fp64; block by block in fp32, which is twenty times as fast, where no square leaves its range."""
    if not values.numel():
        return 0.0
    blocks = torch.linalg.vector_norm(values[: values.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK), dim=1)
    rest = torch.linalg.vector_norm(values[blocks.numel() * _BLOCK :])
    norms = torch.cat([blocks, rest.view(1)]).double()
    if bool(((norms < 1e12) & ((norms > 1e-12) | (norms == 0))).all()):
        return float(norms.square().sum())
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def tied_parameters(programs: Sequence[StageProgram]) -> dict[tuple[int, ...], set[str]]:
    """Which stages share parameters, in order, and the names of those that each set of stages has in common."""
    users: dict[str, list[int]] = {}
    for stage, program in enumerate(programs):
        for name in sorted({name for unit in program.units for name in unit.parameters.values()}):
            users.setdefault(name, []).append(stage)
    found: dict[tuple[int, ...], set[str]] = {}
    for name, stages in users.items():
        if len(stages) > 1:
            found.setdefault(tuple(stages), set()).add(name)
    return dict(sorted(found.items()))


def programs_of(captured: Captured, bounds: Sequence[int]) -> list[StageProgram]:
    """The stages between bounds."""
    return [cut_stage(captured, start, stop) for start, stop in pairwise(bounds)]


def stage_names(job: Job, captured: Captured, bounds: Sequence[int], stage: int) -> list[str]:
    """Of the parameters and buffers a stage has, and with the first stage of all that no stage reads."""
    buffers = {value.name: name for value, name in captured.liveness.table.buffers.items()}
    program = cut_stage(captured, bounds[stage], bounds[stage + 1])
    units = (program.prologue, *program.units)
    own = {name for unit in units for name in unit.parameters.values()}
    own |= {buffers[name] for unit in units for name in unit.buffers.values() if name in buffers}
    return sorted(own) + (unread_names(captured, job.build_model("meta")) if stage == 0 else [])
