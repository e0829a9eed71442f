"""Modelled: compute that takes virtual time and computes nothing, for swarms of many peers over many hours."""

from collections.abc import Sequence
from typing import Any

from atoll.control.messages import Committed
from atoll.simulate.loop import Process

__all__ = ["ModelledCompute", "ModelledFeed"]


class ModelledCompute:
    """What `atoll.control.world.Compute` asks for. A buffer is a count of micro-batches; a state is a number of steps."""

    def __init__(self, process: Process, *, forward_seconds: float, backward_seconds: float, slowness: float = 1.0) -> None:
        self._process = process
        self._forward = forward_seconds * slowness
        self._backward = backward_seconds * slowness

    async def initial(self, stage: int) -> int:
        """No step made."""
        return 0

    async def forward(self, state: int, version: int, micro_batch: int, stage: int, entering: Any) -> None:
        """Takes its time."""
        await self._process.sleep(self._forward)

    async def turn(self, state: int, version: int, micro_batch: int, stage: int, entering: Any) -> tuple[None, int, float, float]:
        """Takes the time of both directions."""
        await self._process.sleep(self._forward + self._backward)
        return None, 1, 0.0, 1.0

    async def backward(self, state: int, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any) -> tuple[None, int]:
        """Takes its time."""
        await self._process.sleep(self._backward)
        return None, 1

    def buffer(self, stage: int) -> list[int]:
        """Nothing counted."""
        return [0]

    async def accumulate(self, buffer: list[int], contribution: int) -> None:
        """Counted with the kernel."""
        buffer[0] += contribution

    def part(self, buffers: Sequence[list[int]], stage: int, section: int, chunk: int) -> int:
        """How many."""
        return sum(buffer[0] for buffer in buffers)

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Nobody sends anything else."""
        return True

    def zero(self, stage: int, chunk: int) -> int:
        """None."""
        return 0

    def add(self, total: int, part: int) -> int:
        """Both."""
        return total + part

    def digest(self, sums: Sequence[int]) -> str:
        """The counts."""
        return str(sums[0])

    def norm_squared(self, stage: int, section: int, sums: Sequence[int]) -> float:
        """Always the same."""
        return 1.0

    async def apply(self, state: int, sums: Sequence[int], commit: Committed) -> int:
        """One step more."""
        return state + 1

    def delayed(self, state: int) -> int:
        """The same."""
        return state

    def read_chunk(self, state: int, chunk: int) -> int:
        """The number of steps."""
        return state

    async def keep(self, state: int) -> int:
        """A number."""
        return state

    def read_kept(self, kept: int, chunk: int) -> int:
        """The number of steps."""
        return kept

    def expect(self, stage: int) -> None:
        """Nothing to make ready."""

    async def assemble(self, stage: int, chunks: Sequence[int]) -> int:
        """All chunks say the same."""
        return chunks[0]

    def snapshot(self, state: int) -> int:
        """A number."""
        return state

    async def restore(self, stage: int, snapshot: int) -> int:
        """The same number."""
        return snapshot


class ModelledFeed:
    """Micro-batches of nothing."""

    async def load(self, version: int, micro_batch: int) -> None:
        """At once."""
