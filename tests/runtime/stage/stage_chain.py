"""Stages of a captured program run one after another in one process, with their gradients: what a pipeline does, without the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from atoll.graph.capture import Captured
from atoll.job import read_loss
from atoll.runtime.stage.drawing import DrawKey
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import StageProgram, cut_stage
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState


@dataclass
class _Job:
    """The least that capture asks of a job."""

    model: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], Any]
    name: str = "job"
    precision: Any = "fp32"

    def example_batch(self, samples: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.batch(samples)


def job_of(model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], batch: Callable[[int], Any]) -> _Job:
    return _Job(model, loss, batch)


@dataclass
class Chain:
    """All stages of a model, cut where `bounds` say."""

    captured: Captured
    model: nn.Module
    bounds: Sequence[int]
    recompute: bool = False
    key: DrawKey = field(default_factory=lambda: DrawKey(0))
    programs: list[StageProgram] = field(default_factory=list)
    modules: list[StageModule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = Sizes(self.captured)
        builder = StageBuilder(InitialState(self.captured, self.model), device=torch.device("cpu"), key=self.key)
        for start, stop in pairwise(self.bounds):
            program = cut_stage(self.captured, start, stop)
            self.programs.append(program)
            self.modules.append(builder.stage(program, [self.recompute] * len(program.units)))
        self.parameters = builder.parameters

    def loss(self, batch: Any) -> Tensor:
        """Forward through all stages and backward through them; what crosses is checked to be as announced."""
        return self.losses([batch])[0]

    def losses(self, batches: Sequence[Any]) -> list[Tensor]:
        """The same with several micro-batches under way at once."""
        under_way = [self._forward(batch) for batch in batches]
        for held, result in under_way:
            self._backward(held, result)
        return [result.detach() for _, result in under_way]

    def _forward(self, batch: Any) -> tuple[list[tuple[list[Tensor], tuple[Any, ...]]], Tensor]:
        leaves = self.sizes.leaves(batch)
        binding = self.sizes.bind(leaves)
        received: list[Tensor] = []
        held: list[tuple[list[Tensor], tuple[Any, ...]]] = []
        for program, module in zip(self.programs, self.modules, strict=True):
            inputs = [v.detach().requires_grad_(c.wants_gradient) for v, c in zip(received, program.receives, strict=True)]
            values = {**leaves, **{name: self.sizes.number(e, binding) for name, e in program.numbers.items()}}
            values.update(zip((crossing.name for crossing in program.receives), inputs, strict=True))
            outputs = module(values)
            for value, crossing in zip(outputs, program.sends, strict=False) if not program.last else ():
                assert tuple(value.shape) == self.sizes.shape(crossing, binding)
                assert value.dtype == crossing.dtype
            held.append((inputs, outputs))
            received = list(outputs)
        return held, read_loss(pytree.tree_unflatten(list(received), self.captured.program.call_spec.out_spec)).value

    def _backward(self, held: list[tuple[list[Tensor], tuple[Any, ...]]], loss: Tensor) -> None:
        roots, gradients = [loss], [torch.ones_like(loss)]
        for (inputs, _), program, before in zip(held[::-1], self.programs[::-1], [*held[-2::-1], ([], ())], strict=True):
            pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r.requires_grad]
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
            chosen = [i for i, crossing in enumerate(program.receives) if crossing.wants_gradient]
            gradients = [g if (g := inputs[i].grad) is not None else torch.zeros_like(inputs[i]) for i in chosen]
            roots = [before[1][i] for i in chosen]
