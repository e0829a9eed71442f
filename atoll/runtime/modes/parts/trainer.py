"""A part that trains, in a process of its own: the usual run of one process, whose steps wait for what others send."""

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atoll.collaboration import Collaboration
from atoll.data import to_device
from atoll.events import AnyEvent, StepFinished
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.loading import Loaded
from atoll.runtime.checkpoint.trained import held_tensors
from atoll.runtime.executor import Update
from atoll.runtime.modes.alone.trainer import AloneTrainer, TakenTurn
from atoll.runtime.modes.parts.exchange import Outbox, Thing
from atoll.runtime.modes.parts.links import HubLink, Source
from atoll.runtime.modes.parts.messages import PartEvent, PartStep, sent_tensor
from atoll.runtime.part_executor import PartExecutor, Returned, added

__all__ = ["PartConnections", "PartTrainer"]

_USE_SECONDS = 2.0  # between two accounts of what crossed


class PartConnections:
    """How a part's tensors come and go: the training thread's view."""

    def __init__(self, hub: HubLink, outbox: Outbox, received: Mapping[str, Source], gradients: Mapping[str, Mapping[str, Source]]) -> None:
        """`received` by name; `gradients` of what is sent, by name and who returns them, in the order in which they are added up."""
        self.hub, self._outbox, self._received, self._gradients = hub, outbox, received, gradients
        self.waited_seconds = 0.0  # in the step

    @property
    def sources(self) -> list[Source]:
        """All there are."""
        return [*self._received.values(), *(source for row in self._gradients.values() for source in row.values())]

    def begin(self, step: int) -> None:
        """The run goes on after this step."""
        self.hub.member.fabric.run(self._outbox.begin(step))
        for source in self.sources:
            source.begin(step)

    def room(self, step: int) -> None:
        """Waits until receivers are near enough, and the hub has heard of the steps before."""
        self.waited_seconds = 0.0
        with self._waiting():
            self.hub.member.fabric.run(self._outbox.room(step))

    def receive(self, step: int) -> dict[str, Tensor | None]:
        """What the others send for a step."""
        with self._waiting():
            return {name: source.take(step) for name, source in self._received.items()}

    def send(self, step: int, values: Mapping[str, Tensor], codecs: Mapping[str, str]) -> None:
        """To all who receive it."""
        if values:
            self._put(step, {Thing(name): sent_tensor(value, codecs[name]) for name, value in values.items()})

    def returned(self, step: int) -> tuple[dict[str, Tensor], float | None]:
        """The gradients of what was sent, and the sum of the losses they are of, where these train this part alone."""
        found, losses = {}, []
        with self._waiting():
            for name, row in self._gradients.items():
                values = []
                for source in row.values():
                    value = source.take(step)
                    assert value is not None, "gradients are not optional"
                    values.append(value)
                    losses += [source.loss] if source.loss is not None else []
                found[name] = added(values)
        return found, sum(losses) if losses else None

    def give_back(self, step: int, gradients: Mapping[str, Returned], codecs: Mapping[str, str]) -> None:
        """Gradients, to those whose tensors they are of."""
        if gradients:
            self._put(step, {Thing(name, True): sent_tensor(one.gradient, codecs[name], one.loss) for name, one in gradients.items()})

    def _put(self, step: int, values: Mapping[Thing, Any]) -> None:
        self.hub.member.fabric.submit(self._outbox.put(step, values))

    def _waiting(self) -> "_Waiting":
        return _Waiting(self)


class _Waiting:
    def __init__(self, connections: PartConnections) -> None:
        self._connections = connections

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._connections.waited_seconds += time.perf_counter() - self._began


class PartTrainer(AloneTrainer):
    """Makes a part's steps among the others."""

    def __init__(self, collaboration: Collaboration, name: str, connections: PartConnections, begin: int, *rest: Any) -> None:
        self._begin, self._connections = begin, connections
        super().__init__(*rest)
        self.observers.insert(0, self._tell)
        self._codecs = {sent: codec for part in collaboration.parts.values() for sent, codec in part.codecs.items()}
        self._executor = PartExecutor(collaboration, name, self.model, self.device)
        self._loss: float | None = None
        self._marks = [0, 0]  # how many events there were after the last two steps
        self._accounted = 0.0

    def load_checkpoint(self, checkpoints: Checkpointer) -> Loaded | None:
        """That of the step which all parts begin after."""
        if not self._begin:
            return None
        return checkpoints.load(held_tensors(self.model), optimizers=self.optimizers, step=self._begin)

    def step(self) -> None:
        """The next step, once the hub has heard of the one before the last; none follows the one that the hub says is the last."""
        hub = self._connections.hub
        hub.wait_until_told(self._marks[0])
        if self._is_last():
            return
        super().step()
        self._marks = [self._marks[1], hub.sent]
        if time.monotonic() > self._accounted + _USE_SECONDS:
            self.account()
        self._is_last()

    def account(self) -> None:
        """Tells the hub what has crossed so far."""
        self._accounted = time.monotonic()
        for source in self._connections.sources:
            self._connections.hub.tell(source.use)

    def _is_last(self) -> bool:
        stop = self._connections.hub.stop_after
        if stop is not None and len(self.losses) >= stop and self.reason is None:
            self._reason = "stopped"
        return self.reason is not None

    def take_turns(self, step: int) -> list[TakenTurn]:
        """The part's own turn, with what it waits for."""
        executor, others, (turn,) = self._executor, self._connections, self.turns
        batch = to_device(self._next_batch(step), self.device)
        others.room(step)
        turn.optimizer.zero_grad()
        received = {name: None if value is None else value.to(self.device) for name, value in others.receive(step).items()}
        others.send(step, executor.forward(step, batch, received), self._codecs)
        if executor.loss is not None and not math.isfinite(executor.loss.value):
            self._not_finite(step, "loss", executor.loss.value)
        returned, taught = others.returned(step)
        others.give_back(step, executor.backward(step, returned), self._codecs)
        norm = self._clip(step, turn, overflowed=False)
        self._loss = executor.loss.value if executor.loss is not None else taught
        weight = executor.loss.weight if executor.loss is not None else float(self.job.batch_size)
        return [TakenTurn(self._loss, weight, norm, turn.updater.apply(Update(step)))]

    def _tell(self, event: AnyEvent) -> None:
        """To the hub, which makes the run's events of all parts'."""
        if isinstance(event, StepFinished):
            self._connections.hub.tell(self._step_of(event))
        elif isinstance(event, PartEvent):
            self._connections.hub.tell(event)

    def _step_of(self, event: StepFinished) -> PartStep:
        return PartStep(
            step=event.step,
            loss=self._loss,
            weight=event.weight,
            seconds=event.seconds,
            waited_seconds=self._connections.waited_seconds,
            learning_rate=event.learning_rate,
            gradient_norm=event.gradient_norm,
            memory_bytes=event.memory_bytes,
            data_seconds=event.data_seconds,
            loading_seconds=event.loading_seconds,
        )
