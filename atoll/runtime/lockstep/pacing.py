"""Imposed speeds: a rank computes no faster than the cost model says its device would. For laboratories and benchmarks.

The arithmetic stays real, so losses and weights are those of any other run; what is left of the modelled time is slept away. More devices
than the machine has cores, and devices slower than these, then behave as they would elsewhere, as long as the real work is the shorter one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from atoll.cluster import load_cluster
from atoll.cost import Evaluator
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan import Plan
from atoll.runtime.lockstep.layout import Layout, Place
from atoll.runtime.run_directory import SPEEDS

__all__ = ["Pace", "imposed_pace"]


def imposed_pace(file: str, plan: Plan, places: Sequence[Place], graph: Graph, device: torch.device) -> "Pace":
    """The pace of a rank as a cluster file has it; PlanError if the file does not know the plan's devices."""
    cluster = load_cluster(file)
    known = {one.name for one in cluster.devices}
    unknown = [name for stage in plan.stages for replica in stage.replicas for name in replica.devices if name not in known]
    if unknown:
        raise PlanError(f"{SPEEDS}={file}: speeds cannot be imposed: the plan uses {unknown[0]}, which that file does not know")
    return Pace(plan, places, Evaluator(graph, cluster), device)


class Pace:
    """How long the forwards and backwards of one rank take at least; `Executor.pace` obeys it."""

    def __init__(self, plan: Plan, places: Sequence[Place], evaluator: Evaluator, device: torch.device) -> None:
        self._evaluator, self._device = evaluator, device
        self._homes = {place.stage: (plan.stages[place.stage], plan.stages[place.stage].replicas[place.replica]) for place in places}
        self._sizes = [stop - start for start, stop in Layout(plan).micro_batches]
        self._late = 0.0

    def seconds(self, stage: int, micro_batch: int, *, backward: bool) -> float:
        """What the rank's device needs to compute this; what it sends and receives comes on top."""
        modelled = self._evaluator.replica_seconds(*self._homes[stage], self._sizes[micro_batch])
        whole = modelled.forward + modelled.backward
        share = (modelled.compute + modelled.recompute) / whole if whole else 0.0
        return share * (modelled.backward if backward else modelled.forward)

    @contextmanager
    def imposed(self, stage: int, micro_batch: int, *, backward: bool) -> Iterator[None]:
        """What happens inside takes that long. What one takes too long, since sleepers wake late, the next ones make good."""
        began = time.perf_counter()
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        due = began + self.seconds(stage, micro_batch, backward=backward) - self._late
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late = time.perf_counter() - due
