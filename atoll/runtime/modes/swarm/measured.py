"""Measured: what workers of a swarm say of themselves, as it stands in the run's directory. Read without PyTorch."""

import msgspec

from atoll.control.settings import BACKWARD_WORK
from atoll.runtime.run_directory import RunDirectory

__all__ = ["MEMBERS", "KernelTimes", "Measured", "read_members"]

MEMBERS = "measured/swarm.json"


class KernelTimes(msgspec.Struct):
    """What a worker computed on one stage. The last stage does forward and backward in one, a turn."""

    forwards: int = 0
    forward_seconds: float = 0.0
    backwards: int = 0
    backward_seconds: float = 0.0
    turns: int = 0
    turn_seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """One more kernel, by what it counts as."""
        if work > BACKWARD_WORK:
            self.turns, self.turn_seconds = self.turns + 1, self.turn_seconds + seconds
        elif work == BACKWARD_WORK:
            self.backwards, self.backward_seconds = self.backwards + 1, self.backward_seconds + seconds
        else:
            self.forwards, self.forward_seconds = self.forwards + 1, self.forward_seconds + seconds


class Measured(msgspec.Struct, kw_only=True):
    """What one worker says of itself, from its start until now."""

    seconds: float = 0.0  # since it was connected
    kernels: dict[int, KernelTimes] = msgspec.field(default_factory=dict)  # by stage
    received_bytes: dict[str, int] = msgspec.field(default_factory=dict)  # by peer
    received_bytes_per_s: dict[str, float] = msgspec.field(default_factory=dict)  # by peer, while something was on its way
    round_trip_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    state_bytes: int = 0  # of the first state it had
    state_seconds: float | None = None  # from being connected until it had a state
    work_seconds: float | None = None  # and until its first kernel was done


def read_members(directory: RunDirectory) -> dict[str, Measured]:
    """What was written; empty where nothing readable is."""
    try:
        return msgspec.json.decode((directory.path / MEMBERS).read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.DecodeError):
        return {}
