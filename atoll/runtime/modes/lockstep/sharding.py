"""What a rank owns of parameters: sharded by FSDP2 over the lanes of a stage or not, as norms, checkpoints and its optimizer see it.

FSDP2 shards one unit at a time; replicas of a stage agree once a step.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from atoll.errors import JobError
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.stage.eager import EagerStage
from atoll.runtime.stage.module import StageModule, UnitModule
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = [
    "BackwardPhases",
    "UsedParameters",
    "backward_reads",
    "Counted",
    "OptimizerShard",
    "build_on_parts",
    "check_elementwise",
    "check_separable",
    "make_meshes",
    "owned_shard",
    "shard_stage",
    "squared_norm",
]

_Build = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


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
            self.leaf.grad = _local(self.source.grad) if self.source.grad is not None else None

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


def shard_stage(module: StageModule | EagerStage, mesh: DeviceMesh, kept_whole: set[nn.Parameter], *, ends_model: bool) -> None:
    """Shard the stage's parameters, all but those that are `kept_whole`, over the mesh's lanes.

    Where the stage `ends_model` its last unit's backward follows its forward, so what was gathered for the one is kept for the other.
    What a backward does not read is not gathered for it.
    """
    # What is changed in place across a border of units makes them one unit, so what FSDP warns of cannot happen here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    units = [unit for unit in _units(module) if any(parameter not in kept_whole for parameter in unit.parameters())]
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=kept_whole, reshard_after_forward=not (ends_model and unit is units[-1]))
        if not backward_reads(unit):
            unit.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(module, mesh=mesh, ignored_params=kept_whole, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # pieces carry their true weight already: gradients are added up
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(isinstance(module, EagerStage))  # who has no gradient for one takes part all the same


def _units(module: StageModule | EagerStage) -> list[UnitModule]:
    """What is gathered by itself. The user's own code may leave out a block on one rank and not on another: it is gathered as a whole."""
    return module.all_units()[1:] if isinstance(module, StageModule) else []


def backward_reads(unit: UnitModule) -> bool:
    """Whether a unit's backward may need its parameters: not where it has none, or looks rows up in them, and no more."""
    if not unit.has_backward:
        return False
    if unit.recompute:
        return True
    held = [node for node in unit.graph_module.graph.nodes if node.op == "get_attr" and node.target in unit.parameter_names]
    reads = [(node, user) for node in held for user in node.users]
    return not all(user.target is torch.ops.aten.embedding.default and node not in user.args[1:] for node, user in reads)


class UsedParameters:
    """Which parameters of the user's own code, sharded, some rank has a gradient for. The others keep none, as in one process."""

    def __init__(self, stage: EagerStage, device: torch.device) -> None:
        self._stage, self._device, self._used = stage, device, set[str]()
        self._watching = stage.register_forward_pre_hook(lambda module, given: self._watch())  # after FSDP's own: all is gathered by then

    def _watch(self) -> None:
        """What is gathered are the same tensors in every step."""
        self._watching.remove()
        for name, parameter in self._stage.parameters_by_name().items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))  # type: ignore[no-untyped-call]

    def agree(self) -> None:
        """After a step's backwards; all ranks call it together."""
        parameters = self._stage.parameters_by_name()
        used = torch.tensor([float(name in self._used) for name in parameters], device=self._device)
        dist.all_reduce(used)
        for parameter, times in zip(parameters.values(), used.tolist(), strict=True):
            if not times:
                parameter.grad = None
        self._used.clear()


class BackwardPhases:
    """Tells a sharded stage which backward is the step's last: only then do its replicas agree."""

    def __init__(self, module: StageModule | EagerStage) -> None:
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
    shard: Tensor = _local(parameter.detach())
    width = holding.elements // rows if rows else 0
    assert shard.numel() == (last - first) * width, f"{name}: rows {first} to {last} were expected, got {tuple(shard.shape)}"
    return OptimizerShard(
        name, holding, parameter, nn.Parameter(shard, requires_grad=parameter.requires_grad), (first * width, last * width)
    )


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Counted:
    """A parameter, or a range of one of its dimensions, of which `holders` ranks have the same gradient."""

    parameter: nn.Parameter
    holders: int
    dim: int | None = None  # None: all the rank holds
    start: int = 0
    stop: int = 0

    @property
    def gradient(self) -> Tensor | None:
        """What is counted of the gradient."""
        if self.parameter.grad is None:
            return None
        gradient = _local(self.parameter.grad)
        return gradient if self.dim is None else gradient.narrow(self.dim, self.start, self.stop - self.start)


def squared_norm(counted: Iterable[Counted]) -> float:
    """This rank's part of the squared norm: added up over ranks, each number of the gradient counts once."""
    by_holders: dict[int, list[Tensor]] = {}
    for part in counted:
        gradient = part.gradient
        if gradient is not None and gradient.numel():
            by_holders.setdefault(part.holders, []).append(gradient)
    return sum(_squares(gradients) / holders for holders, gradients in by_holders.items())


def _squares(gradients: list[Tensor]) -> float:
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return float((norms * norms).sum())


def build_on_parts(build: _Build, parts: Sequence[nn.Parameter], shapes: Sequence[tuple[int, ...]]) -> torch.optim.Optimizer:
    """The optimizer of the parts this rank owns, in the groups that the whole parameters (of these shapes) would be in.

    Groups are often chosen by shape or size, which parts do not show; so the job's code is asked about stand-ins without memory too.
    """
    optimizer = build(parts)
    if all(tuple(part.shape) == shape for part, shape in zip(parts, shapes, strict=True)):
        return optimizer
    stand_ins = [nn.Parameter(torch.empty(shape, dtype=part.dtype, device="meta")) for part, shape in zip(parts, shapes, strict=True)]
    try:
        groups = build(stand_ins).param_groups
    except JobError:  # some optimizers insist on real memory; one number stands for all
        stand_ins = [
            nn.Parameter(torch.zeros((), dtype=part.dtype, device=part.device).expand(shape))
            for part, shape in zip(parts, shapes, strict=True)
        ]
        groups = build(stand_ins).param_groups
    part_of = {id(stand_in): part for stand_in, part in zip(stand_ins, parts, strict=True)}
    optimizer.param_groups[:] = [{**group, "params": [part_of[id(stand_in)] for stand_in in group["params"]]} for group in groups]
    return optimizer


_SHAPES = ((32,), (4, 6), (136, 144), (4, 6, 8))  # some optimizers treat large matrices, or vectors, in their own way


def check_elementwise(build: _Build) -> None:
    """Refuse an optimizer that does not treat each number by itself, where ranks hold parts of parameters.

    Tried, not looked up: two steps on tensors of several shapes and on their halves must agree.
    """
    for shape in _shapes_it_takes(build):
        whole, *gradients = _drawn(shape, 3)
        together = _after_steps(build, [whole], [[gradient] for gradient in gradients])[0]
        for dim in range(len(shape)):
            apart = _after_steps(build, list(whole.chunk(2, dim)), [list(gradient.chunk(2, dim)) for gradient in gradients])
            if not _alike(torch.cat(apart, dim), together):
                raise JobError(
                    "Job: optimizer: it looks at whole parameters, but this plan divides parameters between devices (tensor, sharded, "
                    "expert or split parallelism); choose an optimizer that treats each number by itself (AdamW, SGD, …) or another plan"
                )


def check_separable(build: _Build) -> None:
    """Refuse an optimizer that looks at several parameters together, where ranks hold different parameters. Tried, as above."""
    for shape in _shapes_it_takes(build)[:2]:
        first, second, *gradients = _drawn(shape, 6)
        second = second * 3
        rows = [[gradients[0], 5 * gradients[1]], [gradients[2], 5 * gradients[3]]]
        together = _after_steps(build, [first, second], rows)
        for index, value in enumerate((first, second)):
            alone = _after_steps(build, [value], [[row[index]] for row in rows])[0]
            if not _alike(alone, together[index]):
                raise JobError(
                    "Job: optimizer: what it does to one parameter depends on the others, but under this plan devices hold different "
                    "parameters; choose an optimizer that treats each parameter by itself (AdamW, SGD, …) or a plan with one stage"
                )


def _shapes_it_takes(build: _Build) -> list[tuple[int, ...]]:
    """Some optimizers are for matrices only, and say so."""
    taken: list[tuple[int, ...]] = []
    for shape in _SHAPES:
        with suppress(Exception):
            build([nn.Parameter(torch.zeros(shape))])
            taken.append(shape)
    return taken


def _drawn(shape: tuple[int, ...], count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def _after_steps(build: _Build, values: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = build(parameters)
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
