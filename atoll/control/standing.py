"""Standing: where a worker stands — which state it has, and what it has summed of the step under way."""

from typing import Any

from atoll.control.buffers import Buffer, Buffers
from atoll.control.checks import Checks
from atoll.control.messages import Backward, Forward, Order, Round
from atoll.control.settings import Settings
from atoll.control.world import Compute

__all__ = ["NEVER", "Standing"]

NEVER: Order = (0, 0)


class Standing:
    """What a worker's parts share. `Worker` changes it as announcements say; what computes and what lends read it."""

    def __init__(self, name: str, compute: Compute, settings: Settings, checks: Checks) -> None:
        self.name = name
        self.compute = compute
        self.settings = settings
        self.checks = checks
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
        checks = self.checks
        return (
            self.state is not None
            and (message.version == self.step or not checks.version)
            and (message.stage == self.stage or not checks.stage)
            and (message.epoch == self.epoch or not checks.epoch)
        )

    def is_early(self, message: Forward | Backward) -> bool:
        """Sent by someone who has heard more than this worker: the announcement is on its way."""
        if message.attempt.round > self.order:
            return True
        return self.checks.version and (message.epoch, message.version) > (self.epoch, self.step)

    def weights(self) -> Any:
        """What the step under way is computed with: with staleness the weights before the last step."""
        if not self.settings.staleness or self.step > self.version or not self.checks.same_weights:
            return self.state
        return self.compute.delayed(self.state)
