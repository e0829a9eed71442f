"""Arithmetic: a tiny model in exact integers, so that a micro-batch too many or too few shows, and the order of addition too; and a
worker's compute in it, which takes virtual time.

A stage is two weights (its two chunks) with momentum. Its output is x·w₀ + w₁ + noise, all modulo a prime; noise and targets are
functions of (version, micro-batch, stage). A stage tied to others has two weights more, the same for all of them, added to its own.
Integers are exact in any order of addition, floats are not: so that replicas that summed in another
order are told apart, as floats would be, each number carries `rounding`, a hash of the order in which it was made.
"""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from atoll.control.clipping import clip_or_skip
from atoll.control.messages import Committed
from atoll.simulate.loop import Process

__all__ = [
    "CHUNKS",
    "MAX_NORM",
    "PRIME",
    "ExactCompute",
    "ExactFeed",
    "ExactState",
    "ExactSum",
    "Reference",
    "digest",
    "model_apply",
    "reference",
    "stable_hash",
]

PRIME = (1 << 61) - 1
CHUNKS = 2
MAX_NORM = 1.5


class ExactState(NamedTuple):
    """One chunk of a state."""

    weight: int
    momentum: int
    rounding: int
    before: int  # the weight before the last step


class ExactSum(NamedTuple):
    """One chunk of a gradient."""

    value: int
    rounding: int


def stable_hash(*numbers: int) -> int:
    """A hash that is the same in every process."""
    found = 0x9E3779B9
    for number in numbers:
        found = ((found ^ (number + 0x7F4A7C15)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) % PRIME
    return found


def initial_cells(stage: int, tied: bool = False) -> tuple[ExactState, ...]:
    """A stage before step 0."""
    weights = [stable_hash(1, owner, chunk) for owner in ((stage, -1) if tied else (stage,)) for chunk in range(CHUNKS)]
    return tuple(ExactState(weight, 0, 0, weight) for weight in weights)


@lru_cache(maxsize=65536)
def entering(version: int, micro_batch: int) -> int:
    """What stage 0 is fed."""
    return stable_hash(2, version, micro_batch)


@lru_cache(maxsize=65536)
def noise(version: int, micro_batch: int, stage: int) -> int:
    """Dropout, so to say."""
    return stable_hash(3, version, micro_batch, stage)


def forward(cells: Sequence[ExactState], version: int, micro_batch: int, stage: int, x: int) -> int:
    """What leaves the stage."""
    slope, offset = _weights(cells)
    return (x * slope + offset + noise(version, micro_batch, stage)) % PRIME


def _weights(cells: Sequence[ExactState]) -> tuple[int, int]:
    return sum(cell.weight for cell in cells[::CHUNKS]), sum(cell.weight for cell in cells[1::CHUNKS])


def backward(cells: Sequence[ExactState], x: int, gradient: int) -> tuple[int, tuple[int, int]]:
    """(gradient of what entered, contributions to the two weights; those to tied ones are the same)."""
    return gradient * _weights(cells)[0] % PRIME, (gradient * x % PRIME, gradient)


def loss_gradient(y: int, version: int, micro_batch: int) -> tuple[int, float]:
    """(gradient of the output, loss)."""
    gradient = (y - noise(version, micro_batch, -1)) % PRIME
    return gradient, float(gradient % 97)


def add(total: ExactSum, part: ExactSum) -> ExactSum:
    """The sum; its rounding depends on the order."""
    return ExactSum((total.value + part.value) % PRIME, (total.rounding * 31 + part.rounding * 17 + part.value + 1) % PRIME)


def norm_squared(values: Sequence[int]) -> float:
    """Small whole numbers, so that their sum is exact; now and then not finite."""
    return inf if values[0] % 29 == 0 else float(values[0] % 16 + values[1] % 16)


def digest(sums: Sequence[ExactSum]) -> str:
    """Of values and roundings."""
    return f"{stable_hash(*[number for each in sums for number in each]):x}"


def model_apply(cells: Sequence[ExactState], sums: Sequence[ExactSum], clip: float, skipped: bool) -> tuple[ExactState, ...]:
    """A step of momentum, in integers."""
    if skipped:
        return tuple(cell._replace(before=cell.weight) for cell in cells)
    scale = int(clip * 1024)
    found = []
    for cell, total in zip(cells, sums, strict=True):
        momentum = (3 * cell.momentum + scale * total.value) % PRIME
        found.append(ExactState((cell.weight - 5 * momentum) % PRIME, momentum, stable_hash(cell.rounding, total.rounding), cell.weight))
    return tuple(found)


class Reference:
    """The undisturbed run: weights before and gradients of every version, found one after another as they are asked for.

    With staleness s a step's gradients are those of the weights s steps before. `tied` stages share two weights.
    """

    def __init__(self, stages: int, micro_batches: int, staleness: int = 0, tied: tuple[int, ...] = ()) -> None:
        self._staleness, self._tied, self._stages, self._micro_batches = staleness, tied, stages, micro_batches
        self._states: list[tuple[tuple[ExactState, ...], ...]] = [tuple(initial_cells(stage, stage in tied) for stage in range(stages))]
        self._gradients: list[tuple[tuple[int, ...], ...]] = []
        self._commits: list[tuple[float, bool, float]] = []

    def weights(self, version: int, stage: int) -> tuple[tuple[int, int], ...]:
        """(weight, momentum) of each chunk."""
        self._reach(version)
        return tuple((cell.weight, cell.momentum) for cell in self._states[version][stage])

    def gradient(self, version: int, stage: int) -> tuple[int, ...]:
        """Over all micro-batches, each once; of a tied stage also those of what it shares."""
        self._reach(version + 1)
        return self._gradients[version][stage]

    def commit(self, version: int) -> tuple[float, bool, float]:
        """(clip factor, skipped, loss)."""
        self._reach(version + 1)
        return self._commits[version]

    def _reach(self, version: int) -> None:
        while len(self._states) <= version:
            self._step(len(self._states) - 1)

    def _step(self, version: int) -> None:
        states = self._states[version]
        seen = self._states[max(0, version - self._staleness)]
        totals = [[0] * CHUNKS for _ in range(self._stages)]
        loss = 0.0
        for micro_batch in range(self._micro_batches):
            inputs = [entering(version, micro_batch)]
            for stage in range(self._stages):
                inputs.append(forward(seen[stage], version, micro_batch, stage, inputs[-1]))
            gradient, one_loss = loss_gradient(inputs[-1], version, micro_batch)
            loss += one_loss
            for stage in reversed(range(self._stages)):
                gradient, contribution = backward(seen[stage], inputs[stage], gradient)
                for chunk in range(CHUNKS):
                    totals[stage][chunk] = (totals[stage][chunk] + contribution[chunk]) % PRIME
        shared = tuple(sum(totals[stage][chunk] for stage in self._tied) % PRIME for chunk in range(CHUNKS))
        norms = [norm_squared(each) for each in (*totals, *([shared] if self._tied else []))]
        clip, skipped = clip_or_skip(norms, float(self._micro_batches), MAX_NORM)
        gradients = tuple((*total, *(shared if stage in self._tied else ())) for stage, total in enumerate(totals))
        self._gradients.append(gradients)
        self._commits.append((clip, skipped, loss))
        self._states.append(
            tuple(
                model_apply(states[stage], [ExactSum(value, 0) for value in gradients[stage]], clip, skipped)
                for stage in range(self._stages)
            )
        )


@lru_cache(maxsize=64)
def reference(stages: int, micro_batches: int, staleness: int = 0, tied: tuple[int, ...] = ()) -> Reference:
    """The undisturbed run of a shape, shared by all seeds."""
    return Reference(stages, micro_batches, staleness, tied)


def commit_matches(record: Committed, expected: tuple[float, bool, float], micro_batches: int) -> bool:
    """Whether a commit says of clip, skip, loss and weight what the undisturbed run says."""
    return (record.clip, record.skipped, record.loss, record.weight) == (*expected, float(micro_batches))


def values(sums: Sequence[Any]) -> tuple[int, ...]:
    """Without roundings."""
    return tuple(each.value for each in sums)


class ExactCompute:
    """What `atoll.control.world.Compute` asks for. `slowness` multiplies what kernels take; `on_digest` hears of every reduced gradient."""

    def __init__(
        self,
        process: Process,
        randomness: random.Random,
        on_digest: Callable[[str, Sequence[ExactSum]], None] | None = None,
        tied: tuple[int, ...] = (),
    ) -> None:
        self._tied, self._process, self._random, self._on_digest = tied, process, randomness, on_digest
        self.slowness = 1.0
        self.forward_seconds = 0.4
        self.backward_seconds = 0.8
        self.landing_seconds = 0.2

    async def initial(self, stage: int) -> tuple[ExactState, ...]:
        """Before step 0."""
        return initial_cells(stage, stage in self._tied)

    async def forward(self, state: Any, version: int, micro_batch: int, stage: int, entering: int) -> int:
        """One kernel."""
        await self._process.sleep(self.forward_seconds * self.slowness)
        return forward(state, version, micro_batch, stage, entering)

    async def turn(self, state: Any, version: int, micro_batch: int, stage: int, entering: int) -> tuple[int, Any, float, float]:
        """Forward, loss and backward."""
        await self._process.sleep((self.forward_seconds + self.backward_seconds) * self.slowness)
        leaving = forward(state, version, micro_batch, stage, entering)
        gradient, loss = loss_gradient(leaving, version, micro_batch)
        back, contribution = backward(state, entering, gradient)
        return back, contribution, loss, 1.0

    async def backward(
        self, state: Any, version: int, micro_batch: int, stage: int, entering: int, gradient: int
    ) -> tuple[int, tuple[int, int]]:
        """One kernel."""
        await self._process.sleep(self.backward_seconds * self.slowness)
        return backward(state, entering, gradient)

    def buffer(self, stage: int) -> list[ExactSum]:
        """Nothing summed."""
        return [ExactSum(0, 0)] * (CHUNKS * (1 + (stage in self._tied)))

    async def accumulate(self, buffer: list[ExactSum], contribution: tuple[int, int]) -> None:
        """The sum lands a little later, as an asynchronous kernel's does; now and then much later."""
        late = 1.0 if self._random.random() < 0.9 else 15.0
        await self._process.sleep(self.landing_seconds * late * self.slowness)
        for place in range(len(buffer)):
            buffer[place] = add(buffer[place], ExactSum(contribution[place % CHUNKS], 0))

    def part(self, buffers: Sequence[list[ExactSum]], stage: int, section: int, chunk: int) -> ExactSum:
        """One chunk of the sum of buffers."""
        place = section * CHUNKS + chunk
        total = buffers[0][place] if buffers else ExactSum(0, 0)
        for buffer in buffers[1:]:
            total = add(total, buffer[place])
        return total

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Two whole numbers."""
        return isinstance(part, ExactSum)

    def zero(self, stage: int, chunk: int) -> ExactSum:
        """A sum of no parts."""
        return ExactSum(0, 0)

    def add(self, total: ExactSum, part: ExactSum) -> ExactSum:
        """In the order of arrival."""
        return add(total, part)

    def digest(self, sums: Sequence[ExactSum]) -> str:
        """Of values and order."""
        found = digest(sums)
        if self._on_digest is not None:
            self._on_digest(found, sums)
        return found

    def norm_squared(self, stage: int, section: int, sums: Sequence[ExactSum]) -> float:
        """Exact."""
        return norm_squared(values(sums))

    async def apply(self, state: Any, sums: Sequence[ExactSum], commit: Committed) -> tuple[ExactState, ...]:
        """The optimizer's step."""
        await self._process.sleep(0.1 * self.slowness)
        return model_apply(state, sums, commit.clip, commit.skipped)

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
        return entering(version, micro_batch)
