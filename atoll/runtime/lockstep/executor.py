"""The stage executor: runs one rank's actions of a step — forwards, backwards, what comes in between — as the schedule says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from atoll.job import LossValue, read_loss
from atoll.runtime.lockstep.beats import Doing
from atoll.runtime.lockstep.bridge import backward_hops, forward_hops
from atoll.runtime.lockstep.channels import Arrival, Channels, Message
from atoll.runtime.lockstep.gradients import Gradients
from atoll.runtime.lockstep.layout import Layout, Place
from atoll.runtime.lockstep.measuring import Bucket, Recorder
from atoll.runtime.lockstep.pacing import Pace
from atoll.runtime.lockstep.schedule import Action
from atoll.runtime.stage.collectives import Lanes
from atoll.runtime.stage.drawing import DrawKey
from atoll.runtime.stage.module import StageModule
from atoll.runtime.stage.program import StageProgram
from atoll.runtime.stage.sizes import Binding, Sizes

__all__ = ["Executor", "Feed", "StageWork", "StepSums"]

_SYNCHRONISING = Doing("synchronising gradients", "others")


class Feed(Protocol):
    """Where a rank's samples come from."""

    reading: Doing  # what a rank does that waits for them

    def get(self, step: int, stage: int, micro_batch: int) -> tuple[dict[str, Any], Binding]:
        """The batch's leaves for the rank's piece of a micro-batch (none if the stage reads none), and the sizes they have."""
        ...


@dataclass
class StageWork:
    """One stage as this rank runs it."""

    place: Place
    program: StageProgram
    module: StageModule
    parameters: list[nn.Parameter]  # that synchronisation waits for
    before_backward: Callable[[bool], None]  # told whether the backward to come is the step's last
    lanes: Lanes | None = None  # that divide layers of the stage, and must know each micro-batch's samples


@dataclass
class StepSums:
    """What the rank saw of a step's loss: to be added up over ranks."""

    total: Tensor
    weight: Tensor


@dataclass
class _Held:
    """A micro-batch between its forward and its backward."""

    inputs: list[Tensor]
    outputs: tuple[Any, ...]


class Executor:
    """Runs steps of one rank. After a failure in the middle of a step it is not to be used again; parameters are still the last step's."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        actions: Sequence[Action],
        stages: Sequence[StageWork],
        *,
        program: ExportedProgram,
        sizes: Sizes,
        channels: Channels,
        gradients: Gradients,
        feed: Feed,
        key: DrawKey,
        autocast: Callable[[], AbstractContextManager[Any]],
        doing: Callable[[object, int], None],
    ) -> None:
        self._layout, self._rank, self._actions = layout, rank, actions
        self._stages = {work.place.stage: work for work in stages}
        self._spec = program.call_spec.out_spec
        self.deferred = self._spec.num_leaves > 1  # the loss is (total, weight): gradients are divided once the batch's weight is known
        self._sizes, self._channels, self._gradients, self._feed = sizes, channels, gradients, feed
        self._key, self._autocast, self._doing = key, autocast, doing
        self._last_backward = {action.stage: action.micro_batch for action in actions if action.kind == "B"}
        self._dims = {work.place.stage: [sizes.sample_dim(crossing) for crossing in work.program.receives] for work in stages}
        self._dims_out = {work.place.stage: [sizes.sample_dim(crossing) for crossing in work.program.sends] for work in stages}
        self._drawing_stages = {work.place.stage for work in stages if any(unit.draws for unit in work.program.units)}
        self.loss_scale = 1.0
        self.pace: Pace | None = None  # where speeds are imposed
        self.recorder = gradients.recorder = Recorder(channels.device.type)

    @property
    def buckets(self) -> list[Bucket]:
        """What is added up with other ranks once a step."""
        return self._gradients.buckets

    def run(self, step: int) -> StepSums:
        """Forward and backward of all of the step's micro-batches (steps count from 1); gradients are whole afterwards."""
        self._step = step
        self._held: dict[tuple[int, int], _Held] = {}
        self._arriving: dict[tuple[str, int, int], Arrival] = {}
        self._handed: dict[tuple[str, int, int], list[Tensor]] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self._channels.device)
        self._sums = StepSums(zero, zero.clone())  # on the device: nobody waits for it in the middle of a step
        self.recorder.begin()
        self._gradients.begin()
        for action in self._actions:
            self._doing(action, step)
            self._perform(action)
        self._doing(_SYNCHRONISING, step)
        began = self.recorder.now()
        self._gradients.finish()
        self._channels.settle()
        self.recorder.add("S", -1, -1, began)
        return self._sums

    def _perform(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        match action.kind:
            case "F":
                self._forward(stage, m)
            case "B":
                self._backward(stage, m)
            case "RF" | "RB":
                began = self.recorder.now()
                receive = self._receive_activations if action.kind == "RF" else self._receive_gradients
                self._arriving[action.kind[1], stage, m] = receive(stage, m)
                self.recorder.add("P", stage, m, began)
            case "SF" | "SB":
                began = self.recorder.now()
                (self._send_activations if action.kind == "SF" else self._send_gradients)(stage, m)
                self.recorder.add(action.kind, stage, m, began)
            case _:
                pass  # synchronisation runs by itself as gradients become ready; the optimizer is the trainer's

    def _piece(self, stage: int, m: int) -> tuple[int, int]:
        return self._layout.pieces(stage, m)[self._stages[stage].place.lane]

    def _inputs(self, stage: int, m: int) -> list[Tensor]:
        """What the stage before made of the micro-batch: arrived, or handed over by this very rank."""
        work = self._stages[stage]
        if stage == 0:
            return []
        values = self._arrived("F", stage, m)
        return [value.requires_grad_(crossing.wants_gradient) for value, crossing in zip(values, work.program.receives, strict=True)]

    def _arrived(self, direction: str, stage: int, m: int) -> list[Tensor]:
        """What this stage waits for of a micro-batch: from another rank, or handed over by this very one."""
        arrival = self._arriving.pop((direction, stage, m), None)
        if arrival is None:
            return self._handed.pop((direction, stage, m))
        began = self.recorder.now()
        self._doing(Action("RF" if direction == "F" else "RB", stage, m), self._step)
        values = arrival.wait()
        self._doing(Action("F" if direction == "F" else "B", stage, m), self._step)
        self.recorder.add(f"R{direction}", stage, m, began)
        return values

    def _forward(self, stage: int, m: int) -> None:
        work, action = self._stages[stage], Action("F", stage, m)
        began = self.recorder.now()
        self._doing(self._feed.reading, self._step)
        leaves, binding = self._feed.get(self._step, stage, m)
        self._doing(action, self._step)
        self.recorder.add("D", stage, m, began)
        inputs = self._inputs(stage, m)
        began = self.recorder.now()
        values: dict[str, Any] = {**leaves, **{name: self._sizes.number(e, binding) for name, e in work.program.numbers.items()}}
        values.update(zip((crossing.name for crossing in work.program.receives), inputs, strict=True))
        self._turn_to(stage, m)
        with self._paced(stage, m, backward=False), self._autocast(), self._drawing(action):
            outputs = work.module(values)
        if work.program.last:
            outputs = (self._count_loss(stage, m, outputs),)
        elif self._layout_keeps(stage, m):
            self._handed["F", stage + 1, m] = [value.detach() for value in outputs]
        self._held[stage, m] = _Held(inputs, outputs)
        self.recorder.add("F", stage, m, began)

    def _paced(self, stage: int, m: int, *, backward: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.pace is None else self.pace.imposed(stage, m, backward=backward)

    def _layout_keeps(self, stage: int, m: int) -> bool:
        """Whether the next stage of the micro-batch is on this worker, so that nothing is sent."""
        layout = self._layout
        return layout.homes[stage][layout.route[stage][m]] == layout.homes[stage + 1][layout.route[stage + 1][m]]

    def _turn_to(self, stage: int, m: int) -> None:
        """What is computed next, in forward or again in backward, is this micro-batch."""
        self._key.step, self._key.first_sample = self._step, self._piece(stage, m)[0]
        lanes = self._stages[stage].lanes
        if lanes is not None:
            lanes.samples = tuple(stop - start for start, stop in self._layout.pieces(stage, m))

    def _drawing(self, action: Action) -> AbstractContextManager[None]:
        """Around what may draw random numbers: nobody else seeds the generators meanwhile."""
        return self._with_generators(action) if action.stage in self._drawing_stages else nullcontext()

    @contextmanager
    def _with_generators(self, action: Action) -> Iterator[None]:
        if not self._key.lock.acquire(blocking=False):
            self._doing(self._feed.reading, self._step)  # that is who has them
            self._key.lock.acquire()
            self._doing(action, self._step)
        try:
            yield
        finally:
            self._key.lock.release()

    def _count_loss(self, stage: int, m: int, outputs: tuple[Any, ...]) -> Tensor:
        """Note the loss and return what is to be differentiated: each piece by its true weight in the global batch."""
        value: LossValue = read_loss(pytree.tree_unflatten(list(outputs), self._spec))
        start, stop = self._piece(stage, m)
        share = value.value * ((stop - start) / self._layout.plan.batch_size) if value.weight is None else value.value
        if self._stages[stage].place.tensor == 0:
            self._sums.total += share.detach()
            self._sums.weight += stop - start if value.weight is None else value.weight
        return share * self.loss_scale if self.loss_scale != 1.0 else share

    def _backward(self, stage: int, m: int) -> None:
        work, held = self._stages[stage], self._held.pop((stage, m))
        last = self._last_backward[stage] == m
        work.before_backward(last)
        if last:
            self._gradients.arm(work.parameters)
        self._turn_to(stage, m)
        roots, gradients = self._roots(stage, m, held)
        began = self.recorder.now()
        with self._paced(stage, m, backward=True), self._drawing(Action("B", stage, m)):
            if roots:
                torch.autograd.backward(roots, gradients)
        self.recorder.add("B", stage, m, began)
        if stage > 0:
            returned = [
                value.grad if value.grad is not None else torch.zeros_like(value)
                for value, crossing in zip(held.inputs, work.program.receives, strict=True)
                if crossing.wants_gradient
            ]
            self._handed["SB", stage, m] = returned
            if self._layout_keeps(stage - 1, m):
                self._handed["B", stage - 1, m] = self._handed.pop(("SB", stage, m))

    def _roots(self, stage: int, m: int, held: _Held) -> tuple[list[Tensor], list[Tensor | None]]:
        work = self._stages[stage]
        if work.program.last:
            return [held.outputs[0]], [None]
        gradients = self._arrived("B", stage, m)
        wanting = [value for value, crossing in zip(held.outputs, work.program.sends, strict=True) if crossing.wants_gradient]
        pairs = [(value, gradient) for value, gradient in zip(wanting, gradients, strict=True) if value.requires_grad]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]

    def _message(self, boundary: int, m: int, *, back: bool) -> Message:
        """About the values between `boundary` and the stage after it."""
        if boundary in self._stages:
            crossings, dims = self._stages[boundary].program.sends, self._dims_out[boundary]
        else:
            crossings, dims = self._stages[boundary + 1].program.receives, self._dims[boundary + 1]
        chosen = [i for i, crossing in enumerate(crossings) if crossing.wants_gradient or not back]
        micro_batches = len(self._layout.micro_batches)
        tag = (2 * boundary + back) * micro_batches + m
        messages = 2 * len(self._layout.plan.stages) * micro_batches  # in a step: something both ends know
        return Message([crossings[i] for i in chosen], [dims[i] for i in chosen], tag, messages)

    def _receive_activations(self, stage: int, m: int) -> Arrival:
        message = self._message(stage - 1, m, back=False)
        return self._receive(message, forward_hops(self._layout, stage, m), stage, m)

    def _receive_gradients(self, stage: int, m: int) -> Arrival:
        message = self._message(stage, m, back=True)
        return self._receive(message, backward_hops(self._layout, stage, m), stage, m)

    def _receive(self, message: Message, hops: Sequence[Any], stage: int, m: int) -> Arrival:
        _, binding = self._feed.get(self._step, stage, m)
        shapes = [self._sizes.shape(crossing, binding) for crossing in message.crossings]
        return self._channels.receive(message, hops, shapes, self._piece(stage, m))

    def _send_activations(self, stage: int, m: int) -> None:
        values = list(self._held[stage, m].outputs)
        message = self._message(stage, m, back=False)
        self._channels.send(message, forward_hops(self._layout, stage + 1, m), values, self._piece(stage, m)[0])

    def _send_gradients(self, stage: int, m: int) -> None:
        message = self._message(stage - 1, m, back=True)
        values = self._handed.pop(("SB", stage, m))
        self._channels.send(message, backward_hops(self._layout, stage - 1, m), values, self._piece(stage, m)[0])
