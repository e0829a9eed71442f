"""A rank's stages as programs: cut where the plan cuts, rewritten for the rank's part of tensor, expert and split parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from atoll.errors import PlanError
from atoll.graph.capture import Captured
from atoll.graph.experts import find_experts
from atoll.plan import Stage
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.stage.collectives import Lanes, Ranks, TensorRanks
from atoll.runtime.stage.expert import expert_counts, split_experts
from atoll.runtime.stage.program import StageProgram, Unit, cut_stage
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.tensor import split_tensors

__all__ = ["CutStage", "check_lane_sizes", "cut_stages"]


@dataclass(frozen=True)
class CutStage:
    """One of the rank's stages as a program, rewritten for its part."""

    place: RankPlace
    program: StageProgram
    holdings: dict[str, ShardSpec]  # what the rank holds of divided parameters
    lane_divided: set[str]  # parameters that lanes divide between them: experts, split layers
    lanes: Lanes | None  # who have to be told each micro-batch's samples before it is computed


def cut_stages(layout: Layout, rank: int, captured: Captured) -> list[CutStage]:
    """The rank's stages. All ranks cut theirs together: groups of ranks that divide layers are made on the way."""
    dividing, cut = _Parallelizer(layout, rank, captured), []
    for place in layout.places(rank):
        stage = layout.plan.stages[place.stage]
        cut.append(dividing.divide(place, cut_stage(captured, stage.start, stage.stop)))
    return cut


class _Parallelizer:
    """What rewriting needs to know of the whole plan."""

    def __init__(self, layout: Layout, rank: int, captured: Captured) -> None:
        self._layout, self._captured = layout, captured
        self._along_lane: dict[int, Any] = {}  # stage → this rank's group along its lane
        self._across_lanes: dict[int, Any] = {}
        for s, stage in enumerate(layout.plan.stages):
            self._make_groups(s, stage, rank)

    def _make_groups(self, s: int, stage: Stage, rank: int) -> None:
        for r in range(len(stage.replicas)):
            if stage.tensor > 1:
                for lane in range(stage.lanes):
                    ranks = [self._layout.rank(RankPlace(s, r, lane, t)) for t in range(stage.tensor)]
                    _remember(self._along_lane, s, ranks, rank)
            if stage.expert or stage.split:
                for t in range(stage.tensor):
                    ranks = [self._layout.rank(RankPlace(s, r, lane, t)) for lane in range(stage.lanes)]
                    _remember(self._across_lanes, s, ranks, rank)

    def divide(self, place: RankPlace, program: StageProgram) -> CutStage:
        """Rewrite a stage's units in place."""
        stage = self._layout.plan.stages[place.stage]
        shares = stage.replicas[place.replica].tensor_shares or (1,) * stage.tensor
        lanes = Lanes(self._across_lanes[place.stage], place.lane) if stage.split else None
        holdings: dict[str, ShardSpec] = {}
        lane_divided: set[str] = set()
        for unit in program.units:
            if stage.tensor > 1:
                ranks = TensorRanks(self._along_lane[place.stage])
                holdings |= self._split(unit, range(stage.start, stage.stop), shares, place.tensor, ranks)
            among_lanes = self._split(unit, stage.split, (1,) * stage.lanes, place.lane, lanes) if lanes is not None else {}
            if stage.expert:
                among_lanes |= self._experts(unit, stage, place)
            lane_divided |= among_lanes.keys()
            holdings |= among_lanes
        _check_once(program, lane_divided)
        return CutStage(place, program, holdings, lane_divided, lanes)

    def _split(self, unit: Unit, layers: Sequence[int], shares: tuple[int, ...], index: int, ranks: Ranks) -> dict[str, ShardSpec]:
        holdings: dict[str, ShardSpec] = {}
        for layer in unit.layers:
            if layer in layers:
                try:
                    holdings |= split_tensors(unit.graph, unit.copies, self._captured.shardings[layer], shares, index, ranks)
                except PlanError as error:
                    raise PlanError(f"layer {layer} ({self._captured.graph.layers[layer].name!r}): {error}") from None
        return holdings

    def _experts(self, unit: Unit, stage: Stage, place: RankPlace) -> dict[str, ShardSpec]:
        table = self._captured.liveness.table
        holdings: dict[str, ShardSpec] = {}
        for layer in unit.layers:
            experts = find_experts(table, *self._captured.graph.layers[layer].nodes)
            if experts.count:
                counts = expert_counts(experts.count, stage.lanes)
                group = self._across_lanes[place.stage]
                holdings |= split_experts(unit.graph, unit.copies, experts, table, counts, place.lane, group)
        return holdings


def _remember(groups: dict[int, Any], stage: int, ranks: list[int], rank: int) -> None:
    """Every rank makes every group; those that are in it keep it."""
    group = dist.new_group(ranks)
    if rank in ranks:
        groups[stage] = group


def _check_once(program: StageProgram, among_lanes: set[str]) -> None:
    """A parameter that two layers share is held in one way by a rank."""
    readers: dict[str, list[str]] = {}
    for unit in program.units:
        for name in unit.parameters.values():
            readers.setdefault(name, []).append(unit.name)
    for name in among_lanes:
        if len(readers[name]) > 1:
            layers = " and ".join(repr(reader) for reader in readers[name])
            raise PlanError(f"layers {layers} share the parameter {name!r}, and lanes divide it in one of them; split both or neither")


def check_lane_sizes(layout: Layout, captured: Captured, sizes: Sizes) -> None:
    """Raise a `PlanError` for micro-batches the program cannot compute, or values that lanes would have to divide and cannot."""
    _check_samples(layout, captured, sizes)
    for stage in range(1, len(layout.plan.stages)):
        if any(layout.pieces(stage - 1, m) != layout.pieces(stage, m) for m in range(len(layout.micro_batches))):
            _check_crossing(layout, captured, sizes, stage)


def _check_samples(layout: Layout, captured: Captured, sizes: Sizes) -> None:
    """Some models can be captured for one number of samples only."""
    if sizes.fixed is None:
        return
    for stage in range(len(layout.plan.stages)):
        for m in range(len(layout.micro_batches)):
            for start, stop in layout.pieces(stage, m):
                if stop - start != sizes.fixed:
                    raise PlanError(
                        f"stage {stage}: a device gets {stop - start} samples of micro-batch {m}, but {captured.graph.name} could be "
                        f"captured for {sizes.fixed} samples only{_fixed_tensors(captured)}; choose shares and a micro_batch that give "
                        "every device as many, or, where the model allows it, say with `dynamic` which dimensions vary"
                    )


def _fixed_tensors(captured: Captured) -> str:
    """Where sizes of the batch went into the program."""
    found = [f"batch{path} in dimension {', '.join(map(str, dims))}" for path, dims in captured.fixed.items()]
    return f" ({'; '.join(found)} keeps its size)" if found else ""


def _check_crossing(layout: Layout, captured: Captured, sizes: Sizes, stage: int) -> None:
    """Lanes that meet other lanes must be able to tell their samples apart in everything that crosses."""
    before = layout.plan.stages[stage - 1]
    for crossing in cut_stage(captured, before.start, before.stop).sends:
        if sizes.sample_dim(crossing) is None:
            name = captured.graph.layers[before.stop].name
            shape = ", ".join(map(str, crossing.shape))
            raise PlanError(
                f"stages {stage - 1} and {stage} divide micro-batches differently, but the value {crossing.name!r} of shape [{shape}], "
                f"which crosses the cut before {name!r}, has no dimension of samples; give both stages the same lanes, or cut elsewhere"
            )
