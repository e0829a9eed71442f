"""Sharded data parallelism: FSDP2 over the lanes of a stage, one unit at a time; replicas of a stage agree once a step.

`OptimizerShard` is a rank's part of one parameter as the optimizer, norms and checkpoints see it: a plain tensor, sharded or not.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.modes.lockstep.optimizer_step import local
from atoll.runtime.stage.module import StageModule
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["BackwardPhases", "OptimizerShard", "make_meshes", "owned_shard", "shard_stage"]


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """What a rank owns of a parameter. Under sharding (FSDP) `leaf` is the rank's shard of `source`, in the same memory."""

    name: str
    holding: ShardSpec
    source: nn.Parameter  # what backward leaves its gradient in
    leaf: nn.Parameter  # what the optimizer updates
    flat: tuple[int, int] | None = None  # the shard's elements of what the lanes hold together

    @property
    def sharded(self) -> bool:
        """Whether lanes hold shards of it."""
        return self.flat is not None

    def forget_gradient(self) -> None:
        """Before a step's first backward."""
        self.source.grad = self.leaf.grad = None

    def hand_gradient_over(self) -> None:
        """Give the optimizer what backward and synchronisation left."""
        if self.leaf is not self.source:
            self.leaf.grad = local(self.source.grad) if self.source.grad is not None else None

    @property
    def held(self) -> LocalShard:
        """For a checkpoint."""
        return LocalShard(self.holding, self.leaf.detach(), self.flat, self.leaf)


def make_meshes(layout: Layout, device: torch.device) -> dict[tuple[int, int], DeviceMesh]:
    """(stage, index along a lane) → the ranks that shard together, replicas × lanes. All ranks make all of them, in this order."""
    meshes = {}
    for s, stage in enumerate(layout.plan.stages):
        if not stage.sharded:
            continue
        for tensor in range(stage.tensor):
            rows = [[layout.rank(RankPlace(s, r, lane, tensor)) for lane in range(stage.lanes)] for r in range(len(stage.replicas))]
            names = ("replicas", "lanes") if len(rows) > 1 else ("lanes",)
            meshes[s, tensor] = DeviceMesh(device.type, torch.tensor(rows if len(rows) > 1 else rows[0]), mesh_dim_names=names)
    return meshes


def shard_stage(module: StageModule, mesh: DeviceMesh, kept_whole: set[nn.Parameter], *, ends_model: bool) -> None:
    """Shard the stage's parameters, all but those that are `kept_whole`, over the mesh's lanes.

    Where the stage `ends_model` its last unit's backward follows its forward, so what was gathered for the one is kept for the other.
    """
    # What is changed in place across a border of units makes them one unit, so what FSDP warns of cannot happen here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    units = [unit for unit in module.units if any(parameter not in kept_whole for parameter in unit.parameters())]
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=kept_whole, reshard_after_forward=not (ends_model and unit is units[-1]))
    fully_shard(module, mesh=mesh, ignored_params=kept_whole, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # pieces carry their true weight already: gradients are added up
            part.set_force_sum_reduction_for_comms(True)


class BackwardPhases:
    """Tells a sharded stage which backward is the step's last: only then do its replicas agree."""

    def __init__(self, module: StageModule) -> None:
        self._roots = [module] if isinstance(module, FSDPModule) else []

    def __call__(self, last: bool) -> None:
        for root in self._roots:
            root.set_requires_all_reduce(last)
            root.set_is_last_backward(last)


def owned_shard(name: str, holding: ShardSpec, parameter: nn.Parameter, lane: int, lanes: int) -> OptimizerShard:
    """The rank's shard of a parameter that `shard_stage` has sharded: some of its first dimension's rows."""
    rows = holding.local_shape[0] if holding.local_shape else 1
    each = -(-rows // lanes)
    first, last = min(lane * each, rows), min((lane + 1) * each, rows)
    shard: Tensor = local(parameter.detach())
    width = holding.elements // rows if rows else 0
    assert shard.numel() == (last - first) * width, f"{name}: rows {first} to {last} were expected, got {tuple(shard.shape)}"
    return OptimizerShard(
        name, holding, parameter, nn.Parameter(shard, requires_grad=parameter.requires_grad), (first * width, last * width)
    )
