"""Dividing: a rank's stages rewritten for its part of tensor, expert and split parallelism, with the groups they talk through."""

from typing import Any

import torch.distributed as dist

from atoll.errors import PlanError
from atoll.graph.capture import Captured
from atoll.graph.experts import find_experts
from atoll.plan import Stage
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.stage.collectives import Lanes, Ranks, TensorRanks
from atoll.runtime.stage.expert import expert_counts, split_experts
from atoll.runtime.stage.program import StageProgram, Unit
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.tensor import split_tensors

__all__ = ["Parallelizer"]


class Parallelizer:
    """What rewriting needs to know of the whole plan. All ranks make theirs together: process groups are made on the way."""

    def __init__(self, layout: Layout, rank: int, captured: Captured) -> None:
        self._layout, self._captured = layout, captured
        self._along_lane: dict[int, Any] = {}  # stage → this rank's group along its lane
        self._across_lanes: dict[int, Any] = {}
        stages = layout.plan.stages
        self._shardings = captured.shardings
        for s, stage in enumerate(stages):
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

    def divide(self, place: RankPlace, program: StageProgram) -> tuple[dict[str, ShardSpec], set[str], Lanes | None]:
        """Rewrite a stage's units in place.

        Returns what the rank holds of divided parameters, which of them lanes divide, and the lanes that have to be told each micro-batch's
        samples before it is computed.
        """
        stage = self._layout.plan.stages[place.stage]
        replica = stage.replicas[place.replica]
        lanes = Lanes(self._across_lanes[place.stage], place.lane) if stage.split else None
        holdings: dict[str, ShardSpec] = {}
        among_lanes: set[str] = set()
        for unit in program.units:
            own: dict[str, ShardSpec] = {}
            if stage.tensor > 1:
                ranks = TensorRanks(self._along_lane[place.stage])
                own |= self._split(unit, range(stage.start, stage.stop), replica.tensor_shares or (1,) * stage.tensor, place.tensor, ranks)
            if lanes is not None:
                split = self._split(unit, stage.split, (1,) * stage.lanes, place.lane, lanes)
                among_lanes |= split.keys()
                own |= split
            if stage.expert:
                experts = self._experts(unit, stage, place)
                among_lanes |= experts.keys()
                own |= experts
            holdings |= own
        _check_once(program, holdings, among_lanes)
        return holdings, among_lanes, lanes

    def _split(self, unit: Unit, layers: Any, shares: tuple[int, ...], index: int, ranks: Ranks) -> dict[str, ShardSpec]:
        holdings: dict[str, ShardSpec] = {}
        for layer in unit.layers:
            if layer in layers:
                try:
                    holdings |= split_tensors(unit.graph, unit.copies, self._shardings[layer], shares, index, ranks)
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


def _check_once(program: StageProgram, holdings: dict[str, ShardSpec], among_lanes: set[str]) -> None:
    """A parameter that two layers share is held in one way by a rank."""
    readers: dict[str, list[str]] = {}
    for unit in program.units:
        for name in unit.parameters.values():
            readers.setdefault(name, []).append(unit.name)
    for name in among_lanes:
        if len(readers[name]) > 1:
            layers = " and ".join(repr(reader) for reader in readers[name])
            raise PlanError(f"layers {layers} share the parameter {name!r}, and lanes divide it in one of them; split both or neither")
