"""The schedule runner: does one rank's actions of a step in order — computes through the stage executor, sends and receives in between."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.runtime.activations import Activations
from atoll.runtime.executor import BuiltStage, StageExecutor, WorkItem
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.lockstep.channels import Arrival, Channels, Transfer, backward_hops, forward_hops
from atoll.runtime.modes.lockstep.gradients import Gradients
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.modes.lockstep.measurement import Bucket
from atoll.runtime.modes.lockstep.recorder import Recorder
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.stage.sizes import Binding, Sizes

__all__ = ["Activity", "Feed", "Generators", "ScheduleRunner", "StageWork", "StepSums"]

_SYNCHRONISING = Doing("synchronising gradients", "others")


class Feed(Protocol):
    """Where a rank's samples come from."""

    reading: Doing  # what a rank does that waits for them

    def get(self, step: int, stage: int, micro_batch: int) -> tuple[dict[str, Any], Binding]:
        """The batch's leaves for the rank's piece of a micro-batch (none if the stage reads none), and the sizes they have."""
        ...


class Activity:
    """What the rank does, said to its watcher through `doing`."""

    def __init__(self, doing: Callable[[object, int], None]) -> None:
        self._doing = doing
        self._action: object = "starting"
        self._step = 0

    def begin(self, action: object, step: int) -> None:
        """The rank does this from now on."""
        self._action, self._step = action, step
        self._doing(action, step)

    @contextmanager
    def instead(self, action: object) -> Iterator[None]:
        """In the middle of what it does, something else; what fails there stays what it was doing."""
        self._doing(action, self._step)
        yield
        self._doing(self._action, self._step)


class Generators:
    """Around what draws random numbers: nobody else seeds the generators meanwhile. Says who has them where it has to wait."""

    def __init__(self, lock: Lock, reading: Doing, activity: Activity) -> None:
        self._lock, self._reading, self._activity = lock, reading, activity

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with self._activity.instead(self._reading):
                self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def _nothing() -> None:
    return


@dataclass(kw_only=True)
class StageWork(BuiltStage):
    """One stage as this rank runs it."""

    place: RankPlace
    parameters: list[nn.Parameter]  # that synchronisation waits for
    before_backward: Callable[[bool], None]  # told whether the backward to come is the step's last
    after_backwards: Callable[[], None] = _nothing  # when a step's gradients are whole


@dataclass
class StepSums:
    """What the rank saw of a step's loss: to be added up over ranks."""

    total: Tensor
    weight: Tensor


class ScheduleRunner:
    """Runs steps of one rank. After a failure in the middle of a step it is not to be used again; parameters are still the last step's."""

    def __init__(
        self,
        layout: Layout,
        actions: Sequence[Action],
        stages: Sequence[StageWork],
        executor: StageExecutor,
        *,
        sizes: Sizes,
        channels: Channels,
        gradients: Gradients,
        feed: Feed,
        activity: Activity,
        recorder: Recorder,
        pace: Pace | None,
    ) -> None:
        """`pace` is where speeds are imposed."""
        self._layout, self._actions, self._executor = layout, actions, executor
        self._stages = {work.place.stage: work for work in stages}
        self._sizes, self._channels, self._gradients, self._feed = sizes, channels, gradients, feed
        self._activity, self.recorder, self._pace = activity, recorder, pace
        self._last_backward = {action.stage: action.micro_batch for action in actions if action.kind == "B"}
        crossings = [crossing for work in stages for crossing in (*work.program.receives, *work.program.sends)]
        self._sample_dims = {crossing.name: sizes.sample_dim(crossing) for crossing in crossings}

    @property
    def buckets(self) -> list[Bucket]:
        """What is added up with other ranks once a step."""
        return self._gradients.buckets

    def run(self, step: int, *, first: bool = True) -> StepSums:
        """Forward and backward of all of the step's micro-batches (steps count from 1); gradients are whole afterwards.

        `first`: of the turns that the step has.
        """
        self._step = step
        self._arriving: dict[tuple[str, int, int], Arrival] = {}
        self._handed: dict[tuple[str, int, int], list[Tensor]] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self._channels.device)
        self._sums = StepSums(zero, zero.clone())  # on the device: nobody waits for it in the middle of a step
        if first:
            self.recorder.begin()
        self._gradients.begin()
        for action in self._actions:
            self._activity.begin(action, step)
            self._perform(action)
        self._activity.begin(_SYNCHRONISING, step)
        began = self.recorder.now()
        self._gradients.finish()
        for work in self._stages.values():
            work.after_backwards()
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
                self._arriving[action.kind[1], stage, m] = self._receive(stage, m, back=action.kind == "RB")
                self.recorder.add("P", stage, m, began)
            case "SF" | "SB":
                began = self.recorder.now()
                self._send(stage, m, back=action.kind == "SB")
                self.recorder.add(action.kind, stage, m, began)
            case _:
                pass  # synchronisation runs by itself as gradients become ready; the optimizer is the trainer's

    def _piece(self, stage: int, m: int) -> tuple[int, int]:
        return self._layout.pieces(stage, m)[self._stages[stage].place.lane]

    def _work(self, stage: int, m: int) -> WorkItem:
        start, stop = self._piece(stage, m)
        return WorkItem(stage, self._step, m, start, stop - start)

    def _arrived(self, direction: str, stage: int, m: int) -> list[Tensor]:
        """What this stage waits for of a micro-batch: from another rank, or handed over by this very one."""
        arrival = self._arriving.pop((direction, stage, m), None)
        if arrival is None:
            return self._handed.pop((direction, stage, m))
        began = self.recorder.now()
        with self._activity.instead(Action("RF" if direction == "F" else "RB", stage, m)):
            values = arrival.wait()
        self.recorder.add(f"R{direction}", stage, m, began)
        return values

    def _forward(self, stage: int, m: int) -> None:
        began = self.recorder.now()
        with self._activity.instead(self._feed.reading):
            leaves, binding = self._feed.get(self._step, stage, m)
        self.recorder.add("D", stage, m, began)
        inputs = Activations(binding, leaves, self._arrived("F", stage, m) if stage else [])
        began, work = self.recorder.now(), self._work(stage, m)
        with self._paced(stage, m, backward=False):
            made = self._executor.forward(work, inputs)
        if self._stages[stage].program.last:
            self._count_loss(work)
        elif self._layout_keeps(stage, m):
            self._handed["F", stage + 1, m] = made.values
        else:
            self._handed["SF", stage, m] = made.values
        self.recorder.add("F", stage, m, began)

    def _paced(self, stage: int, m: int, *, backward: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._pace is None else self._pace.imposed(stage, m, backward)

    def _layout_keeps(self, stage: int, m: int) -> bool:
        """Whether the next stage of the micro-batch is on this worker, so that nothing is sent."""
        layout = self._layout
        return layout.homes[stage][layout.route[stage][m]] == layout.homes[stage + 1][layout.route[stage + 1][m]]

    def _count_loss(self, work: WorkItem) -> None:
        if self._stages[work.stage].place.tensor == 0:
            loss = self._executor.loss(work)
            self._sums.total += loss.total
            self._sums.weight += loss.weight

    def _backward(self, stage: int, m: int) -> None:
        given = [] if self._stages[stage].program.last else self._arrived("B", stage, m)
        last = self._last_backward[stage] == m
        self._stages[stage].before_backward(last)
        if last:
            self._gradients.arm(self._stages[stage].parameters)
        began = self.recorder.now()
        with self._paced(stage, m, backward=True):
            returned = self._executor.backward(self._work(stage, m), given).inputs
        self.recorder.add("B", stage, m, began)
        if stage > 0:
            key = ("B", stage - 1, m) if self._layout_keeps(stage - 1, m) else ("SB", stage, m)
            self._handed[key] = returned

    def _message(self, boundary: int, m: int, *, back: bool) -> Transfer:
        """About the values between `boundary` and the stage after it."""
        here = boundary in self._stages
        crossings = self._stages[boundary].program.sends if here else self._stages[boundary + 1].program.receives
        chosen = [crossing for crossing in crossings if crossing.wants_gradient or not back]
        micro_batches = len(self._layout.micro_batches)
        tag = (2 * boundary + back) * micro_batches + m
        messages = 2 * len(self._layout.plan.stages) * micro_batches  # in a step: something both ends know
        return Transfer(chosen, [self._sample_dims[crossing.name] for crossing in chosen], tag, messages)

    def _receive(self, stage: int, m: int, *, back: bool) -> Arrival:
        """Activations from the stage before, or gradients from the one after."""
        message = self._message(stage if back else stage - 1, m, back=back)
        hops = (backward_hops if back else forward_hops)(self._layout, stage, m)
        _, binding = self._feed.get(self._step, stage, m)
        shapes = [self._sizes.shape(crossing, binding) for crossing in message.crossings]
        return self._channels.receive(message, hops, shapes, self._piece(stage, m)[0])

    def _send(self, stage: int, m: int, *, back: bool) -> None:
        """Gradients to the stage before, or activations to the one after."""
        message = self._message(stage - 1 if back else stage, m, back=back)
        hops = backward_hops(self._layout, stage - 1, m) if back else forward_hops(self._layout, stage + 1, m)
        values = self._handed.pop(("SB" if back else "SF", stage, m))
        self._channels.send(message, hops, values, self._piece(stage, m)[0])
