"""What a checkpoint has beside weights: the optimizer's state, schedule, loss scale, losses so far. The same in every mode. Randomness and
the position in the data are functions of the job's seed and the step, so the step says both.

An optimizer's state goes by the user's parameter names: tensors that are divided as their parameters are, and small values.
State of a parameter's own shape (moments) follows the parameter. Single numbers (step counters) are small values. A tensor of any other
shape (the factors of Adafactor) can be kept only when the rank holds the whole parameter, since nothing says how it would be divided.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from atoll.data import Samples
from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.local_shard import Keyed, LocalShard
from atoll.runtime.checkpoint.manifest import OPTIMIZER, Index, SmallState, number_of
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.values import from_plain, to_plain
from atoll.runtime.executor import LossScale
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.turns import SeveralSchedules

__all__ = [
    "OptimizerState",
    "allocate_state",
    "optimizer_state",
    "restore_data",
    "restore_groups",
    "restore_training",
    "training_state",
]


class OptimizerState(NamedTuple):
    """Tensors by key and small values of the parameters that a rank holds."""

    tensors: list[Keyed]
    small: SmallState


def optimizer_state(optimizers: Sequence[torch.optim.Optimizer], held: Sequence[LocalShard]) -> OptimizerState:
    """What there is to save of the optimizers, for the parameters among `held`."""
    by_parameter = {id(part.known_as): part for part in held}
    tensors: list[Keyed] = []
    small = SmallState()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            names = [_known(by_parameter, parameter, optimizer).name for parameter in group["params"]]
            options = {key: to_plain(value, f"optimizer: {key}") for key, value in group.items() if key not in ("params", "param_names")}
            small.group_of.update(dict.fromkeys(names, number_of(small.groups, options)))
        for parameter, state in optimizer.state.items():
            part = _known(by_parameter, parameter, optimizer)
            for name, value in state.items():
                _add(tensors, small, part, str(name), value)
    return OptimizerState(tensors, small)


def _known(by_parameter: Mapping[int, LocalShard], parameter: Tensor, optimizer: torch.optim.Optimizer) -> LocalShard:
    part = by_parameter.get(id(parameter))
    assert part is not None, f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not among the tensors"
    return part


def _add(tensors: list[Keyed], small: SmallState, part: LocalShard, name: str, value: object) -> None:
    where = f"optimizer: {name!r} of {part.name!r}"
    if "/" in name:
        raise CheckpointError(f"{where}: state with a slash in its name cannot be saved")
    local = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, Tensor) and local.shape == part.tensor.shape and name != "step":
        tensors.append((f"{OPTIMIZER}{name}/{part.name}", part.like(local)))
    elif not isinstance(local, Tensor) or local.numel() == 1:
        small.parameters.setdefault(part.name, {})[name] = to_plain(local, where)
    elif part.holding.dim is None and part.flat is None:
        shape = tuple(local.shape)
        tensors.append((f"{OPTIMIZER}{name}/{part.name}", LocalShard(ShardSpec(name=part.name, shape=shape), local)))
    else:
        raise CheckpointError(
            f"{where}: it has the shape {list(local.shape)}, not the parameter's, so it cannot be saved where the parameter is divided; "
            "use an optimizer whose state has the parameters' shapes, such as AdamW, or a plan that does not divide parameters"
        )


def allocate_state(
    optimizers: Sequence[torch.optim.Optimizer], held: Sequence[LocalShard], index: Index, small: SmallState
) -> tuple[list[Keyed], Callable[[], None]]:
    """Room for the stored state of the optimizers' parameters, to be filled; and a function that then puts it into the optimizers."""
    by_parameter = {id(part.known_as): part for part in held}
    stored: dict[str, list[str]] = {}
    for key in index.tensors:
        if key.startswith(OPTIMIZER):
            stored.setdefault(key.removeprefix(OPTIMIZER).partition("/")[2], []).append(key)
    room: list[Keyed] = []
    ready: list[tuple[torch.optim.Optimizer, Tensor, dict[str, Any]]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                part = _known(by_parameter, parameter, optimizer)
                state = _small_values(part.name, parameter, group, small)
                for key in stored.get(part.name, ()):
                    value, place = _room(key, part, parameter, index)
                    state[key.removeprefix(OPTIMIZER).partition("/")[0]] = value
                    room.append((key, place))
                ready.append((optimizer, parameter, state))

    def put() -> None:
        for optimizer, parameter, state in ready:
            if state:
                optimizer.state[parameter] = state

    return room, put


def _room(key: str, part: LocalShard, parameter: Tensor, index: Index) -> tuple[Tensor, LocalShard]:
    """An empty tensor for stored state, as the optimizer wants it and as the reader does."""
    stored = index.tensors[key]
    if stored.shape == part.holding.shape:
        value = torch.zeros_like(parameter, dtype=DTYPES[stored.dtype], requires_grad=False)
        return value, part.like(value.to_local() if isinstance(value, DTensor) else value)
    if part.holding.dim is not None or part.flat is not None:
        shapes = f"{list(stored.shape)}, not the parameter's {list(part.holding.shape)}"
        raise CheckpointError(f"{key!r}: it has the shape {shapes}, so it cannot be loaded where the parameter is divided")
    value = torch.zeros(stored.shape, dtype=DTYPES[stored.dtype], device=parameter.device)
    return value, LocalShard(ShardSpec(name=part.name, shape=stored.shape), value)


def _small_values(name: str, parameter: Tensor, group: Mapping[str, Any], small: SmallState) -> dict[str, Any]:
    values = {key: from_plain(value, f"optimizer: {key!r} of {name!r}") for key, value in small.parameters.get(name, {}).items()}
    on_device = bool(group.get("capturable") or group.get("fused"))  # where such optimizers want their counters
    return {key: value.to(parameter.device) if on_device and isinstance(value, Tensor) else value for key, value in values.items()}


def restore_groups(optimizers: Sequence[torch.optim.Optimizer], held: Sequence[LocalShard], small: SmallState) -> None:
    """Give every group the hyperparameters its parameters had. A group without parameters here keeps its own."""
    by_parameter = {id(part.known_as): part.name for part in held}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            names = [by_parameter[id(parameter)] for parameter in group["params"]]
            numbers = {small.group_of[name] for name in names if name in small.group_of}
            if len(numbers) > 1:
                raise CheckpointError(f"optimizer: the parameters of group {number} had different hyperparameters when they were saved")
            for options in (small.groups[number] for number in numbers):
                group.update({key: from_plain(value, f"optimizer: {key}") for key, value in options.items()})


def training_state(scheduler: LRScheduler | SeveralSchedules | None, scale: LossScale, losses: Sequence[float]) -> dict[str, Any]:
    """As a checkpoint keeps it, in `extra`. Functions of a schedule are left out: the script makes them again."""
    schedule = None
    if scheduler is not None:
        schedule = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    return {"scheduler": schedule, "loss_scale": scale.state(), "losses": list(losses)}


def restore_data(extra: Mapping[str, Any], samples: Samples) -> None:
    """A stream goes on where it was, if the checkpoint says where."""
    state = from_plain(extra.get("data"), "the data's state")
    if state is not None:
        samples.go_on_from(state)


def restore_training(
    extra: Mapping[str, Any], step: int, scheduler: LRScheduler | SeveralSchedules | None, scale: LossScale
) -> list[float]:
    """Schedule and scale as they were after `step` steps; returns the losses until then."""
    scale.restore(extra["loss_scale"])
    if scheduler is not None and extra["scheduler"] is not None:
        scheduler.load_state_dict(extra["scheduler"])
    losses = [float(loss) for loss in extra["losses"]]
    if len(losses) != step:
        raise CheckpointError(f"the checkpoint of step {step} has {len(losses)} losses; it is damaged, or of another version of Atoll")
    return losses
