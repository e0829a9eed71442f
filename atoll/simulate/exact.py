"""Exact: the compute of a simulated worker in the integers of `arithmetic`, taking virtual time."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from atoll.control.messages import Committed
from atoll.simulate import arithmetic
from atoll.simulate.arithmetic import CHUNKS, ExactState, ExactSum
from atoll.simulate.loop import Process

__all__ = ["ExactCompute", "ExactFeed"]


class ExactCompute:
    """What `atoll.control.world.Compute` asks for. `slowness` multiplies what kernels take; `on_digest` hears of every reduced gradient."""

    def __init__(
        self,
        process: Process,
        randomness: random.Random,
        on_digest: Callable[[str, Sequence[ExactSum]], None] | None = None,
        tied: tuple[int, ...] = (),
    ) -> None:
        self._tied = tied
        self._process = process
        self._random = randomness
        self._on_digest = on_digest
        self.slowness = 1.0
        self.forward_seconds = 0.4
        self.backward_seconds = 0.8
        self.landing_seconds = 0.2

    async def initial(self, stage: int) -> tuple[ExactState, ...]:
        """Before step 0."""
        return arithmetic.initial_cells(stage, stage in self._tied)

    async def forward(self, state: Any, version: int, micro_batch: int, stage: int, entering: int) -> int:
        """One kernel."""
        await self._process.sleep(self.forward_seconds * self.slowness)
        return arithmetic.forward(state, version, micro_batch, stage, entering)

    async def turn(self, state: Any, version: int, micro_batch: int, stage: int, entering: int) -> tuple[int, Any, float, float]:
        """Forward, loss and backward."""
        await self._process.sleep((self.forward_seconds + self.backward_seconds) * self.slowness)
        leaving = arithmetic.forward(state, version, micro_batch, stage, entering)
        gradient, loss = arithmetic.loss_gradient(leaving, version, micro_batch)
        back, contribution = arithmetic.backward(state, entering, gradient)
        return back, contribution, loss, 1.0

    async def backward(
        self, state: Any, version: int, micro_batch: int, stage: int, entering: int, gradient: int
    ) -> tuple[int, tuple[int, int]]:
        """One kernel."""
        await self._process.sleep(self.backward_seconds * self.slowness)
        return arithmetic.backward(state, entering, gradient)

    def buffer(self, stage: int) -> list[ExactSum]:
        """Nothing summed."""
        return [ExactSum(0, 0)] * (CHUNKS * (1 + (stage in self._tied)))

    async def accumulate(self, buffer: list[ExactSum], contribution: tuple[int, int]) -> None:
        """The sum lands a little later, as an asynchronous kernel's does; now and then much later."""
        late = 1.0 if self._random.random() < 0.9 else 15.0
        await self._process.sleep(self.landing_seconds * late * self.slowness)
        for place in range(len(buffer)):
            buffer[place] = arithmetic.add(buffer[place], ExactSum(contribution[place % CHUNKS], 0))

    def part(self, buffers: Sequence[list[ExactSum]], stage: int, section: int, chunk: int) -> ExactSum:
        """One chunk of the sum of buffers."""
        place = section * CHUNKS + chunk
        total = buffers[0][place] if buffers else ExactSum(0, 0)
        for buffer in buffers[1:]:
            total = arithmetic.add(total, buffer[place])
        return total

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Two whole numbers."""
        return isinstance(part, ExactSum)

    def zero(self, stage: int, chunk: int) -> ExactSum:
        """A sum of no parts."""
        return ExactSum(0, 0)

    def add(self, total: ExactSum, part: ExactSum) -> ExactSum:
        """In the order of arrival."""
        return arithmetic.add(total, part)

    def digest(self, sums: Sequence[ExactSum]) -> str:
        """Of values and order."""
        found = arithmetic.digest(sums)
        if self._on_digest is not None:
            self._on_digest(found, sums)
        return found

    def norm_squared(self, stage: int, section: int, sums: Sequence[ExactSum]) -> float:
        """Exact."""
        return arithmetic.norm_squared(arithmetic.values(sums))

    async def apply(self, state: Any, sums: Sequence[ExactSum], commit: Committed) -> tuple[ExactState, ...]:
        """The optimizer's step."""
        await self._process.sleep(0.1 * self.slowness)
        return arithmetic.model_apply(state, sums, commit.clip, commit.skipped)

    def delayed(self, state: Any) -> tuple[ExactState, ...]:
        """With the weights before the last step."""
        return tuple(cell._replace(weight=cell.before) for cell in state)

    def read_chunk(self, state: Any, chunk: int) -> tuple[ExactState, ...]:
        """Weights and momentum, the stage's own and what it shares."""
        return tuple(state[chunk::CHUNKS])

    async def keep(self, state: Any) -> Any:
        """States here never change."""
        await self._process.sleep(0.1 * self.slowness)
        return state

    def read_kept(self, kept: Any, chunk: int) -> tuple[ExactState, ...]:
        """As of the state."""
        return self.read_chunk(kept, chunk)

    def expect(self, stage: int) -> None:
        """Nothing to make ready."""

    async def assemble(self, stage: int, chunks: Sequence[tuple[ExactState, ...]]) -> tuple[ExactState, ...]:
        """The state."""
        await self._process.sleep(0.1 * self.slowness)
        return tuple(cell for cells in zip(*chunks, strict=True) for cell in cells)

    def snapshot(self, state: Any) -> Any:
        """States here never change."""
        return state

    async def restore(self, stage: int, snapshot: Any) -> Any:
        """The state."""
        return snapshot


class ExactFeed:
    """The data of the tiny model."""

    async def load(self, version: int, micro_batch: int) -> int:
        """A number."""
        return arithmetic.entering(version, micro_batch)
