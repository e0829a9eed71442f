"""Kernels: forwards and backwards of a worker's micro-batches, one at a time, and the sums of their gradients (docs/swarm.md, rule 4).

Workers of one process share its device and take turns on it. Whoever shares a device is rated at its share: a kernel counts as having
taken as many times as long as there are workers. So what a swarm's workers add up to is what its devices can do, however many stages each
hosts, and routing, which goes by the same numbers, fits.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from atoll.control.messages import Ack, Attempt, Backward, Forward, Message, Round
from atoll.control.settings import BACKWARD_WORK
from atoll.control.worker_state import EARLY_LIMIT, Buffer, WorkerState
from atoll.control.world import Clock, Mailbox
from atoll.errors import AtollError

__all__ = ["KERNEL_ERRORS", "DeviceTurns", "Kernels"]


class DeviceTurns:
    """Taken in turns, in the order it was asked for."""

    def __init__(self, clock: Clock) -> None:
        self.workers = 0
        self._clock = clock
        self._taken = False
        self._waiting: deque[Mailbox] = deque()

    async def take(self) -> None:
        """Comes back when nobody else computes."""
        if self._taken:
            turn = self._clock.mailbox()
            self._waiting.append(turn)
            await turn.take()
        self._taken = True

    def give(self) -> None:
        """To whoever waited longest."""
        if self._waiting:
            self._waiting.popleft().put(None)  # it stays taken: nobody comes in between
        else:
            self._taken = False


MOST_FAILED = 3  # kernels of a step: by then it is not what somebody sent
KERNEL_ERRORS = (AtollError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


class _DroppedError(Exception):
    """A kernel failed and its micro-batch is passed over."""


class Kernels:
    """What waits to be computed, and its computing on the `device` that all workers of a process share.

    `on_kernel` is told of every kernel, what it counts as in forwards and its seconds; `on_landed` when something was added to a buffer;
    `warn` of what failed, and who sent it: a micro-batch that cannot be computed costs itself, only several in a step the worker.
    """

    def __init__(
        self,
        at: WorkerState,
        clock: Clock,
        device: DeviceTurns,
        send: Callable[[str, Message], None],
        on_kernel: Callable[[float, float], None],
        on_landed: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self.speed = 0.0  # forwards a second
        self._at, self._clock, self._device, self._send = at, clock, device, send
        self._on_kernel, self._on_landed, self._warn = on_kernel, on_landed, warn
        self._failed = 0  # kernels of this step
        self._urgent: deque[Callable[[], Awaitable[None]]] = deque()
        self._forwards: deque[Forward] = deque()
        self._backwards: deque[Backward] = deque()
        self._early: deque[Forward | Backward] = deque(maxlen=EARLY_LIMIT)
        self._saved: dict[tuple[int, Attempt | None], Forward] = {}
        self._latest: dict[int, tuple[Round, int]] = {}
        self._wake = clock.mailbox()
        self._idle = False
        self._ended = False

    async def run(self) -> None:
        """Computes what there is until `end`."""
        while not self._ended:
            if self._urgent or self._backwards or self._forwards:
                await self._device.take()
                await self._execute_next()
                self._device.give()
            else:
                self._idle = True
                await self._wake.take()

    def end(self) -> None:
        """Nothing more is begun."""
        self._ended = True

    async def _execute_next(self) -> None:
        """Steps of the optimizer first, then backwards, since they free memory and end what was begun, then forwards."""
        with suppress(_DroppedError):
            if self._urgent:
                await self._urgent.popleft()()
            elif self._backwards:
                await self._run_backward(self._backwards.popleft())
            elif self._forwards:
                await self._run_forward(self._forwards.popleft())

    def first(self, work: Callable[[], Awaitable[None]]) -> None:
        """Something for the device before all that waits."""
        self._urgent.append(work)
        self._work_waits()

    def forget(self) -> None:
        """Of the step so far: what waits is looked at again when its turn comes."""
        self._saved.clear()
        self._latest.clear()
        self._failed = 0

    def on_work(self, message: Forward | Backward) -> None:
        """A micro-batch arrives; one that is not for this worker as it stands is nothing, one of the near future is kept."""
        if self._at.incarnation == 0:
            return
        if self._at.is_early(message):
            self._early.append(message)
        elif self._at.matches(message) and not self._superseded(message):
            if type(message) is Forward:
                self._forwards.append(message)
            else:
                self._backwards.append(message)  # type: ignore[arg-type]
            self._work_waits()

    def admit_early(self) -> None:
        """Looks again at what came before its announcement."""
        if self._early:
            early, self._early = self._early, deque(maxlen=EARLY_LIMIT)
            for message in early:
                self.on_work(message)

    def _work_waits(self) -> None:
        if self._idle:
            self._idle = False
            self._wake.put(None)

    def _superseded(self, message: Forward | Backward) -> bool:
        attempt = message.attempt
        token = self._token(attempt)
        latest = self._latest.get(message.micro_batch)
        if latest is not None and token < latest:
            return True
        self._latest[message.micro_batch] = token
        return False

    def _token(self, attempt: Attempt) -> tuple[Round, int]:
        """By which a later attempt is known; numbers begin anew with every lease."""
        return attempt.round, attempt.number

    def _key(self, message: Forward | Backward) -> tuple[int, Attempt | None]:
        """Under which a forward waits for its backward."""
        return message.micro_batch, message.attempt

    async def _run_forward(self, message: Forward) -> None:
        if not self._at.matches(message) or self._superseded(message):
            return
        began, compute = self._clock.now(), self._at.compute
        sender = message.path[message.stage - 1] if message.stage else message.attempt.feeder
        what = (self._at.weights(), message.version, message.micro_batch, message.stage, message.payload)
        if message.stage == self._at.settings.stages - 1:
            gradient, contribution, loss, weight = await self._computed(compute.turn(*what), message, sender)
            seconds = self._measured(1.0 + BACKWARD_WORK, began)
            owns = await self._accumulate(message, contribution, loss, weight)
            self._pass_back(message, gradient, owns, seconds)
            return
        leaving = await self._computed(compute.forward(*what), message, sender)
        seconds = self._measured(1.0, began)
        if not self._at.matches(message):
            return
        self._saved[self._key(message)] = message
        onward = message.stage + 1
        self._send(message.path[onward], msgspec.structs.replace(message, stage=onward, payload=leaving))
        if self._at.settings.acknowledge_forward:
            self._acknowledge(message, True, False, seconds)

    async def _run_backward(self, message: Backward) -> None:
        saved = self._saved.get(self._key(message))
        if saved is None or not self._at.matches(message) or self._superseded(message):
            return
        del self._saved[self._key(message)]
        began = self._clock.now()
        kernel = self._at.compute.backward(
            self._at.weights(), message.version, message.micro_batch, message.stage, saved.payload, message.payload
        )
        gradient, contribution = await self._computed(kernel, message, saved.path[message.stage + 1])
        seconds = self._measured(BACKWARD_WORK, began)
        owns = await self._accumulate(saved, contribution, 0.0, 0.0)
        self._pass_back(saved, gradient, owns, seconds)

    async def _computed(self, kernel: Awaitable[Any], message: Forward | Backward, sender: str) -> Any:
        try:
            return await kernel
        except KERNEL_ERRORS as error:
            self._failed += 1
            if self._failed >= MOST_FAILED:
                raise
            why = (str(error) or type(error).__name__).splitlines()[0]
            what = f"micro-batch {message.micro_batch} of step {message.version + 1} at stage {message.stage}"
            self._warn(f"{what}: the {type(message).__name__} that {sender} sent cannot be computed ({why}); it is passed over")
            raise _DroppedError from error

    def _measured(self, work: float, began: float) -> float:
        seconds = self._clock.now() - began
        self._on_kernel(work, seconds)
        seconds *= self._device.workers  # the others of this process compute as long
        if seconds > 0:
            self.speed = work / seconds if self.speed == 0 else self.speed + 0.1 * (work / seconds - self.speed)
        return seconds

    async def _accumulate(self, message: Forward, contribution: Any, loss: float, weight: float) -> bool:
        """Adds to the buffer if all of rule 4 allows it; True when this worker's buffers hold the micro-batch now."""
        at, micro_batch = self._at, message.micro_batch
        if message.stage in message.owned or not at.matches(message):
            return False
        if self._is_summed(micro_batch):
            return True
        if self._is_frozen() or micro_batch not in at.missing:
            return False
        first = message.attempt.number == 0 and message.attempt.round == at.run_round
        buffer = at.buffers.get(0 if first else 1, at.stage)
        at.landing = buffer
        await self._land(buffer, contribution)
        at.landing = None
        buffer.micro_batches.add(micro_batch)
        buffer.loss += loss
        buffer.weight += weight
        self._on_landed()
        return at.matches(message) and at.buffers.holds(micro_batch)

    def _is_summed(self, micro_batch: int) -> bool:
        return self._at.buffers.holds(micro_batch)

    def _is_frozen(self) -> bool:
        return self._at.frozen is not None

    async def _land(self, buffer: Buffer, contribution: Any) -> None:
        """Comes back when the sum is there: only then the manifest may list it."""
        await self._at.compute.accumulate(buffer.value, contribution)

    def _pass_back(self, message: Forward, gradient: Any, owns: bool, seconds: float) -> None:
        """The gradient goes back along the path, no further than a stage still needs it."""
        self._acknowledge(message, False, owns, seconds)
        stage = message.stage - 1
        if any(below not in message.owned for below in range(message.stage)):
            back = Backward(message.epoch, message.version, stage, message.micro_batch, message.attempt, gradient)
            self._send(message.path[stage], back)

    def _acknowledge(self, message: Forward, forward: bool, owns: bool, seconds: float) -> None:
        about = (message.epoch, message.version, message.stage, message.micro_batch, message.attempt)
        self._send(message.attempt.feeder, Ack(*about, self._at.name, self._at.incarnation, forward, owns, seconds))
