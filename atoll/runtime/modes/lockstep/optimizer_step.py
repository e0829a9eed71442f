"""The end of a step in lockstep: the norm of the whole gradient over all ranks, and optimizers that see parts of parameters."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.errors import JobError

__all__ = [
    "Counted",
    "build_on_parts",
    "check_elementwise",
    "check_separable",
    "local",
    "squared_norm",
]


def local(tensor: Tensor) -> Tensor:
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
        gradient = local(self.parameter.grad)
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


def build_on_parts(
    build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], parts: Sequence[nn.Parameter], shapes: Sequence[tuple[int, ...]]
) -> torch.optim.Optimizer:
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


def check_elementwise(build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> None:
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


def check_separable(build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> None:
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


def _shapes_it_takes(build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> list[tuple[int, ...]]:
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


def _after_steps(
    build: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], values: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = build(parameters)
    for row in gradients:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
