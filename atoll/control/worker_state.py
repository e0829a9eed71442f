"""Where a worker stands: which state it has, and what it has summed of the step under way.

A buffer of sums and its manifest are one object, so that they cannot part.
"""

from dataclasses import dataclass, field
from typing import Any

from atoll.control.messages import Backward, BufferManifest, Forward, Order, Round
from atoll.control.settings import Settings
from atoll.control.world import Compute

__all__ = ["EARLY_LIMIT", "NEVER", "Buffers", "WorkerState"]

BUFFERS = 2
"""First attempts go to buffer 0; retries, which are likelier to overlap with others, to buffer 1, so that less is lost with it."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A sum of contributions and which micro-batches are in it."""

    value: Any
    micro_batches: set[int] = field(default_factory=set)
    loss: float = 0.0
    weight: float = 0.0


class Buffers:
    """All buffers of a worker; empty ones cost nothing."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._buffers: list[Buffer | None] = [None] * BUFFERS

    def holds(self, micro_batch: int) -> bool:
        """Whether any buffer does."""
        return any(buffer is not None and micro_batch in buffer.micro_batches for buffer in self._buffers)

    def get(self, index: int, stage: int) -> Buffer:
        """The buffer, made when it is first used."""
        buffer = self._buffers[index]
        if buffer is None:
            buffer = self._buffers[index] = Buffer(self._compute.buffer(stage))
        return buffer

    def chosen(self, indices: tuple[int, ...], stage: int) -> list[Any]:
        """The sums of some buffers."""
        return [self.get(index, stage).value for index in indices]

    def clear(self, index: int) -> None:
        """Forgets sum and manifest together."""
        self._buffers[index] = None

    def clear_all(self) -> None:
        """Forgets everything."""
        self._buffers = [None] * BUFFERS

    def manifests(self) -> tuple[BufferManifest, ...]:
        """Of all buffers that hold something."""
        return tuple(
            BufferManifest(index, frozenset(buffer.micro_batches), buffer.loss, buffer.weight)
            for index, buffer in enumerate(self._buffers)
            if buffer is not None and buffer.micro_batches
        )


NEVER: Order = (0, 0)
EARLY_LIMIT = 4096  # messages that are kept because what they are about is still to come


class WorkerState:
    """What a worker's parts share. `Worker` changes it as announcements say; what computes and what lends read it."""

    def __init__(self, name: str, compute: Compute, settings: Settings) -> None:
        self.name, self.compute, self.settings = name, compute, settings
        self.incarnation = 0
        self.stage = -1
        self.epoch = -1
        self.version = -1  # of the state
        self.step = -1  # the one under way: that of the version, or with staleness the one after it while the version's sums are reduced
        self.state: Any = None
        self.changing = False  # a state is being applied or loaded
        self.order: Order = NEVER  # of the newest announcement
        self.buffers = Buffers(compute)
        self.frozen: Round | None = None
        self.landing: Buffer | None = None  # a sum is on its way into it
        self.missing: frozenset[int] = frozenset()  # what is still to be added
        self.run_round: Round = NEVER

    @property
    def position(self) -> tuple[int, int, int]:
        """Epoch, version and stage of the state."""
        return self.epoch, self.version, self.stage

    def matches(self, message: Forward | Backward) -> bool:
        """Whether the message is about the state this worker has."""
        return (
            self.state is not None
            and self.is_own_step(message.version)
            and self.is_own_stage(message.stage)
            and self.is_own_epoch(message.epoch)
        )

    def is_own_step(self, step: int) -> bool:
        """Whether it is the one under way."""
        return step == self.step

    def is_own_stage(self, stage: int) -> bool:
        """Whether this worker has it."""
        return stage == self.stage

    def is_own_epoch(self, epoch: int) -> bool:
        """Whether it is the present one."""
        return epoch == self.epoch

    def is_early(self, message: Forward | Backward) -> bool:
        """Sent by someone who has heard more than this worker: the announcement is on its way."""
        return message.attempt.round > self.order or self.is_ahead(message)

    def is_ahead(self, message: Forward | Backward) -> bool:
        """Whether it is about a step to come."""
        return (message.epoch, message.version) > (self.epoch, self.step)

    def weights(self) -> Any:
        """What the step under way is computed with: with staleness the weights before the last step."""
        if not self.settings.staleness or self.step > self.version:
            return self.state
        return self.compute.delayed(self.state)
