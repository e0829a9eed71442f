"""The stage executor: what every mode computes with. Forward and backward of a micro-batch, and the optimizer's step.

No I/O, no threads, no process groups: schedules and channels (lockstep), the protocol (swarm) and the eager loop (alone) are around it.
Modes differ in where gradients go: lockstep and alone leave them in `.grad`, each micro-batch by its share of the batch (`Accumulated`);
a swarm's workers do not know who computes what: they return them undivided, and the commit says what sums are divided by (`Contributed`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from atoll.blame import users_code
from atoll.errors import JobFailedError
from atoll.job import LossValue, read_loss
from atoll.runtime.activations import Activations
from atoll.runtime.checkpoint.manifest import EMA
from atoll.runtime.stage.compilation import Compiler, compile_errors
from atoll.runtime.stage.program import StageProgram
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.sizes import Sizes

if TYPE_CHECKING:  # loads PyTorch's distributed checkpoint, which takes seconds; who only computes needs none of it
    from atoll.runtime.checkpoint.local_shard import LocalShard

__all__ = [
    "Accumulated",
    "Contributed",
    "GradientSink",
    "InputGradients",
    "Loss",
    "LossScale",
    "BuiltStage",
    "StageCode",
    "StageExecutor",
    "Update",
    "Updater",
    "WorkItem",
    "loss_share",
    "scaled",
]


@dataclass(frozen=True)
class WorkItem:
    """A micro-batch at one stage, or the piece of it that a device computes."""

    stage: int
    step: int  # counted from 1
    micro_batch: int
    first_sample: int  # in the global batch: random numbers are keyed by it
    samples: int  # of the piece


def _nothing(work: WorkItem) -> None:
    return


class StageCode(Protocol):
    """What runs a stage: units of the captured program (`StageModule`), or the user's own code (`EagerStage`)."""

    def __call__(self, values: dict[str, Any]) -> Any:
        """What leaves the stage, of the values it receives and the batch's leaves, by name."""

    @property
    def recomputes(self) -> bool:
        """Whether backward may run some of it again."""

    def compile_with(self, compiler: Compiler) -> None:
        """Run compiled from now on; where it does already, nothing changes."""

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """What the device holds of each parameter, by the user's name."""

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Buffers it reads, by the user's name."""


@dataclass(kw_only=True)
class BuiltStage:
    """One stage as a device runs it."""

    program: StageProgram
    module: StageCode
    turn_to: Callable[[WorkItem], None] = _nothing  # told what is computed next, in forward or once more in backward


class Loss(NamedTuple):
    """What the last stage found of a micro-batch, to be added up."""

    total: Tensor
    weight: Tensor | float
    is_mean: bool  # over its samples: it was multiplied by what they weigh


class InputGradients(NamedTuple):
    """What a backward gives: the gradients of what entered, and the parameters' where they are not left in `.grad`."""

    inputs: list[Tensor]
    parameters: list[Tensor | None]


class LossScale:
    """What fp16 losses are multiplied by: doubled after many good steps, halved after an overflow, the same for all.

    The numbers are those of `torch.amp.GradScaler`, which cannot be told of overflows elsewhere.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 65536.0 if enabled else 1.0
        self.good_steps = 0

    def update(self, overflowed: bool) -> None:
        """After a step."""
        if not self.enabled:
            return
        if overflowed:
            self.value, self.good_steps = self.value * 0.5, 0
            return
        self.good_steps += 1
        if self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2.0, 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "enabled": self.enabled}

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave; a run that did not scale before, or does not now, begins as it would anew."""
        if not (self.enabled and state.get("enabled", True)):
            return
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


class Accumulated:
    """Gradients are added up in `.grad`, where hooks see them: each by its share of the batch, still multiplied by the loss scale."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def share(self, samples: int) -> float:
        """What a mean loss over so many samples is multiplied by: their share of the batch."""
        return samples / self._batch_size

    def scaled_by(self, scale: LossScale) -> float:
        """What a loss is multiplied by besides, so that fp16 gradients do not vanish."""
        return scale.value

    def differentiate(
        self, roots: Sequence[Tensor], given: Sequence[Tensor | None], inputs: Sequence[Tensor], factor: float
    ) -> InputGradients:
        """Backward, which leaves gradients in `.grad`; `factor` is what `scaled_by` said."""
        if roots:
            torch.autograd.backward(roots, given)
        return InputGradients([value.grad if value.grad is not None else torch.zeros_like(value) for value in inputs], [])


class Contributed:
    """Gradients of the batch's total, undivided and without the loss scale, are returned: summing them needs to know of neither."""

    def __init__(self, batch_size: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._batch_size, self._parameters = batch_size, parameters

    def share(self, samples: int) -> float:
        """As many samples."""
        return samples

    def scaled_by(self, scale: LossScale) -> float:
        """The loss scale on a sample's share of the batch, as one process has it; 1 but in fp16."""
        return scale.value / self._batch_size if scale.enabled else 1.0

    def differentiate(
        self, roots: Sequence[Tensor], given: Sequence[Tensor | None], inputs: Sequence[Tensor], factor: float
    ) -> InputGradients:
        """Returns gradients. Those of what entered stay scaled: the stage before unscales its own."""
        of = [*inputs, *self._parameters()]
        found: Sequence[Tensor | None] = [None] * len(of)
        if roots and of:
            found = torch.autograd.grad(roots, of, given, allow_unused=True)
        back = [value if value is not None else torch.zeros_like(entered) for entered, value in zip(inputs, found, strict=False)]
        own = list(found[len(inputs) :])
        return InputGradients(back, own if factor == 1.0 else [value if value is None else value.float() / factor for value in own])


GradientSink: TypeAlias = Accumulated | Contributed
"""Where the parameters' gradients go, and what a loss is multiplied by to be right there."""


def loss_share(value: LossValue, samples: int, gradients: GradientSink) -> Tensor:
    """What a micro-batch of so many samples adds to the batch's loss.

    A mean over samples knows its share beforehand. The weight of a batch is known only after its last micro-batch: totals count as they
    are, and the sum of their gradients is divided once.
    """
    return value.value * gradients.share(samples) if value.weight is None else value.value


def scaled(loss: Tensor, factor: float) -> Tensor:
    """What is differentiated in fp16; a loss that is itself of few bits is widened first, as `torch.amp.GradScaler` does."""
    if factor == 1.0:
        return loss
    return (loss if loss.element_size() >= 4 else loss.float()) * factor


@dataclass(frozen=True)
class Update:
    """A step to make. `overflowed`: its gradient is not finite in fp16, so neither optimizer nor schedule moves."""

    step: int  # counted from 1
    factor: float = 1.0  # what gradients are multiplied by: clipping, loss scale, weight of the batch
    overflowed: bool = False
    gradients: Sequence[Tensor | None] | None = None  # of the updater's parameters; None: they are in `.grad`


class Updater:
    """Optimizer, schedule and loss scale of some parameters. Without an optimizer (nothing is trained) only the scale moves."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        scheduler: LRScheduler | None,
        scale: LossScale,
        *,
        steps: int,
        ema_decay: float | None = None,
    ) -> None:
        self.parameters, self.optimizer, self.scheduler, self.scale = parameters, optimizer, scheduler, scale
        self._steps = steps  # of the run, for sentences
        self._ema_decay = ema_decay

    def unscale(self) -> bool:
        """Take the loss scale out of `.grad`; whether one is not finite, so that the step must be skipped. False but in fp16."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not (self.scale.enabled and gradients):
            return False
        torch._foreach_mul_(gradients, 1.0 / self.scale.value)
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(gradients, math.inf)]).max()
        return not math.isfinite(float(largest))

    def apply(self, update: Update) -> bool:
        """Make the step; whether anything moved. An error in the user's optimizer or schedule is a JobFailedError that says so."""
        self.scale.update(update.overflowed)
        if update.overflowed:
            return False
        if self.optimizer is None:
            return True
        if update.gradients is not None:
            for parameter, gradient in zip(self.parameters, update.gradients, strict=True):
                parameter.grad = gradient
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and update.factor != 1.0:
            torch._foreach_mul_(gradients, update.factor)
        before = self._not_averaged_yet(update)
        with users_code(f"step {update.step}: the optimizer", JobFailedError):
            self.optimizer.step()
        if self._ema_decay is not None:
            self._average(self._ema_decay, before)
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            with users_code(f"step {update.step} of {self._steps}: the learning-rate schedule", JobFailedError):
                self.scheduler.step()
        if update.gradients is not None:
            for parameter in self.parameters:
                parameter.grad = None
        return True

    def evaluated(self, step: int, loss: float | None) -> None:
        """Tell a schedule that waits for a plateau what an evaluation found, the same on all ranks."""
        if isinstance(self.scheduler, ReduceLROnPlateau) and loss is not None:
            with users_code(f"step {step} of {self._steps}: the learning-rate schedule", JobFailedError):
                self.scheduler.step(loss)

    def averages(self) -> dict[nn.Parameter, Tensor]:
        """The exponential moving average of each parameter that has one, in the memory that goes on averaging."""
        state = self.optimizer.state if self.optimizer is not None else {}
        return {parameter: state[parameter][EMA] for parameter in self.parameters if EMA in state.get(parameter, {})}

    def _not_averaged_yet(self, update: Update) -> dict[nn.Parameter, Tensor]:
        """What parameters are before their first gradient, where that comes after the first step: their average until then.

        Until then nothing is noted of them: optimizers take a parameter with some state for one that they know.
        """
        if self._ema_decay is None or update.step == 1 or self.optimizer is None:
            return {}
        known = self.averages()
        return {p: p.detach().clone() for p in self.parameters if p.grad is not None and p not in known}

    @torch.no_grad()
    def _average(self, decay: float, before: Mapping[nn.Parameter, Tensor]) -> None:
        """As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`: the first average is the weights after the first step."""
        assert self.optimizer is not None
        for parameter in self.parameters:
            if parameter.grad is not None and EMA not in self.optimizer.state[parameter]:
                self.optimizer.state[parameter][EMA] = before[parameter] if parameter in before else parameter.detach().clone()
        averages = self.averages()
        if averages:
            torch._foreach_lerp_(list(averages.values()), [parameter.detach() for parameter in averages], 1 - decay)


@dataclass
class _Kept:
    """A micro-batch between its forward and its backward."""

    inputs: list[Tensor]
    outputs: tuple[Any, ...]  # of the last stage: what is differentiated
    factor: float
    loss: Loss | None


class StageExecutor:
    """Computes with the stages a device has; who sends what to whom, and when, is the caller's.

    After an error in the middle of a step its weights are still the last step's; what was kept for backwards is not to be used.
    """

    def __init__(
        self,
        stages: Mapping[int, BuiltStage],
        *,
        sizes: Sizes,
        loss: pytree.TreeSpec,
        key: DrawKey,
        autocast: Callable[[], AbstractContextManager[Any]],
        generators: AbstractContextManager[Any],
        gradients: GradientSink,
        updater: Updater,
        persistent: frozenset[str] = frozenset(),
        owned: "Sequence[LocalShard] | None" = None,
        unread: Mapping[str, Tensor] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """`shards` has what is `owned` (unless given all parameters of its stages, whole), the buffers of them whose names are
        `persistent`, and what is `unread` by every stage. With a `compiler` its stages run compiled."""
        self.stages, self.updater = stages, updater
        self.deferred = loss.num_leaves > 1  # the loss is (total, weight): gradients are divided once the batch's weight is known
        self._sizes, self._loss, self._key, self._autocast, self._gradients = sizes, loss, key, autocast, gradients
        self._generators = generators  # held around what draws: nobody else seeds this process's generators meanwhile
        self._draws = {number: any(unit.draws for unit in stage.program.units) for number, stage in stages.items()}
        self._kept: dict[WorkItem, _Kept] = {}
        self._persistent, self._owned, self._unread = persistent, owned, unread or {}
        if compiler is not None:
            for stage in stages.values():
                stage.module.compile_with(compiler)

    @property
    def scale(self) -> LossScale:
        """What losses are multiplied by in fp16."""
        return self.updater.scale

    def forward(self, work: WorkItem, inputs: Activations) -> Activations:
        """What leaves the stage: nothing, if it is the last one, whose `loss` is noted. Its graph is kept until `backward` or `forget`."""
        program = self.stages[work.stage].program
        entered = [v.detach().requires_grad_(crossing.wants_gradient) for v, crossing in zip(inputs.values, program.receives, strict=True)]
        outputs = self._run(work, inputs, entered)
        if program.last:
            self._kept[work] = self._with_loss(work, entered, outputs)
            return Activations(inputs.binding, {}, [])
        self._kept[work] = _Kept(entered, outputs, self._gradients.scaled_by(self.scale), None)
        return Activations(inputs.binding, inputs.leaves, [value.detach() for value in outputs])

    def _run(self, work: WorkItem, inputs: Activations, entered: Sequence[Tensor]) -> tuple[Any, ...]:
        program, module = self.stages[work.stage].program, self.stages[work.stage].module
        values: dict[str, Any] = dict(inputs.leaves)
        values.update({name: self._sizes.number(expression, inputs.binding) for name, expression in program.numbers.items()})
        values.update(zip((crossing.name for crossing in program.receives), entered, strict=True))
        self._turn_to(work)
        with self._autocast(), self._generators if self._draws[work.stage] else nullcontext():
            return tuple(module(values))

    @torch.no_grad()
    def evaluate(self, work: WorkItem, inputs: Activations) -> Activations | LossValue:
        """Forward without a backward to come: what leaves the stage, or what the loss or metric at the end of the last one returned."""
        outputs = self._run(work, inputs, inputs.values)
        if self.stages[work.stage].program.last:
            if len(outputs) == 2 and isinstance(outputs[0], Tensor) and outputs[0].dim() == 1:
                return LossValue(*outputs)  # the totals and weights of several terms
            return read_loss(pytree.tree_unflatten(list(outputs), self._loss))
        return Activations(inputs.binding, inputs.leaves, list(outputs))

    def _with_loss(self, work: WorkItem, entered: list[Tensor], outputs: tuple[Any, ...]) -> _Kept:
        """What is to be differentiated is the piece's loss by its true weight in the global batch, or by its weight alone."""
        value: LossValue = read_loss(pytree.tree_unflatten(list(outputs), self._loss))
        total, factor = loss_share(value, work.samples, self._gradients), self._gradients.scaled_by(self.scale)
        weight = value.weight if value.weight is not None else float(work.samples)
        return _Kept(entered, (scaled(total, factor),), factor, Loss(total.detach(), weight, value.weight is None))

    def loss(self, work: WorkItem) -> Loss:
        """What the last stage found, until its backward."""
        found = self._kept[work].loss
        assert found is not None, f"stage {work.stage} is not the last one"
        return found

    def keeps(self, work: WorkItem) -> bool:
        """Whether the work's forward waits for its backward."""
        return work in self._kept

    def backward(self, work: WorkItem, gradients: Sequence[Tensor]) -> InputGradients:
        """From the gradients of what left the stage (none, for the last) to those of what entered. Uses up what the forward kept."""
        program, kept = self.stages[work.stage].program, self._kept.pop(work)
        roots, given = self._roots(program, kept, gradients)
        wanted = [value for value, crossing in zip(kept.inputs, program.receives, strict=True) if crossing.wants_gradient]
        self._turn_to(work)
        draws_again = self._draws[work.stage] and self.stages[work.stage].module.recomputes
        with self._generators if draws_again else nullcontext(), compile_errors():
            return self._gradients.differentiate(roots, given, wanted, kept.factor)

    @staticmethod
    def _roots(program: StageProgram, kept: _Kept, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        if program.last:
            return [kept.outputs[0]], [None]
        wanting = [value for value, crossing in zip(kept.outputs, program.sends, strict=True) if crossing.wants_gradient]
        pairs = [(value, gradient) for value, gradient in zip(wanting, gradients, strict=True) if value.requires_grad]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]

    def _turn_to(self, work: WorkItem) -> None:
        self._key.step, self._key.first_sample = work.step, work.first_sample
        self.stages[work.stage].turn_to(work)

    def forget(self, before_step: int | None = None) -> None:
        """Drop what forwards kept, of all steps or of those before one."""
        self._kept = {} if before_step is None else {work: kept for work, kept in self._kept.items() if work.step >= before_step}

    def apply(self, update: Update) -> bool:
        """Make the optimizer's step; whether anything moved."""
        return self.updater.apply(update)

    def shards(self) -> "list[LocalShard]":
        """What this device has of the model, by the user's names: the tensors themselves, for checkpoints, joins and averaging.

        Parameters (trained and frozen) and what else `state_dict` has, each once. `runtime/checkpoint/training_state.py` finds the
        optimizer's state by them. They are those after a whole step except while `apply` runs; with FSDP they are the device's own ranges.
        """
        from atoll.runtime.checkpoint.local_shard import whole_shards

        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for stage in self.stages.values():
            parameters |= stage.module.parameters_by_name()
            buffers |= stage.module.buffers_by_name()
        others = {name: value for name, value in buffers.items() if name in self._persistent} | dict(self._unread)
        return [*(whole_shards(parameters) if self._owned is None else self._owned), *whole_shards(others)]
