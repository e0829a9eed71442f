"""Compute: the arithmetic of one worker, on tensors. Everything slow runs in one thread of its own, so that heart-beats go on.

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
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from atoll.control.messages import Committed
from atoll.data import to_device
from atoll.graph.capture import Captured
from atoll.job import Job, read_loss
from atoll.runtime.stage.drawing import DrawKey
from atoll.runtime.stage.loss_scale import LossScale
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import StageProgram, cut_stage
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState
from atoll.runtime.swarm.packing import Packing, chunk_range, unpack
from atoll.runtime.swarm.parcel import Parcel, leaves_from, parcel_of
from atoll.runtime.swarm.staleness import check_rebindable, rebind

__all__ = ["CPU", "Contribution", "StageCompute", "StageState", "Sum", "programs_of", "tied_parameters"]

Result = TypeVar("Result")
_BLOCK = 4096
CPU = torch.device("cpu")


@dataclass
class StageState:
    """A stage's weights and optimizer. It is changed in place by a step. With staleness `before` has the weights before the last step."""

    module: StageModule
    parameters: list[nn.Parameter]
    sizes: list[list[int]]  # of the parameters, by section
    optimizer: torch.optim.Optimizer | None = None  # None: nothing is trained here
    scheduler: LRScheduler | None = None
    scale: LossScale = field(default_factory=lambda: LossScale(False))  # of losses computed with these weights
    packing: Packing | None = None  # as bytes, until the next step
    before: "StageState | None" = None


@dataclass
class Sum:
    """A buffer: section by section, gradients one after another, then how often each parameter had one."""

    flat: Tensor
    views: list[Tensor]  # of each parameter
    counts: list[Tensor]  # of each section


Contribution = list[Tensor | None]
"""A micro-batch's gradients, in the order of the stage's parameters."""


@dataclass
class _Kept:
    """A forward whose backward is to come."""

    inputs: list[Tensor]
    outputs: tuple[Any, ...]


class StageCompute:
    """What `atoll.control.Worker` computes with. `bounds` are the stages' first layers and the end of the last.

    Of stages that `recompute` says it of, layers' activations are not kept: backward runs every layer again, all but the model's last one.
    """

    def __init__(
        self,
        job: Job,
        captured: Captured,
        bounds: Sequence[int],
        *,
        chunks: int,
        micro_batches: Sequence[tuple[int, int]],
        generators: threading.Lock,
        staleness: int = 0,
        recompute: Sequence[bool] = (),
        device: torch.device = CPU,
    ) -> None:
        self._staleness = staleness
        self._recompute = recompute or [False] * (len(bounds) - 1)
        self.loss_is_mean = False  # of the last micro-batch
        self._job, self._captured, self._bounds, self._chunks = job, captured, bounds, chunks
        self._generators = generators  # held while somebody of this process seeds the global generators and draws from them
        self._micro_batches = micro_batches  # first sample and end of each, in the global batch
        self._programs = programs_of(captured, bounds)
        self._leaves = leaves_from(self._programs)
        self._sizes, self._key = Sizes(captured), DrawKey(job.seed)
        self._device = device  # of weights, sums and kernels; what comes from others and goes to them is in main memory
        self._spec = captured.program.call_spec.out_spec
        self._kept: dict[tuple[int, int, int], _Kept] = {}
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
            model = self._job.build_model("cpu")
        state = self._weights_of(stage, model)
        self._kept.clear()
        self._sizes_of = {stage: state.sizes}  # a worker is on one stage at a time
        if self._staleness:
            state.before = self._weights_of(stage, model)
        if state.parameters:
            state.optimizer = self._job.build_optimizer(state.parameters)
            state.scheduler = self._job.build_scheduler(state.optimizer)
            if self._staleness:
                check_rebindable(state.optimizer)
        return state

    def _weights_of(self, stage: int, model: nn.Module) -> StageState:
        """A stage with a copy of the model's weights, without an optimizer."""
        order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
        builder = StageBuilder(InitialState(self._captured, model), device=self._device, key=self._key)
        # the builder writes the device into a program's graphs: every state gets graphs of its own
        program = cut_stage(self._captured, self._bounds[stage], self._bounds[stage + 1])
        last_layer = len(self._captured.graph.layers) - 1
        module = builder.stage(program, [self._recompute[stage] and last_layer not in unit.layers for unit in program.units])
        held = sorted(module.parameters_by_name().items(), key=lambda item: order[item[0]])
        shared = [names for together, names in self._tied.items() if stage in together]
        own = {name for name, _ in held}.difference(*shared)
        sections = [[parameter for name, parameter in held if name in names and parameter.requires_grad] for names in (own, *shared)]
        sizes = [[parameter.numel() for parameter in section] for section in sections]
        parameters = [parameter for section in sections for parameter in section]
        return StageState(module, parameters, sizes, scale=LossScale(self._job.precision == "fp16"))

    @staticmethod
    def _packing(state: StageState) -> Packing:
        if state.packing is None:
            state.packing = Packing(
                {
                    "parameters": {name: parameter.detach() for name, parameter in state.module.parameters_by_name().items()},
                    "buffers": state.module.buffers_by_name(),
                    "optimizer": state.optimizer.state_dict() if state.optimizer is not None else None,
                    "scheduler": state.scheduler.state_dict() if state.scheduler is not None else None,
                    "before": [parameter.detach() for parameter in state.before.parameters] if state.before is not None else None,
                    "scales": [{**each.scale.state(), "enabled": each.scale.enabled} for each in (state, state.before) if each is not None],
                }
            )
        return state.packing

    def _unpack(self, stage: int, packed: Tensor) -> StageState:
        saved, state = unpack(packed), self._empty(stage)
        with torch.no_grad():
            for name, parameter in state.module.parameters_by_name().items():
                parameter.copy_(saved["parameters"][name])
            for name, buffer in state.module.buffers_by_name().items():
                buffer.copy_(saved["buffers"][name])
            if state.before is not None:  # where training was without staleness until now, both are the same
                _copy(state.before.parameters, saved.get("before") or state.parameters)
        self._restore_scales(state, saved.get("scales") or [])
        if state.optimizer is not None:
            state.optimizer.load_state_dict(saved["optimizer"])
        if state.scheduler is not None:
            state.scheduler.load_state_dict(saved["scheduler"])
        return state

    def _empty(self, stage: int) -> StageState:
        """A state of the stage with whatever weights, the one that was expected where there is one."""
        expected, self._expected = self._expected, None
        return expected[1].result() if expected is not None and expected[0] == stage else self._build(stage)

    def _restore_scales(self, state: StageState, scales: Sequence[dict[str, Any]]) -> None:
        """Where there are some: a run in another precision, or an older one, has none. Without staleness until now, one is both."""
        scaled = [scale for scale in scales if scale.get("enabled")]
        if state.scale.enabled and scaled:
            state.scale.restore(scaled[0])
            if state.before is not None:
                state.before.scale.restore(scaled[-1])

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

    async def forward(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any) -> Parcel:
        """What leaves the stage. The graph is kept for the backward."""
        return await self._run(lambda: self._forward(state, version, micro_batch, stage, parcel_of(entering)))

    def _forward(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Parcel) -> Parcel:
        kept = self._compute(state, version, micro_batch, stage, entering)
        self._forget_before(version)
        self._kept[version, micro_batch, stage] = kept
        leaves = {name: leaf for name, leaf in entering.leaves.items() if name in self._leaves[stage + 1]}
        return Parcel(entering.binding, leaves, [value.detach().cpu() for value in kept.outputs])

    def _forget_before(self, version: int) -> None:
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] >= version}

    def _compute(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Parcel) -> _Kept:
        program = self._programs[stage]
        inputs = [
            value.detach().to(self._device).requires_grad_(crossing.wants_gradient)
            for value, crossing in zip(entering.values, program.receives, strict=True)
        ]
        numbers = {name: self._sizes.number(expression, entering.binding) for name, expression in program.numbers.items()}
        values: dict[str, Any] = {**to_device(entering.leaves, self._device), **numbers}
        values.update(zip((crossing.name for crossing in program.receives), inputs, strict=True))
        self._turn_to(version, micro_batch)
        with self._autocast(), self._drawing(stage):
            return _Kept(inputs, state.module(values))

    def _drawing(self, stage: int) -> AbstractContextManager[Any]:
        return self._generators if any(unit.draws for unit in self._programs[stage].units) else nullcontext()

    def _turn_to(self, version: int, micro_batch: int) -> None:
        self._key.step, self._key.first_sample = version + 1, self._micro_batches[micro_batch][0]

    def _autocast(self) -> Any:
        if self._job.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.float16 if self._job.precision == "fp16" else torch.bfloat16)

    def _factor(self, state: StageState) -> float:
        """What the loss is multiplied by: a sample's share of the batch, as one process scales it; 1 but in fp16."""
        return state.scale.value / self._job.batch_size if state.scale.enabled else 1.0

    async def turn(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any
    ) -> tuple[list[Tensor], Contribution, float, float]:
        """Forward, loss and backward of the last stage."""
        return await self._run(lambda: self._turn(state, version, micro_batch, stage, parcel_of(entering)))

    def _turn(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Parcel
    ) -> tuple[list[Tensor], Contribution, float, float]:
        kept = self._compute(state, version, micro_batch, stage, entering)
        value = read_loss(pytree.tree_unflatten(list(kept.outputs), self._spec))
        self.loss_is_mean = value.weight is None
        start, stop = self._micro_batches[micro_batch]
        total = value.value if value.weight is not None else value.value * (stop - start)
        weight = float(value.weight) if value.weight is not None else float(stop - start)
        back, own = self._differentiate(state, stage, kept, [total * self._factor(state)], [None])
        return back, own, float(total.detach()), weight

    async def backward(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any
    ) -> tuple[list[Tensor], Contribution]:
        """Of what the forward kept; where it was forgotten, the forward is run again and gives the same numbers."""
        return await self._run(lambda: self._backward(state, version, micro_batch, stage, parcel_of(entering), gradient))

    def _backward(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Parcel, gradient: list[Tensor]
    ) -> tuple[list[Tensor], Contribution]:
        kept = self._kept.pop((version, micro_batch, stage), None) or self._compute(state, version, micro_batch, stage, entering)
        wanting = [value for value, crossing in zip(kept.outputs, self._programs[stage].sends, strict=True) if crossing.wants_gradient]
        pairs = [(value, given) for value, given in zip(wanting, gradient, strict=True) if value.requires_grad]
        self._turn_to(version, micro_batch)
        return self._differentiate(state, stage, kept, [value for value, _ in pairs], [given.to(self._device) for _, given in pairs])

    def _differentiate(
        self, state: StageState, stage: int, kept: _Kept, roots: list[Tensor], gradients: list[Tensor | None]
    ) -> tuple[list[Tensor], Contribution]:
        wanted = [value for value, crossing in zip(kept.inputs, self._programs[stage].receives, strict=True) if crossing.wants_gradient]
        of = [*wanted, *state.parameters]
        found: Sequence[Tensor | None] = [None] * len(of)
        if roots and of:
            with self._drawing(stage) if self._recompute[stage] else nullcontext():
                found = torch.autograd.grad(roots, of, gradients, allow_unused=True)
        back = [(given if given is not None else torch.zeros_like(value)).cpu() for value, given in zip(wanted, found, strict=False)]
        own = list(found[len(wanted) :])
        if state.scale.enabled:  # what is sent back stays scaled; what is summed does not, so that sums need not know of it
            own = [given if given is None else given.float() / self._factor(state) for given in own]
        return back, own

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

    def zero(self, stage: int, chunk: int) -> Tensor:
        """A sum of no parts: nothing yet, so that the first part is the sum and not added to zeros."""
        return torch.empty(0)

    def add(self, total: Tensor, part: Tensor) -> Tensor:
        """The sum. Parts are copies that nobody else holds."""
        return total.add_(part) if total.numel() else part

    def store(self, buffer: Sum, chunk: int, value: Tensor) -> None:
        """Overwrites one chunk of a buffer (only with the check `out-of-place` off)."""
        (stage,) = self._sizes_of
        start, stop = self._range(stage, 0, chunk)
        buffer.flat[start:stop] = value

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
        state.packing = None
        self._forget_before(commit.version + 1)
        if state.before is not None:
            self._step_aside(state, state.before)
        state.scale.update(commit.skipped)
        if commit.skipped or state.optimizer is None:
            return state
        flat = torch.empty(sum(part.numel() for part in sums), device=self._device)
        for part, own in zip(sums, torch.split(flat, [part.numel() for part in sums]), strict=True):
            torch.mul(part.to(self._device), commit.clip / commit.weight, out=own)
        views, counts = _split(flat, state.sizes)
        for parameter, view, count in zip(state.parameters, views, torch.cat(counts).tolist(), strict=True):
            parameter.grad = view.view_as(parameter) if count else None
        state.optimizer.step()
        if state.scheduler is not None:
            state.scheduler.step()
        for parameter in state.parameters:
            parameter.grad = None
        return state

    @staticmethod
    def _step_aside(state: StageState, before: StageState) -> None:
        """The present weights stay as they are, as those before the step; the step is made in the tensors of the ones before them."""
        _copy(before.parameters, state.parameters)
        state.module, before.module = before.module, state.module
        state.parameters, before.parameters = before.parameters, state.parameters
        before.scale.restore(state.scale.state())
        if state.optimizer is not None:
            rebind(state.optimizer, before.parameters, state.parameters)


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
