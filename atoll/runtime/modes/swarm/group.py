"""Group: several devices of a host that work in lockstep on each micro-batch, so that to the swarm they are one, stronger worker.

Every device has a copy of the stage and computes some of the micro-batch's samples; outputs are joined, gradients and losses added. The
numbers are those of one device, up to the order of sums, and so are random numbers (`runtime/stage/row_draws.py`). Optimizer, sums
and states belong to the first device; the others follow its weights. A stage whose samples cannot be taken apart is computed whole, by
the first device: some are known by their operators, the rest by a trial with the first micro-batch of each size, which is computed both
ways.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.control.messages import Committed
from atoll.runtime.activations import Activations, activations_of
from atoll.runtime.executor import WorkItem
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.swarm.compute import Contribution, DividedJob, StageCompute, StageState, programs_of
from atoll.runtime.modes.swarm.micro_batches import Pieces, Range, divided
from atoll.runtime.stage.module import StageModule
from atoll.runtime.stage.rng import Draw
from atoll.runtime.stage.row_draws import Rows, draws_by_rows, why_rows_cannot_draw

__all__ = ["GroupCompute", "Lane"]

Turned = tuple[list[Tensor], Contribution, float, float]
Result = TypeVar("Result")
_TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "bf16-true": 3e-2, "fp16": 1e-2}


class Lane(StageCompute):
    """One device of a group: computes its pieces of micro-batches, with the weights of the group's first device."""

    def __init__(self, whole: DividedJob, pieces: Sequence[Range], device: torch.device) -> None:
        super().__init__(replace(whole, micro_batches=pieces, chunks=1, staleness=0), device)
        self._wholes, self._rows = whole.micro_batches, Rows()
        self._drawing = nullcontext()  # every draw holds the lock by itself, so that devices do not wait for each other's whole stage
        self._copy: StageState | None = None
        self._copied = -1

    def piece(self, micro_batch: int) -> Range:
        """Its samples of a micro-batch, counted from the first of that."""
        start, stop = self._micro_batches[micro_batch]
        return start - self._wholes[micro_batch][0], stop - self._wholes[micro_batch][0]

    async def follow(self, stage: int, leader: StageState) -> StageState:
        """A copy of the leader's state. Weights on the same device are the leader's own."""
        if fresh := self._copied != stage:
            self._copy, self._copied = await self.initial(stage), stage
        assert self._copy is not None
        copy = self._copy
        await self._run(lambda: self._take_weights(copy, leader, fresh))
        return copy

    def _take_weights(self, copy: StageState, leader: StageState, fresh: bool) -> None:
        updater = copy.executor.updater
        updater.optimizer = updater.scheduler = None
        updater.scale = leader.executor.scale
        own, theirs = copy.module, leader.module.parameters_by_name()
        if copy.parameters is leader.parameters:
            return
        copy.executor.forget()  # forwards with other weights; those of a step before the last are never asked for
        with torch.no_grad():
            if all(parameter.device == self._device for parameter in theirs.values()):
                own.share_parameters(theirs)
                updater.parameters = leader.parameters
            else:
                for name, parameter in own.parameters_by_name().items():
                    if fresh or parameter.requires_grad:
                        parameter.copy_(theirs[name])
            for name, buffer in own.buffers_by_name().items():
                buffer.copy_(leader.module.buffers_by_name()[name])

    def _adapt(self, module: StageModule, stage: int) -> None:
        draw = Draw(self._key, self._device)
        draws_by_rows(module, self._programs[stage], self._sizes, draw, self._rows, self._generators)

    def _work(self, version: int, micro_batch: int, stage: int) -> WorkItem:
        """Random numbers are keyed by the whole micro-batch."""
        start, stop = self._micro_batches[micro_batch]
        return WorkItem(stage, version + 1, micro_batch, self._wholes[micro_batch][0], stop - start)

    def _turn_to(self, work: WorkItem) -> None:
        first, stop = self._wholes[work.micro_batch]
        self._rows.start, self._rows.total = self.piece(work.micro_batch)[0], stop - first


class GroupCompute:
    """What `atoll.control.Worker` computes with where a worker has several devices.

    Samples are divided in proportion to `shares`, equally if not given. `say` is told once where a stage cannot be divided.
    """

    def __init__(
        self,
        job: DividedJob,
        devices: Sequence[torch.device],
        shares: Sequence[int] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._whole = whole = StageCompute(job, devices[0])
        rows = divided(job.micro_batches, shares or [1] * len(devices))
        self._lanes = [Lane(job, pieces, device) for device, pieces in zip(devices, rows, strict=True)]
        self._wholes, self._divided, self._say = job.micro_batches, rows, say
        programs = programs_of(job.captured, job.bounds)
        self._pieces = Pieces(job.captured, programs)
        self._why_not = [
            self._pieces.why_not(stage) or why_rows_cannot_draw(program, self._pieces.sizes) for stage, program in enumerate(programs)
        ]
        self._tolerance = _TOLERANCES[job.job.precision]
        self._tried: set[tuple[int, int]] = set()  # stage and samples of a micro-batch that was computed both ways
        self._told: set[int] = set()
        self._copies: list[StageState] = []
        self._followed: StageState | None = None  # whose weights the lanes have
        # what belongs to the first device
        self.initial, self.expect, self.assemble, self.restore = whole.initial, whole.expect, whole.assemble, whole.restore
        self.read_chunk, self.snapshot, self.delayed = whole.read_chunk, whole.snapshot, whole.delayed
        self.keep, self.read_kept = whole.keep, whole.read_kept
        self.buffer, self.accumulate = whole.buffer, whole.accumulate
        self.part, self.fits, self.zero, self.add = whole.part, whole.fits, whole.zero, whole.add
        self.digest, self.norm_squared = whole.digest, whole.norm_squared

    def impose(self, pace: Callable[[int, Sequence[Range]], Pace]) -> None:
        """Lets every device be no faster than the pace of its number for its samples of each micro-batch. Before anything is computed."""
        self._whole.pace = pace(0, self._wholes)
        for number, (lane, pieces) in enumerate(zip(self._lanes, self._divided, strict=True)):
            lane.pace = pace(number, pieces)

    def close(self) -> None:
        """Ends the threads."""
        for compute in (self._whole, *self._lanes):
            compute.close()

    async def apply(self, state: StageState, sums: Sequence[Tensor], commit: Committed) -> StageState:
        """As `StageCompute`; the other devices take the new weights when they are next used."""
        self._followed = None
        return await self._whole.apply(state, sums, commit)

    async def forward(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any) -> Activations:
        """As `StageCompute`, by all devices."""
        parcel = activations_of(entering)

        async def together() -> Activations:
            def one(lane: Lane, copy: StageState, piece: Range) -> Awaitable[Activations]:
                return lane.forward(copy, version, micro_batch, stage, self._pieces.parcel(stage, parcel, piece))

            return self._pieces.leaving(stage, parcel, await self._each(state, stage, micro_batch, one))

        def alone() -> Awaitable[Activations]:
            return self._whole.forward(state, version, micro_batch, stage, parcel)

        return await self._tried_first(stage, micro_batch, alone, together, lambda made: made.values)

    async def turn(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any) -> Turned:
        """As `StageCompute`, by all devices."""
        parcel = activations_of(entering)

        async def together() -> Turned:
            def one(lane: Lane, copy: StageState, piece: Range) -> Awaitable[Turned]:
                return lane.turn(copy, version, micro_batch, stage, self._pieces.parcel(stage, parcel, piece))

            made = await self._each(state, stage, micro_batch, one)
            back = self._pieces.gradients_back(stage, [piece[0] for piece in made])
            return back, self._added([piece[1] for piece in made]), sum(piece[2] for piece in made), sum(piece[3] for piece in made)

        def alone() -> Awaitable[Turned]:
            return self._whole.turn(state, version, micro_batch, stage, parcel)

        return await self._tried_first(stage, micro_batch, alone, together, lambda made: [*made[0], torch.tensor(made[2:])])

    async def backward(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any
    ) -> tuple[list[Tensor], Contribution]:
        """As `StageCompute`, by all devices."""
        if self._why_not[stage] is not None:
            return await self._whole.backward(state, version, micro_batch, stage, entering, gradient)
        parcel = activations_of(entering)

        def one(lane: Lane, copy: StageState, piece: Range) -> Awaitable[tuple[list[Tensor], Contribution]]:
            part, given = self._pieces.parcel(stage, parcel, piece), self._pieces.gradients(stage, gradient, piece)
            return lane.backward(copy, version, micro_batch, stage, part, given)

        made = await self._each(state, stage, micro_batch, one)
        return self._pieces.gradients_back(stage, [piece[0] for piece in made]), self._added([piece[1] for piece in made])

    async def _each(
        self, state: StageState, stage: int, micro_batch: int, one: Callable[[Lane, StageState, Range], Awaitable[Result]]
    ) -> list[Result]:
        """What every device with a piece of the micro-batch makes of it."""
        if self._followed is not state:
            self._copies = [await lane.follow(stage, state) for lane in self._lanes]
            self._followed = state
        working = [(lane, copy, lane.piece(micro_batch)) for lane, copy in zip(self._lanes, self._copies, strict=True)]
        return list(await asyncio.gather(*(one(lane, copy, piece) for lane, copy, piece in working if piece[0] < piece[1])))

    async def _tried_first(
        self,
        stage: int,
        micro_batch: int,
        alone: Callable[[], Awaitable[Result]],
        together: Callable[[], Awaitable[Result]],
        numbers: Callable[[Result], Sequence[Tensor]],
    ) -> Result:
        """By all devices where that gives the numbers of one; the first micro-batch of each size is computed both ways."""
        if self._why_not[stage] is not None:
            self._tell(stage)
            return await alone()
        start, stop = self._wholes[micro_batch]
        size = stop - start
        if (stage, size) in self._tried:
            return await together()
        expected = await alone()
        try:
            found = await together()
        except RuntimeError as error:  # PyTorch's, for a size some operator was not captured for
            self._why_not[stage] = f"a part of {size} samples by itself fails: {str(error).splitlines()[0]}"
        else:
            self._tried.add((stage, size))
            agree = _agree(numbers(expected), numbers(found), self._tolerance)
            if agree and not self._whole.loss_is_mean:
                return found
            mean = "its loss is a mean, in which later samples may count differently; return (total, weight) to have it divided"
            self._why_not[stage] = mean if agree else f"{size} samples in parts give other numbers than together"
        self._tell(stage)
        return expected

    def _tell(self, stage: int) -> None:
        if stage not in self._told:
            self._told.add(stage)
            self._say(f"stage {stage} is computed by one of the {len(self._lanes)} devices: {self._why_not[stage]}")

    @staticmethod
    def _added(parts: Sequence[Contribution]) -> Contribution:
        """Where the first device has its sums."""
        return [_total([given for given in row if given is not None]) for row in zip(*parts, strict=True)]


def _total(given: Sequence[Tensor]) -> Tensor | None:
    if not given:
        return None
    total = given[0]
    for other in given[1:]:
        total = total + other.to(total.device)
    return total


def _agree(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float) -> bool:
    """Whether numbers are equal but for rounding, each tensor by its own largest."""
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape:
            return False
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
            continue
        finite = one.isfinite()
        largest = float(one[finite].abs().max()) if bool(finite.any()) else 0.0
        if not torch.allclose(one, other, rtol=0.0, atol=tolerance * largest, equal_nan=True):
            return False
    return True
