"""Cost: what a plan is predicted to take. A noun: frozen, JSON round trip."""

import msgspec

__all__ = ["Cost", "MemoryUse", "StageCost"]


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes one device holds at its peak."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0  # what communication and the allocator need, the runtime's own context

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage; forward and backward are of one micro-batch on its slowest replica, collectives inside included."""

    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float  # sending one micro-batch on to the next stage
    sync_seconds: float  # gradient synchronisation among replicas, hidden or not
    busy_seconds: float  # of its busiest replica in one step
    in_flight: int  # micro-batches held at once by its busiest replica


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one plan; `breakdown` sums to `step_seconds`."""

    step_seconds: float
    samples_per_second: float
    breakdown: dict[str, float]
    stages: tuple[StageCost, ...]
    memory: dict[str, MemoryUse]  # by device
    memory_available: dict[str, float]
    link_bytes: dict[str, float]  # by link name, per step
    dollars_per_step: float = 0.0

    @property
    def over_memory(self) -> dict[str, float]:
        """Devices that would not hold their part, with the bytes they lack."""
        return {
            device: use.total_bytes - self.memory_available[device]
            for device, use in self.memory.items()
            if use.total_bytes > self.memory_available[device]
        }

    @property
    def fits(self) -> bool:
        """Whether every device holds its part."""
        return not self.over_memory
