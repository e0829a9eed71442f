"""Where a rank's stages come from: cut from the captured program, or the user's own code as one stage where that could not be captured."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from atoll.data import Dataset
from atoll.errors import AtollError, JobError, PlanError
from atoll.graph import Graph
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured
from atoll.job import Job
from atoll.runtime.evaluated_programs import EvaluatedPrograms, capture_evaluated
from atoll.runtime.modes.lockstep.agreement import agree_on_evaluated
from atoll.runtime.modes.lockstep.evaluation import EvaluatedFunction, prepare_eager_evaluation, prepare_evaluation
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.parallelize import CutStage, check_lane_sizes, cut_stages
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.eager import EagerStage, WholeBatch, eager_program, loss_structures
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import shared_parameters
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState, unread_state

__all__ = ["StageSource", "TakenStages", "TrainedStage", "stage_source"]

TrainedStage = StageModule | EagerStage


@dataclass(frozen=True)
class TakenStages:
    """What a rank took from a whole model."""

    modules: Sequence[TrainedStage]
    holdings: dict[str, ShardSpec]
    unread: dict[str, Tensor]  # what no operator reads
    evaluated: list[EvaluatedFunction]


class StageSource(Protocol):
    """Makes the stages of one rank."""

    graph: Graph
    sizes: Sizes
    losses: list[pytree.TreeSpec]  # what the last stage returns, by turn of a step
    shared: frozenset[str]  # parameters that several layers read
    late: bool  # a backward gives some parameters their gradient in several portions
    not_captured: Mapping[str, str]  # what the job evaluates that has no program, and why
    takes_parts: bool  # of a model, so that it needs no memory of its own for those that are read from files

    def cut(self, layout: Layout, rank: int) -> list[CutStage]:
        """The rank's stages as programs. All ranks do so together: groups are made on the way."""
        ...

    def take(
        self,
        cut: Sequence[CutStage],
        model: nn.Module,
        layout: Layout,
        rank: int,
        device: torch.device,
        key: DrawKey,
        without_memory: Container[str],
    ) -> TakenStages:
        """The stages with what the rank holds of the model; parameters `without_memory` are to be divided first."""
        ...

    def evaluation_on(
        self, dataset: Dataset, modules: Sequence[TrainedStage], layout: Layout, rank: int, device: torch.device, key: DrawKey
    ) -> tuple[Callable[[], list[EvaluatedFunction]], Mapping[str, str]]:
        """Who makes what evaluates the trained stages on data that the job does not name, which may build a whole model for a while; and
        what has no program, with reasons."""
        ...


def stage_source(
    job: Job, captured: Captured | Uncaptured, evaluated: EvaluatedPrograms | None, compiler: Compiler | None = None
) -> StageSource:
    """`evaluated` is what `capture_evaluated` found, if it was asked before; a `compiler` compiles what evaluates."""
    if isinstance(captured, Uncaptured):
        return _UsersCode(job, captured, compiler)
    return _Program(job, captured, capture_evaluated(job) if evaluated is None else evaluated, compiler)


class _Program:
    """Stages cut from a captured program."""

    late, takes_parts = False, True

    def __init__(self, job: Job, captured: Captured, evaluated: EvaluatedPrograms, compiler: Compiler | None) -> None:
        self._job, self._captured, self._evaluated, self._compiler = job, captured, evaluated, compiler
        self.graph, self.sizes, self.losses = captured.graph, Sizes(captured), [captured.program.call_spec.out_spec]
        self.shared = shared_parameters(captured)
        self.not_captured: Mapping[str, str] = _reasons(evaluated)

    def cut(self, layout: Layout, rank: int) -> list[CutStage]:
        check_lane_sizes(layout, self._captured, self.sizes)
        agree_on_evaluated(self._evaluated)
        return cut_stages(layout, rank, self._captured)

    def take(
        self,
        cut: Sequence[CutStage],
        model: nn.Module,
        layout: Layout,
        rank: int,
        device: torch.device,
        key: DrawKey,
        without_memory: Container[str],
    ) -> TakenStages:
        builder = StageBuilder(InitialState(self._captured, model), device=device, key=key, on_meta=without_memory)
        last_layer, modules = len(self.graph.layers) - 1, []
        for stage in cut:
            again = layout.plan.stages[stage.place.stage].recompute
            recompute = [again and last_layer not in unit.layers for unit in stage.program.units]
            modules.append(builder.stage(stage.program, recompute, stage.holdings))
        buffers = {name: buffer for module in modules for name, buffer in module.buffers_by_name().items()}
        evaluated = prepare_evaluation(
            self._job, self._evaluated, layout, rank, self._captured, buffers, model, device, key, self._compiler
        )
        return TakenStages(modules, builder.holdings, unread_state(self._captured, model), evaluated)

    def evaluation_on(
        self, dataset: Dataset, modules: Sequence[TrainedStage], layout: Layout, rank: int, device: torch.device, key: DrawKey
    ) -> tuple[Callable[[], list[EvaluatedFunction]], Mapping[str, str]]:
        programs = capture_evaluated(self._job, dataset)
        agree_on_evaluated(programs)
        buffers = {name: buffer for module in modules for name, buffer in module.buffers_by_name().items()}

        def build() -> list[EvaluatedFunction]:
            model = self._job.build_model("cpu")
            return prepare_evaluation(self._job, programs, layout, rank, self._captured, buffers, model, device, key, self._compiler)

        return build, _reasons(programs)


def _reasons(programs: EvaluatedPrograms) -> dict[str, str]:
    return {name: str(program) for name, program in programs.items() if isinstance(program, AtollError)}


class _UsersCode:
    """The user's own model and loss, whole on every device."""

    shared: frozenset[str] = frozenset()
    not_captured: Mapping[str, str] = {}
    takes_parts = False

    def __init__(self, job: Job, uncaptured: Uncaptured, compiler: Compiler | None) -> None:
        if job.eval_ema:
            advice = "leave out eval_ema, and evaluate what `atoll export --ema` writes"
            raise JobError(f"Job: eval_ema: a model that is not captured is evaluated with its weights, not with their averages; {advice}")
        self._job, self._uncaptured, self._compiler = job, uncaptured, compiler
        self.graph, self.losses, self.late = uncaptured.graph, loss_structures(uncaptured), uncaptured.late
        self.sizes: Sizes = WholeBatch()

    def cut(self, layout: Layout, rank: int) -> list[CutStage]:
        stage = layout.plan.stages[0]
        if len(layout.plan.stages) > 1 or stage.tensor > 1 or stage.expert or stage.split:
            raise PlanError(f"the plan cuts the model or divides its layers, which cannot be done here: {self._uncaptured.reason}")
        if len(self._job.turns) > 1 and stage.sharded:
            raise PlanError("a job with several losses trains whole on every device; take a plan that is not sharded")
        return [CutStage(place, eager_program(), {}, set(), None) for place in layout.places(rank)]

    def take(
        self,
        cut: Sequence[CutStage],
        model: nn.Module,
        layout: Layout,
        rank: int,
        device: torch.device,
        key: DrawKey,
        without_memory: Container[str],
    ) -> TakenStages:
        pieces = sorted(piece for m in range(len(layout.micro_batches)) for piece in layout.pieces(0, m))
        stage = EagerStage(model.to(device), self._job, self._uncaptured, key, device, pieces)
        holdings = {name: ShardSpec(name=name, shape=tuple(value.shape)) for name, value in stage.parameters_by_name().items()}
        evaluated = []
        if self._job.eval_dataset is not None:
            evaluated = prepare_eager_evaluation(self._job, layout, rank, stage, device, key, self._compiler)
        return TakenStages([stage], holdings, {}, evaluated)

    def evaluation_on(
        self, dataset: Dataset, modules: Sequence[TrainedStage], layout: Layout, rank: int, device: torch.device, key: DrawKey
    ) -> tuple[Callable[[], list[EvaluatedFunction]], Mapping[str, str]]:
        (stage,) = modules
        assert isinstance(stage, EagerStage)
        return lambda: prepare_eager_evaluation(self._job, layout, rank, stage, device, key, self._compiler), {}
