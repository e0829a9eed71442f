"""Evaluation in a lockstep run: forward passes through the plan's stages, with numbers equal to one process's.

Each micro-batch of the evaluation data (those that one process would take) visits one rank of every stage; ranks take turns. A parameter
that a rank holds only part of is put together, unit by unit, among the ranks of its worker just before it is used, as FSDP does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from atoll.blame import users_code
from atoll.data import Batch, Dataset, to_device
from atoll.errors import AtollError, CaptureError, JobFailedError
from atoll.events import Evaluated
from atoll.graph.capture import Captured
from atoll.job import Job, LossValue
from atoll.runtime.activations import Activations
from atoll.runtime.batch_loader import BatchLoader, LoadedBatch
from atoll.runtime.evaluated_programs import EvaluatedPrograms
from atoll.runtime.evaluation import EvaluationSums, averaged, evaluated_functions, loader_for
from atoll.runtime.executor import Accumulated, BuiltStage, LossScale, StageExecutor, Updater, WorkItem
from atoll.runtime.modes.lockstep.agreement import ChangedBuffers
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.modes.lockstep.sharding import OptimizerShard
from atoll.runtime.modes.lockstep.whole_model import WholeModel
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.eager import EagerEvaluation, EagerStage, WholeBatch, eager_program
from atoll.runtime.stage.module import EvaluationBuilder, StageModule
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState

__all__ = ["EvaluatedFunction", "Evaluation", "buffers_read", "prepare_eager_evaluation", "prepare_evaluation"]


@dataclass(kw_only=True)
class _EvalStage(BuiltStage):
    """A stage of one function's program."""

    module: StageModule | EagerEvaluation
    place: RankPlace


@dataclass
class EvaluatedFunction:
    """The evaluation loss (its name is empty) or a metric, cut like the plan."""

    name: str
    sizes: Sizes
    stages: list[_EvalStage]
    executor: StageExecutor
    terms: int  # that its value is the sum of
    note: str | None  # what is not exact; None: that is seen when it is evaluated
    unweighted: bool = False  # a value of it, seen here, had no weight


def prepare_evaluation(
    job: Job,
    programs: EvaluatedPrograms,
    layout: Layout,
    rank: int,
    training: Captured,
    buffers: Mapping[str, Tensor],
    model: nn.Module,
    device: torch.device,
    key: DrawKey,
    compiler: Compiler | None = None,
) -> list[EvaluatedFunction]:
    """Cut the programs of what is evaluated where the plan cuts training. `buffers` are training's, by the user's names."""
    prepared = []
    for name, captured in programs.items():
        if isinstance(captured, AtollError):
            continue
        builder = EvaluationBuilder(InitialState(captured, model), buffers, device=device, key=key)
        stages = []
        for place in layout.places(rank):
            stage = layout.plan.stages[place.stage]
            program = cut_stage(captured, *(_same_layer(training, captured, index) for index in (stage.start, stage.stop)))
            stages.append(_EvalStage(program=program, module=builder.stage(program), place=place))
        note = averaged(name) if captured.loss_form.kind == "unknown" else ""
        structure = captured.program.call_spec.out_spec
        prepared.append(_function(job, name, Sizes(captured), stages, structure, device, key, captured.loss_form.terms, note, compiler))
    return prepared


def prepare_eager_evaluation(
    job: Job, layout: Layout, rank: int, stage: EagerStage, device: torch.device, key: DrawKey, compiler: Compiler | None = None
) -> list[EvaluatedFunction]:
    """What is evaluated of a model that could not be captured, by the user's own functions."""
    prepared = []
    for name, function in evaluated_functions(job).items():
        known = f"metrics[{name!r}]" if name else ("eval_loss" if job.eval_loss else "loss")
        stages = [_EvalStage(program=eager_program(), module=EagerEvaluation(stage, function, known), place=p) for p in layout.places(rank)]
        structure = pytree.tree_structure(0)
        prepared.append(_function(job, name, WholeBatch(), stages, structure, device, key, 1, None, compiler))
    return prepared


def _function(
    job: Job,
    name: str,
    sizes: Sizes,
    stages: list[_EvalStage],
    loss: pytree.TreeSpec,
    device: torch.device,
    key: DrawKey,
    terms: int,
    note: str | None,
    compiler: Compiler | None,
) -> EvaluatedFunction:
    executor = StageExecutor(
        {stage.place.stage: stage for stage in stages},
        sizes=sizes,
        loss=loss,
        key=key,
        autocast=lambda: job.autocast(device),
        generators=key.lock,
        gradients=Accumulated(job.batch_size),
        updater=Updater([], None, None, LossScale(False), steps=job.total_steps),
        compiler=compiler,
    )
    return EvaluatedFunction(name, sizes, stages, executor, terms, note)


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


def buffers_read(functions: Sequence[EvaluatedFunction]) -> Iterator[tuple[str, Tensor]]:
    """The buffers that evaluation reads on this rank, by the user's names."""
    for function in functions:
        for stage in function.stages:
            yield from stage.module.buffers_by_name().items()


class Evaluation:
    """Evaluates on all ranks together; every rank must call `run` after the same steps."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        rank: int,
        device: torch.device,
        functions: list[EvaluatedFunction],
        owned: Sequence[OptimizerShard],
        lane_divided: set[str],
        doing: Callable[[object, int], None],
        lock: Lock,
        buffers: ChangedBuffers | None = None,
        whole_model: WholeModel | None = None,
    ) -> None:
        """`lock` is held while this process loads data, which seeds the generators; `buffers` are those that evaluation reads and
        training's exchange after every step does not bring up to date, if there may be some; `whole_model` evaluates the rest.
        """
        self._whole_model = whole_model
        self._doing, self._step, self._buffers = doing, 0, buffers
        self._averages: Mapping[nn.Parameter, Tensor] = {}
        self._lock = lock
        self._loader: BatchLoader | None = None  # of what was evaluated last
        self._batches: Iterator[LoadedBatch] = iter(())
        self._told = False  # what is not exact, by the first evaluation
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

    def run(
        self,
        step: int,
        moment: Callable[[], float],
        dataset: Dataset | None = None,
        averages: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> Evaluated:
        """The losses and metrics of a whole data set; None: the job's evaluation data. `averages` stand for parameters that have one."""
        self._averages = averages or {}
        began, self._step = time.perf_counter(), step
        self._loader = loader_for(self._job, dataset if dataset is not None else self._job.eval_dataset, self._loader, self._lock)
        if self._buffers is not None:
            self._buffers.agree()
        size, length = self._loader.samples.batch_size, self._loader.samples.length
        pieces = [range(start, min(start + size, length)) for start in range(0, length, size)]
        found = []
        for function in self._functions:
            with users_code(f"evaluation after step {step}: {function.name or 'the loss'}", JobFailedError):
                found.append(self._measure(function, pieces).sums)
        self._doing(Doing("waiting for the others' part of the evaluation", "others"), step)
        sums = torch.cat([*found, torch.tensor([float(function.unweighted) for function in self._functions], dtype=torch.float64)])
        dist.all_reduce(sums)
        *parts, unweighted = torch.split(sums, [*(len(one) for one in found), len(self._functions)])
        means = {f.name: EvaluationSums(one).mean() for f, one in zip(self._functions, parts, strict=True)}
        notes = [] if self._told else self._inexact(unweighted.tolist(), len(pieces))
        if self._whole_model is not None:
            self._doing(Doing("evaluating the whole model on rank 0", "user" if self.rank == 0 else "others"), step)
            others = self._whole_model.run(step, self._loader.samples.dataset)
            means, notes = {**means, **others.means}, [*notes, *others.notes]
        self._told = True
        loss, seconds = means.pop(""), time.perf_counter() - began
        metrics = {name: means[name] for name in self._job.metrics}
        return Evaluated(at_seconds=moment(), step=step, loss=loss, metrics=metrics, samples=length, seconds=seconds, notes=tuple(notes))

    def _inexact(self, unweighted: Sequence[float], pieces: int) -> list[str]:
        """What there is to say of functions whose values are averaged: one whose form is not known, or that returns no weight."""
        notes = []
        for function, without in zip(self._functions, unweighted, strict=True):
            if function.note:
                notes.append(function.note)
            elif function.note is None and without and pieces > 1:
                notes.append(averaged(function.name))
        return notes

    def _measure(self, function: EvaluatedFunction, pieces: Sequence[range]) -> EvaluationSums:
        """Totals and weights of what this rank computed."""
        turns = _Turns(self, function, pieces, self._step)
        taken = list(self._taken(function, len(pieces)))
        read = (pieces[number] for stage, number in taken if stage.place.tensor == 0 and number < len(pieces))
        assert self._loader is not None
        self._batches = self._loader.batches(map(self._loader.samples.request, read))
        for stage, number in taken:
            turns.take(stage, number)
        return turns.finish()

    def _taken(self, function: EvaluatedFunction, count: int) -> Iterator[tuple[_EvalStage, int]]:
        """The micro-batches of a rank's stages, in the order it takes them."""
        for number in range(max(self._rounds(stage.place, count) for stage in function.stages)):
            for stage in function.stages:
                if number < self._rounds(stage.place, count):
                    yield stage, self._micro_batch(stage.place, number)

    def _rounds(self, place: RankPlace, count: int) -> int:
        """How often a worker's lanes take a micro-batch each; in the last round some may have none."""
        stage = self._layout.plan.stages[place.stage]
        return -(-(count - place.replica) // (len(stage.replicas) * stage.lanes))

    def _micro_batch(self, place: RankPlace, round_number: int) -> int:
        """The micro-batch a lane takes in a round: all lanes of all replicas in turn."""
        stage = self._layout.plan.stages[place.stage]
        return (round_number * stage.lanes + place.lane) * len(stage.replicas) + place.replica

    def computes(self, place: RankPlace, number: int) -> int:
        """The rank that computes a micro-batch at a place's stage."""
        stage = self._layout.plan.stages[place.stage]
        replica, lane = number % len(stage.replicas), number // len(stage.replicas) % stage.lanes
        return self._layout.rank(RankPlace(place.stage, replica, lane, 0))

    def load(self) -> Batch:
        """The next micro-batch that this rank takes, on the device."""
        self._doing(Doing(self._in_words, "user"), self._step)
        batch = to_device(next(self._batches).batch, self.device)
        self._doing("evaluating", self._step)
        return batch

    def _value(self, own: OptimizerShard) -> Tensor:
        return self._averages.get(own.leaf, own.leaf).detach()

    def _in_words(self) -> str:
        index = self._loader.samples.reading if self._loader is not None else None
        return f"reading sample {index} of the evaluation data" if index is not None else "reading the evaluation data"

    def close(self) -> None:
        """Ends the processes that load its data."""
        if self._loader is not None:
            self._loader.close()
        if self._whole_model is not None:
            self._whole_model.close()

    def whole(self, name: str, stage: int) -> Tensor:
        """A parameter, put together by all ranks of the worker where each holds a part."""
        own = self._owned[name]
        if own.holding.dim is None and not own.sharded:
            return self._value(own)
        place = next(place for place in self._layout.places(self.rank) if place.stage == stage)
        value = torch.zeros(own.holding.shape, dtype=own.leaf.dtype, device=self.device)
        among_lanes = own.sharded or name in self._lane_divided
        along_lane = own.holding.dim is not None and name not in self._lane_divided
        if (place.lane == 0 or among_lanes) and (place.tensor == 0 or along_lane):
            _put(own, self._value(own), value)
        dist.all_reduce(value, group=self._workers[stage])
        return value


def _put(own: OptimizerShard, value: Tensor, whole: Tensor) -> None:
    """Write what a rank owns of a parameter into its place in the whole."""
    if own.flat is None:
        own.holding.put(whole, value)
        return
    part = torch.zeros(own.holding.local_shape, dtype=whole.dtype, device=whole.device)
    part.view(-1)[own.flat[0] : own.flat[1]] = value.reshape(-1)
    own.holding.put(whole, part)


class _Turns:
    """One function over all of the data, as one rank sees it."""

    def __init__(self, evaluation: Evaluation, function: EvaluatedFunction, pieces: Sequence[range], step: int) -> None:
        self._evaluation, self._function, self._pieces, self._step = evaluation, function, pieces, step
        self._handed: dict[tuple[int, int], list[Tensor]] = {}
        self._leaving: list[tuple[Any, Tensor]] = []
        self._sums = EvaluationSums.of_terms(function.terms)

    def take(self, stage: _EvalStage, number: int) -> None:
        """Compute a micro-batch, if this rank has one; take part in putting parameters together in any case."""
        stage.module.around = lambda unit: unit.holding(lambda name: self._evaluation.whole(name, stage.place.stage))
        if stage.place.tensor != 0 or number >= len(self._pieces):
            for unit in stage.module.all_units():
                with stage.module.around(unit):
                    pass
            return
        indices = self._pieces[number]
        work = WorkItem(stage.place.stage, self._step, number, indices.start, len(indices))
        made = self._function.executor.evaluate(work, self._inputs(stage, number))
        if isinstance(made, LossValue):
            self._sums.add(made, len(indices))
            self._function.unweighted = self._function.unweighted or made.weight is None
        else:
            self._pass_on(stage.place.stage, number, made.values)

    def _inputs(self, stage: _EvalStage, number: int) -> Activations:
        sizes, program, place = self._function.sizes, stage.program, stage.place
        leaves = sizes.leaves(self._evaluation.load())
        binding = sizes.bind(leaves)
        if place.stage == 0:
            return Activations(binding, leaves, [])
        source = self._evaluation.computes(RankPlace(place.stage - 1, 0, 0, 0), number)
        if source == self._evaluation.rank:
            return Activations(binding, leaves, self._handed.pop((place.stage, number)))
        shapes = [sizes.shape(crossing, binding) for crossing in program.receives]
        received = [
            torch.empty(shape, dtype=crossing.dtype, device=self._evaluation.device)
            for shape, crossing in zip(shapes, program.receives, strict=True)
        ]
        for index, tensor in enumerate(received):
            dist.recv(tensor, source, tag=index)
        return Activations(binding, leaves, received)

    def _pass_on(self, stage: int, number: int, values: Sequence[Tensor]) -> None:
        sent = [value.contiguous() for value in values]
        target = self._evaluation.computes(RankPlace(stage + 1, 0, 0, 0), number)
        if target == self._evaluation.rank:
            self._handed[stage + 1, number] = sent
            return
        for index, tensor in enumerate(sent):
            self._leaving.append((dist.isend(tensor, target, tag=index), tensor))

    def finish(self) -> EvaluationSums:
        """What was counted; everything sent has left."""
        for work, _ in self._leaving:
            work.wait()
        return self._sums
