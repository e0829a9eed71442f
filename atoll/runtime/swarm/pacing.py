"""Imposed speeds: a swarm's worker computes no faster than the cost model says its device would. For laboratories and benchmarks.

The arithmetic stays real; what is left of the modelled time is slept away, as in `atoll/runtime/lockstep/pacing.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from torch import Tensor

from atoll.cluster import load_cluster
from atoll.cost import Evaluator
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan import Replica, Stage
from atoll.runtime.swarm.compute import Contribution, StageCompute, StageState
from atoll.runtime.swarm.parcel import Parcel

__all__ = ["Imposed", "Pace", "PacedCompute"]


class Imposed(msgspec.Struct, frozen=True):
    """Whose speed a worker has."""

    file: str  # the cluster file
    device: str

    def of_number(self, number: int) -> "Imposed":
        """The device of this number on the same host."""
        return Imposed(self.file, f"{self.device.rpartition('/')[0]}/{number}")


class Pace:
    """How long forwards and backwards of every stage take at least on a device; PlanError where the file does not know it."""

    def __init__(
        self,
        imposed: Imposed,
        graph: Graph,
        bounds: Sequence[int],
        micro_batches: Sequence[tuple[int, int]],
        recompute: Sequence[bool] = (),
    ) -> None:
        cluster = load_cluster(imposed.file)
        if imposed.device not in {device.name for device in cluster.devices}:
            raise PlanError(f"{imposed.file}: speeds cannot be imposed: there is no device {imposed.device!r}")
        self._evaluator = Evaluator(graph, cluster)
        self._replica = Replica(devices=(imposed.device,), samples=(1,))
        self._bounds, self._micro_batches = bounds, micro_batches
        self._recompute = recompute or [False] * (len(bounds) - 1)

    def seconds(self, stage: int, micro_batch: int, *, backward: bool) -> float:
        """What the device needs to compute this; what is sent and received comes on top."""
        start, stop = self._micro_batches[micro_batch]
        again = self._recompute[stage]
        layers = Stage(start=self._bounds[stage], stop=self._bounds[stage + 1], replicas=(self._replica,), recompute=again)
        modelled = self._evaluator.replica_seconds(layers, self._replica, float(stop - start))
        whole = modelled.forward + modelled.backward
        share = (modelled.compute + modelled.recompute) / whole if whole else 0.0
        return share * (modelled.backward if backward else modelled.forward)


class PacedCompute(StageCompute):
    """The same numbers, not before their time. `pace` is set once, before anything is computed; None: as fast as it can."""

    pace: Pace | None = None
    _late = 0.0

    @asynccontextmanager
    async def _imposed(self, stage: int, micro_batch: int, *directions: bool) -> AsyncIterator[None]:
        """What one takes too long, since sleepers wake late, the next ones make good."""
        if self.pace is None:
            yield
            return
        seconds = sum(self.pace.seconds(stage, micro_batch, backward=backward) for backward in directions)
        due = time.perf_counter() + seconds - self._late
        yield
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._late = min(seconds, max(0.0, time.perf_counter() - due))

    async def forward(self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any) -> Parcel:
        """As `StageCompute`."""
        async with self._imposed(stage, micro_batch, False):
            return await super().forward(state, version, micro_batch, stage, entering)

    async def turn(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any
    ) -> tuple[list[Tensor], Contribution, float, float]:
        """As `StageCompute`."""
        async with self._imposed(stage, micro_batch, False, True):
            return await super().turn(state, version, micro_batch, stage, entering)

    async def backward(
        self, state: StageState, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any
    ) -> tuple[list[Tensor], Contribution]:
        """As `StageCompute`."""
        async with self._imposed(stage, micro_batch, True):
            return await super().backward(state, version, micro_batch, stage, entering, gradient)
