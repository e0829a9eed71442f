"""Buffers: what a worker has summed in this step, and the manifest of it. The two are one object, so that they cannot part."""

from typing import Any

from atoll.control.messages import BufferManifest
from atoll.control.world import Compute

__all__ = ["BUFFERS", "Buffer", "Buffers"]

BUFFERS = 2
"""First attempts go to buffer 0; retries, which are likelier to overlap with others, to buffer 1, so that less is lost with it."""


class Buffer:
    """A sum of contributions and which micro-batches are in it."""

    __slots__ = ("value", "micro_batches", "loss", "weight")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.micro_batches: set[int] = set()
        self.loss = 0.0
        self.weight = 0.0


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
