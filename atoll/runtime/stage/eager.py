"""The whole job as one stage, run as the user wrote it: for what cannot be captured.

It has the same face as a stage cut from a program, so executor, schedules, gradients, checkpoints and evaluation are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from atoll.blame import users_code
from atoll.errors import JobError, JobFailedError
from atoll.graph.eager import Uncaptured
from atoll.job import Job, LossFunction, read_loss
from atoll.randomness import generator_states, mix, seed_everything
from atoll.runtime.stage.compilation import CompiledDraws, Compiler
from atoll.runtime.stage.program import StageProgram, Unit
from atoll.runtime.stage.rng import DrawKey, EagerDraws
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.turns import training_only

__all__ = ["EagerEvaluation", "EagerStage", "WholeBatch", "eager_program", "loss_structures"]

_BATCH = "batch"


class WholeBatch(Sizes):
    """The batch as it is, under one name: no size of it is known, and none has to be."""

    def __init__(self) -> None:
        self.names, self.symbols, self.fixed, self.weights = [_BATCH], [], None, None
        self.dtypes, self._shapes, self._samples, self._known, self._paths = {}, {}, set(), {}, []

    def leaves(self, batch: Any, weights: Tensor | None = None) -> dict[str, Any]:
        """Whatever `collate_fn` returned; a loss that could not be captured has no terms to weigh."""
        return {_BATCH: batch}


def eager_program() -> StageProgram:
    """A stage that takes the batch, draws numbers and returns the loss."""
    prologue = Unit("prologue", range(0), fx.Graph(), {}, (), ())
    unit = Unit("model", range(1), fx.Graph(), {}, (_BATCH,), ("loss",), draws={"loss": 0})
    return StageProgram(receives=(), prologue=prologue, units=[unit], sends=(), numbers={}, results=("loss",), batch=(_BATCH,), last=True)


def loss_structures(uncaptured: Uncaptured) -> list[pytree.TreeSpec]:
    """What the stage returns in each turn of a step: one number, or two."""
    plain = [not weighted and weight.kind == "samples" for weighted, weight in zip(uncaptured.weighted, uncaptured.weights, strict=True)]
    return [pytree.tree_structure(0 if one else (0, 0)) for one in plain]


class EagerStage(nn.Module):
    """The user's model and loss. Random numbers are those that one process draws whose micro-batches are the same pieces."""

    def __init__(
        self, model: nn.Module, job: Job, uncaptured: Uncaptured, key: DrawKey, device: torch.device, pieces: Sequence[tuple[int, int]]
    ) -> None:
        """`pieces` of a batch, in their order: the first sample of each, and the first after it."""
        super().__init__()
        self.model = model
        self._losses: list[LossFunction] = [turn.loss for turn in job.turns.values()]
        self._uncaptured, self._key, self._device, self._batch_size = uncaptured, key, device, job.batch_size
        self._pieces = {start: (number, stop - start) for number, (start, stop) in enumerate(pieces)}
        self.trained_in = job.trained_in(model)  # names of parameters, by turn
        self._buffers_before = dict(model.named_buffers(remove_duplicate=False))
        self._drew = False
        self._compiler: Compiler | None = None

    def compile_with(self, compiler: Compiler) -> None:
        """Run the losses compiled from now on."""
        if self._compiler is None:
            self._compiler, self._losses = compiler, [compiler.function(loss) for loss in self._losses]

    def forward(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The loss of a piece, or its total and weight."""
        step, (number, samples) = self._key.step, self._pieces[self._key.first_sample]
        seed_everything(mix(self._key.seed, 5, step, number, *self._key.of_turn), devices=self._device.type != "cpu")
        before = generator_states()
        with (
            users_code(f"step {step}: the loss", JobFailedError),
            self._draws() if self._uncaptured.draws else nullcontext(),
        ):
            value, weight = read_loss(self._losses[self._key.turn](self.model, values[_BATCH]))
        self._drew = generator_states() != before
        if not value.requires_grad:
            raise JobError("Job: loss: no gradient flows from it to the model; is it computed under no_grad, or detached?")
        weighted = self._uncaptured.weighted[self._key.turn]
        if (weight is not None) != weighted:
            first, now = ("(total, weight)", "a number") if weighted else ("a number", "(total, weight)")
            raise JobFailedError(f"step {step}: the loss returned {now}, and {first} for the first samples; return the same always")
        return self._weighed(value, values[_BATCH], samples) if weight is None else (value, weight)

    def _weighed(self, value: Tensor, batch: Any, samples: int) -> tuple[Any, ...]:
        """A mean over samples as it is, others as total and weight; a piece in which nothing counts has no loss, and adds nothing."""
        by = self._uncaptured.weights[self._key.turn]
        if by.kind == "samples":
            return (value,)
        factor, weight = by.of(pytree.tree_leaves(batch), samples, self._batch_size)
        if not factor:  # gradients of all parameters are there all the same: lanes wait for each other's
            return torch.stack([parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]).sum(), 0.0
        return value * factor, weight

    def _draws(self) -> EagerDraws:
        return EagerDraws(self._key, self.model) if self._compiler is None else CompiledDraws(self._key, self.model, self._compiler)

    @contextmanager
    def in_turn(self, number: int, name: str) -> Iterator[None]:
        """Inside, it is this turn of the step: its loss, and gradients for what it trains alone."""
        self._key.turn, parameters = number, self.parameters_by_name()
        trained = {own: parameters[own] for names in self.trained_in.values() for own in names}
        with training_only(self.trained_in[name], trained) if name else nullcontext():
            yield

    @property
    def recomputes(self) -> bool:
        """Whether a backward may draw again what the forward before it drew (`torch.utils.checkpoint` in the model's own code)."""
        return self._drew

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """All parameters; tied ones by their first name."""
        return dict(self.model.named_parameters())

    def buffers_by_name(self) -> dict[str, Tensor]:
        """All buffers."""
        return dict(self.model.named_buffers(remove_duplicate=False))

    def changed_buffers(self) -> list[str]:
        """All of them: nobody knows what the code does."""
        return list(self._buffers_before)

    def settle_buffers(self) -> None:
        """After a step: where the model put another tensor in a buffer's place, its values go into the one that others know."""
        for name, known in self._buffers_before.items():
            path, _, attribute = name.rpartition(".")
            owner = self.model.get_submodule(path)
            now = owner._buffers.get(attribute)
            if now is known:
                continue
            if now is None or now.shape != known.shape or now.dtype != known.dtype:
                raise JobFailedError(
                    f"the model replaces its buffer {name!r} by one of another shape or type, which devices cannot agree on; "
                    f"write `self.{attribute}.copy_(…)`"
                )
            with torch.no_grad():
                known.copy_(now)
            owner._buffers[attribute] = known

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are there, whole; all ranks enter together."""
        if not isinstance(self, FSDPModule):
            yield
            return
        self.unshard()
        try:
            yield
        finally:
            self.reshard()


class EagerEvaluation(nn.Module):
    """The evaluation loss, or a metric, of a stage's model."""

    def __init__(self, stage: EagerStage, function: LossFunction, name: str) -> None:
        super().__init__()
        self._stage = [stage]  # in a list: it is no submodule
        self._function, self._name = function, name
        self.around: Callable[[EagerEvaluation], AbstractContextManager[None]] | None = None

    recomputes = False

    def compile_with(self, compiler: Compiler) -> None:
        """Run the function compiled from now on."""
        self._function = compiler.function(self._function)

    def forward(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """What the function returned; here a plain number will do."""
        model = self._stage[0].model
        with nullcontext() if self.around is None else self.around(self):
            model.eval()
            found: object = self._function(model, values[_BATCH])
            model.train()
        return (read_loss(torch.tensor(float(found)) if isinstance(found, (int, float)) else found, self._name),)

    def all_units(self) -> "list[EagerEvaluation]":
        """Itself."""
        return [self]

    def holding(self, whole: Callable[[str], Tensor]) -> AbstractContextManager[None]:
        """While it runs, the parameters are gathered where lanes have shards of them."""
        return self._stage[0].gathered()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """None of its own."""
        return {}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """None of its own."""
        return {}
