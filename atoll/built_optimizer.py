"""An optimizer that is built already, over a whole model: how to build its like over the part of the model that a device has."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from atoll.errors import JobError

__all__ = ["BuiltAnew", "UntouchedOptimizer", "built_anew"]


class BuiltAnew(NamedTuple):
    """How to build an optimizer's like: arguments of a Job."""

    optimizer: Callable[[list[Any]], torch.optim.Optimizer]  # from parameters, or groups of them
    parameter_groups: Callable[[str, nn.Parameter], dict[str, Any]] | None  # from names to the settings of their groups, if they differ

    def arguments(self) -> dict[str, Any]:
        """Those that say something."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def built_anew(optimizer: torch.optim.Optimizer, model: object) -> BuiltAnew:
    """How to build an optimizer of the same class with the same settings; JobError where that would be another one."""
    kind = type(optimizer)
    if not isinstance(model, nn.Module):
        _refuse(kind, "it is built already, but the model is not; give a callable such as functools.partial(torch.optim.AdamW, lr=3e-4)")
    if len(optimizer.state):
        _refuse(kind, "it has made steps, or was given their state, which would be lost; give a new one, or go on with resume")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        _refuse(kind, "it has hooks, which would be lost; give a callable that builds it with them")
    if any("initial_lr" in group for group in optimizer.param_groups):
        _refuse(
            kind, "a schedule was made for it, which would not see the optimizer that steps; give scheduler=… a callable that makes one"
        )
    _check_parameters(optimizer, model)
    groups = [group for group in optimizer.param_groups if group["params"]]
    settings = [settings_of(group) for group in groups]
    known = inspect.signature(kind.__init__).parameters
    first = {**optimizer.defaults, **settings[0]}
    defaults = {name: value for name, value in first.items() if name in known}

    def build(parameters: list[Any]) -> torch.optim.Optimizer:
        return kind(parameters, **defaults)

    try:
        probe = build([{"params": [nn.Parameter(torch.zeros(2, 2))], **own} for own in settings])
    except Exception as error:
        _refuse(kind, f"it cannot be built again from its settings ({error}); give a callable that builds it")
    plain = build([nn.Parameter(torch.zeros(2, 2))])
    if [settings_of(group) for group in probe.param_groups] != settings or settings_of(plain.param_groups[0]) != settings[0]:
        _refuse(kind, "built again from its settings it has others; give a callable that builds it")
    if all(own == settings[0] for own in settings):
        return BuiltAnew(build, None)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_name = {names[id(parameter)]: own for group, own in zip(groups, settings, strict=True) for parameter in group["params"]}
    return BuiltAnew(build, lambda name, parameter: of_name[name])


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """It trains all that the model says is to be trained, and nothing else."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad}
    foreign = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in names]
    if foreign:
        _refuse(type(optimizer), f"it has a parameter of shape {list(foreign[0].shape)} that is none of the model's")
    left_out = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in mine]
    if left_out:
        _refuse(type(optimizer), f"it leaves out {left_out[0]!r}, which the model says is trained; call requires_grad_(False) on it")


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group of parameters without them."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class UntouchedOptimizer:
    """The optimizer that was given: it stands for another one, so changing it would change nothing, without a word."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [settings_of(group) for group in optimizer.param_groups]

    def check(self, given_to: str = "atoll.step") -> None:
        """JobError if somebody has changed it."""
        if [settings_of(group) for group in self._optimizer.param_groups] != self._before:
            kind = type(self._optimizer).__name__
            change = "change step.optimizer" if given_to == "atoll.step" else "change it before"
            raise JobError(
                f"the {kind} given to {given_to} was changed, but it is not the one that steps: {change}, or give a schedule "
                "with scheduler=…, a callable from the optimizer to it"
            )


def _refuse(kind: type[torch.optim.Optimizer], why: str) -> NoReturn:
    raise JobError(f"optimizer: {kind.__name__}: {why}")
