"""Stages of a captured program run one after another in one process, with their gradients: what a pipeline does, without the ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from atoll.graph.capture import Captured
from atoll.runtime.activations import Activations
from atoll.runtime.executor import Accumulated, BuiltStage, GradientSink, LossScale, StageExecutor, Updater, WorkItem
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import StageProgram, cut_stage
from atoll.runtime.stage.rng import DrawKey
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
    gradients: GradientSink | None = None  # None: into `.grad`, each micro-batch as it is
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
        stages = {number: BuiltStage(program=p, module=m) for number, (p, m) in enumerate(zip(self.programs, self.modules, strict=True))}
        self.executor = StageExecutor(
            stages,
            sizes=self.sizes,
            loss=self.captured.program.call_spec.out_spec,
            key=self.key,
            autocast=nullcontext,
            generators=self.key.lock,
            gradients=self.gradients or Accumulated(1),
            updater=Updater(list(self.parameters.values()), None, None, LossScale(False), steps=1),
            persistent=frozenset(self.model.state_dict()),
        )

    def loss(self, batch: Any) -> Tensor:
        """Forward through all stages and backward through them; what crosses is checked to be as announced."""
        return self.losses([batch])[0]

    def losses(self, batches: Sequence[Any]) -> list[Tensor]:
        """The same with several micro-batches under way at once, each of weight 1."""
        found = [self.forward(number, batch) for number, batch in enumerate(batches)]
        for number in range(len(batches)):
            self.backward(number)
        return found

    def forward(self, number: int, batch: Any, samples: int = 1, weights: Tensor | None = None) -> Tensor:
        """One micro-batch through all stages; its loss, by what `samples` weigh."""
        leaves = self.sizes.leaves(batch, weights)
        made = Activations(self.sizes.bind(leaves), leaves, [])
        for stage, program in enumerate(self.programs):
            made = self.executor.forward(WorkItem(stage, 1, number, number, samples), made)
            for value, crossing in zip(made.values, program.sends, strict=True):
                assert tuple(value.shape) == self.sizes.shape(crossing, made.binding)
                assert value.dtype == crossing.dtype
        return self.executor.loss(WorkItem(len(self.programs) - 1, 1, number, number, samples)).total

    def backward(self, number: int, samples: int = 1) -> dict[int, list[Tensor | None]]:
        """Back through all stages; the gradients each returned of its parameters."""
        found, gradients = {}, list[Tensor]()
        for stage in range(len(self.programs) - 1, -1, -1):
            gradients, found[stage] = self.executor.backward(WorkItem(stage, 1, number, number, samples), gradients)
        return found
