"""Evaluation in a lockstep run: forward passes through the plan's stages, with numbers equal to one process's.

Each micro-batch of the evaluation data (those that one process would take) visits one rank of every stage; ranks take turns. A parameter
that a rank holds only part of is put together, unit by unit, among the ranks of its worker just before it is used, as FSDP does.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from atoll.blame import users_code
from atoll.data import Batch, to_device
from atoll.errors import CaptureError, JobFailedError
from atoll.events import Evaluated
from atoll.graph.capture import Captured, capture_program
from atoll.graph.graph import Precision
from atoll.job import Job, LossFunction, read_loss
from atoll.runtime.lockstep.beats import Doing
from atoll.runtime.lockstep.layout import Layout, Place
from atoll.runtime.lockstep.owned import Owned
from atoll.runtime.stage.program import StageProgram, Unit, cut_stage
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState

__all__ = ["Evaluation", "EvaluatedFunction", "buffers_read", "capture_evaluated", "prepare_evaluation"]


@dataclass(frozen=True)
class _Measured:
    """A function of the model to capture: the evaluation loss, or a metric."""

    name: str
    model: nn.Module | Callable[[], nn.Module]
    loss: LossFunction
    precision: Precision
    job: Job

    def example_batch(self, samples: int) -> Batch:
        """As many samples of the evaluation data, collated."""
        dataset = self.job.eval_dataset
        assert dataset is not None
        return self.job.collate([dataset[i % len(dataset)] for i in range(samples)])


@dataclass
class _EvalUnit:
    unit: Unit
    module: fx.GraphModule
    buffers: dict[str, Tensor]  # that it reads, by the user's names


@dataclass
class _EvalStage:
    """A stage of one function's program."""

    place: Place
    program: StageProgram
    units: list[_EvalUnit]  # the prologue first


@dataclass
class EvaluatedFunction:
    """The evaluation loss (its name is empty) or a metric, cut like the plan."""

    name: str
    captured: Captured
    sizes: Sizes
    stages: list[_EvalStage]


def capture_evaluated(job: Job) -> dict[str, Captured]:
    """The programs of what is evaluated: the loss, under an empty name, and metrics. None when the job does not evaluate."""
    if job.eval_dataset is None:
        return {}
    programs = {}
    for name, function in {"": job.eval_loss or job.loss, **job.metrics}.items():
        known = name or ("eval_loss" if job.eval_loss else "loss")
        programs[name] = capture_program(_Measured(f"{job.name}: {known}", job.model, function, job.precision, job), training=False)
    return programs


def prepare_evaluation(
    programs: Mapping[str, Captured],
    layout: Layout,
    rank: int,
    training: Captured,
    buffers: Mapping[str, Tensor],
    state: Callable[[Captured], InitialState],
    device: torch.device,
) -> list[EvaluatedFunction]:
    """Cut the programs of what is evaluated where the plan cuts training."""
    prepared = []
    for name, captured in programs.items():
        stages = [_cut(layout, place, training, captured, buffers, state(captured), device) for place in layout.places(rank)]
        prepared.append(EvaluatedFunction(name, captured, Sizes(captured), stages))
    return prepared


def _cut(
    layout: Layout,
    place: Place,
    training: Captured,
    captured: Captured,
    buffers: Mapping[str, Tensor],
    state: InitialState,
    device: torch.device,
) -> _EvalStage:
    stage = layout.plan.stages[place.stage]
    start, stop = (_same_layer(training, captured, index) for index in (stage.start, stage.stop))
    program = cut_stage(captured, start, stop)
    units = [_unit(unit, buffers, state, device) for unit in (program.prologue, *program.units)]
    return _EvalStage(place, program, units)


def _same_layer(training: Captured, captured: Captured, index: int) -> int:
    """The layer of the evaluated program that begins where a layer of the trained one does."""
    layers, others = training.graph.layers, captured.graph.layers
    if index in (0, len(layers)):
        return 0 if index == 0 else len(others)
    found = [i for i, layer in enumerate(others) if layer.name == layers[index].name]
    if len(found) != 1 or not others[found[0] - 1].cut:
        raise CaptureError(
            f"{captured.graph.name} cannot be evaluated under this plan: in evaluation mode the model has no cut before "
            f"{layers[index].name!r}, where the plan cuts it; choose another plan"
        )
    return found[0]


def _unit(unit: Unit, buffers: Mapping[str, Tensor], state: InitialState, device: torch.device) -> _EvalUnit:
    """The unit's code; parameters are given to it each time it runs, buffers are those that training moves."""
    root, named = nn.Module(), dict[str, Tensor]()
    for attribute in unit.parameters:
        root.register_buffer(attribute, torch.empty(0), persistent=False)
    for attribute, placeholder in unit.buffers.items():
        name = state.buffer_name(placeholder)
        value = buffers[name] if name is not None and name in buffers else state.value(placeholder).to(device, copy=True)
        root.register_buffer(attribute, value, persistent=False)
        if name is not None:
            named[name] = value
    for attribute, module in unit.modules.items():
        root.add_module(attribute, module)
    return _EvalUnit(unit, fx.GraphModule(root, unit.graph), named)


def buffers_read(functions: Sequence[EvaluatedFunction]) -> Iterator[tuple[str, Tensor]]:
    """The buffers that evaluation reads on this rank, by the user's names."""
    for function in functions:
        for stage in function.stages:
            for one in stage.units:
                yield from one.buffers.items()


class Evaluation:
    """Evaluates on all ranks together; every rank must call `run` after the same steps."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        rank: int,
        device: torch.device,
        functions: list[EvaluatedFunction],
        owned: Sequence[Owned],
        lane_divided: set[str],
        doing: Callable[[object, int], None],
    ) -> None:
        self._doing, self._step = doing, 0
        self._job, self._layout, self.rank, self.device, self._functions = job, layout, rank, device, functions
        self._owned = {part.name: part for part in owned}
        self._lane_divided = lane_divided
        self._workers = self._make_groups()

    def _make_groups(self) -> dict[int, Any]:
        """Stage → the group of this rank's worker. All ranks make all groups, in order."""
        own: dict[int, Any] = {}
        made: dict[tuple[int, ...], Any] = {}
        for s, stage in enumerate(self._layout.plan.stages):
            for replica in stage.replicas:
                ranks = tuple(self._layout.rank_of_device(device) for device in replica.devices)
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = dist.new_group(list(ranks))
                if self.rank in ranks:
                    own[s] = made.get(ranks)
        return own

    def run(self, step: int, moment: Callable[[], float]) -> Evaluated:
        """The losses and metrics of the whole evaluation data."""
        began, self._step = time.perf_counter(), step
        dataset = self._job.eval_dataset
        assert dataset is not None
        size, length = self._job.micro_batch_size or self._job.batch_size, len(dataset)
        pieces = [range(start, min(start + size, length)) for start in range(0, length, size)]
        sums = torch.zeros(len(self._functions), 2, dtype=torch.float64)
        with torch.no_grad():
            for index, function in enumerate(self._functions):
                with users_code(f"evaluation after step {step}: {function.name or 'the loss'}", JobFailedError):
                    sums[index] = self._measure(function, pieces)
        self._doing(Doing("waiting for the others' part of the evaluation", "others"), step)
        dist.all_reduce(sums)
        means = {f.name: _mean(*sums[i].tolist()) for i, f in enumerate(self._functions)}
        return Evaluated(
            at_seconds=moment(), step=step, loss=means.pop(""), metrics=means, samples=length, seconds=time.perf_counter() - began
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context forwards run in."""
        return self._job.autocast(self.device)

    def _measure(self, function: EvaluatedFunction, pieces: Sequence[range]) -> Tensor:
        """Sum and weight of what this rank computed."""
        turns = _Turns(self, function, pieces)
        most = max(self._rounds(stage.place, len(pieces)) for stage in function.stages)
        for number in range(most):
            for stage in function.stages:
                if number < self._rounds(stage.place, len(pieces)):
                    turns.take(stage, self._micro_batch(stage.place, number))
        return turns.finish()

    def _rounds(self, place: Place, count: int) -> int:
        """How often a worker's lanes take a micro-batch each; in the last round some may have none."""
        stage = self._layout.plan.stages[place.stage]
        return -(-(count - place.replica) // (len(stage.replicas) * stage.lanes))

    def _micro_batch(self, place: Place, round_number: int) -> int:
        """The micro-batch a lane takes in a round: all lanes of all replicas in turn."""
        stage = self._layout.plan.stages[place.stage]
        return (round_number * stage.lanes + place.lane) * len(stage.replicas) + place.replica

    def computes(self, place: Place, number: int) -> int:
        """The rank that computes a micro-batch at a place's stage."""
        stage = self._layout.plan.stages[place.stage]
        replica, lane = number % len(stage.replicas), number // len(stage.replicas) % stage.lanes
        return self._layout.rank(Place(place.stage, replica, lane, 0))

    def load(self, indices: range) -> Batch:
        """The samples of a micro-batch, collated, on the device."""
        dataset = self._job.eval_dataset
        assert dataset is not None
        samples = []
        for index in indices:
            self._doing(Doing(f"reading sample {index} of the evaluation data", "user"), self._step)
            samples.append(dataset[index])
        batch = to_device(self._job.collate(samples), self.device)
        self._doing("evaluating", self._step)
        return batch

    def whole(self, name: str, stage: int) -> Tensor:
        """A parameter, put together by all ranks of the worker where each holds a part."""
        own = self._owned[name]
        if own.holding.dim is None and not own.sharded:
            return own.leaf.detach()
        place = next(place for place in self._layout.places(self.rank) if place.stage == stage)
        value = torch.zeros(own.holding.shape, dtype=own.leaf.dtype, device=self.device)
        among_lanes = own.sharded or name in self._lane_divided
        along_lane = own.holding.dim is not None and name not in self._lane_divided
        if (place.lane == 0 or among_lanes) and (place.tensor == 0 or along_lane):
            _put(own, value)
        dist.all_reduce(value, group=self._workers[stage])
        return value


def _put(own: Owned, whole: Tensor) -> None:
    """Write what a rank owns of a parameter into its place in the whole."""
    if own.flat is None:
        own.holding.put(whole, own.leaf.detach())
        return
    part = torch.zeros(own.holding.local_shape, dtype=whole.dtype, device=whole.device)
    part.view(-1)[own.flat[0] : own.flat[1]] = own.leaf.detach().reshape(-1)
    own.holding.put(whole, part)


class _Turns:
    """One function over all of the data, as one rank sees it."""

    def __init__(self, evaluation: Evaluation, function: EvaluatedFunction, pieces: Sequence[range]) -> None:
        self._evaluation, self._function, self._pieces = evaluation, function, pieces
        self._handed: dict[tuple[int, int], list[Tensor]] = {}
        self._leaving: list[tuple[Any, Tensor]] = []
        self._sums = torch.zeros(2, dtype=torch.float64)

    def take(self, stage: _EvalStage, number: int) -> None:
        """Compute a micro-batch, if this rank has one; take part in putting parameters together in any case."""
        place, device = stage.place, self._evaluation.device
        computing = place.tensor == 0 and number < len(self._pieces)
        values = self._inputs(stage, number) if computing else {}
        for one in stage.units:
            parameters = {attribute: self._evaluation.whole(name, place.stage) for attribute, name in one.unit.parameters.items()}
            if computing:
                for attribute, value in parameters.items():
                    setattr(one.module, attribute, value)
                with self._evaluation.autocast():
                    made = one.module(*[values[name] for name in one.unit.inputs])
                values.update(zip(one.unit.outputs, made, strict=True))
                for attribute in parameters:
                    setattr(one.module, attribute, torch.empty(0, device=device))
        if computing:
            self._pass_on(stage, number, values)

    def _inputs(self, stage: _EvalStage, number: int) -> dict[str, Any]:
        sizes, program, place = self._function.sizes, stage.program, stage.place
        leaves = sizes.leaves(self._evaluation.load(self._pieces[number]))
        binding = sizes.bind(leaves)
        values = {**leaves, **{name: sizes.number(e, binding) for name, e in program.numbers.items()}}
        if place.stage == 0:
            return values
        source = self._evaluation.computes(Place(place.stage - 1, 0, 0, 0), number)
        if source == self._evaluation.rank:
            received = self._handed.pop((place.stage, number))
        else:
            shapes = [sizes.shape(crossing, binding) for crossing in program.receives]
            received = [
                torch.empty(shape, dtype=crossing.dtype, device=self._evaluation.device)
                for shape, crossing in zip(shapes, program.receives, strict=True)
            ]
            for index, tensor in enumerate(received):
                dist.recv(tensor, source, tag=index)
        values.update(zip((crossing.name for crossing in program.receives), received, strict=True))
        return values

    def _pass_on(self, stage: _EvalStage, number: int, values: dict[str, Any]) -> None:
        if stage.program.last:
            self._count([values[r] if isinstance(r, str) else r for r in stage.program.results], len(self._pieces[number]))
            return
        sent = [values[crossing.name].contiguous() for crossing in stage.program.sends]
        target = self._evaluation.computes(Place(stage.place.stage + 1, 0, 0, 0), number)
        if target == self._evaluation.rank:
            self._handed[stage.place.stage + 1, number] = sent
            return
        for index, tensor in enumerate(sent):
            self._leaving.append((dist.isend(tensor, target, tag=index), tensor))

    def _count(self, results: list[Any], samples: int) -> None:
        value, weight = read_loss(pytree.tree_unflatten(results, self._function.captured.program.call_spec.out_spec))
        amount = float(samples) if weight is None else float(weight)
        self._sums += torch.tensor([float(value) * (amount if weight is None else 1.0), amount], dtype=torch.float64)

    def finish(self) -> Tensor:
        """Sum and weight; everything sent has left."""
        for work, _ in self._leaving:
            work.wait()
        return self._sums


def _mean(total: float, weight: float) -> float | None:
    value = total / weight if weight else math.nan
    return value if math.isfinite(value) else None
