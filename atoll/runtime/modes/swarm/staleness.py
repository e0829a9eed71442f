"""Staleness: an optimizer that goes on with other tensors, so that the weights a step is computed with stay as they are meanwhile."""

from collections import deque
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import nn

from atoll.errors import JobError
from atoll.job import Job

__all__ = ["check_optimizer", "check_rebindable", "rebind"]


def rebind(optimizer: torch.optim.Optimizer, old: Sequence[nn.Parameter], new: Sequence[nn.Parameter]) -> None:
    """The optimizer's parameters `old` become `new`, of the same shapes, with all it knows of them."""
    other = dict(zip(old, new, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [other[parameter] for parameter in group["params"]]
    for parameter in old:
        if parameter in optimizer.state:
            optimizer.state[other[parameter]] = optimizer.state.pop(parameter)


def check_optimizer(job: Job) -> None:
    """JobError where a job's optimizer cannot train with staleness, before anybody has weights: it is made for a stand-in of them."""
    check_rebindable(job.build_optimizer([nn.Parameter(torch.zeros(64, 64))]))


def check_rebindable(optimizer: torch.optim.Optimizer) -> None:
    """JobError where an optimizer keeps its parameters in places we do not know of."""
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and _holds_parameters(value, {id(optimizer)}):
            raise JobError(
                f"Job: optimizer: {type(optimizer).__name__} keeps its parameters in `{name}` besides `param_groups`; training with "
                "staleness=1 would leave them behind: use staleness=0 or another optimizer"
            )


def _holds_parameters(value: object, seen: set[int]) -> bool:
    """Anywhere in it: in containers, in other optimizers, in what objects keep."""
    if isinstance(value, nn.Parameter):
        return True
    if id(value) in seen or isinstance(value, (str, bytes, int, float, complex, torch.Tensor, type, ModuleType)):
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        inner: Iterable[object] = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inner = value
    else:
        inner = vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()
    return any(_holds_parameters(item, seen) for item in inner)
