"""Imposed speeds: a device computes no faster than the cost model says another would. For laboratories and benchmarks.

The arithmetic stays real, so losses and weights are those of any other run; what is left of the modelled time is slept away. More devices
than the machine has cores, and devices slower than these, then behave as they would elsewhere, as long as the real work is the shorter one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch

from atoll.cluster import load_cluster
from atoll.cluster.cluster import Cluster
from atoll.cost import Evaluator
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.run_directory import SPEEDS

__all__ = ["Imposed", "Pace", "pace_of_rank", "pace_of_worker"]


class Imposed(msgspec.Struct, frozen=True):
    """Whose speed a worker has."""

    file: str  # the cluster file
    device: str

    def of_number(self, number: int) -> "Imposed":
        """The device of this number on the same host."""
        return Imposed(self.file, f"{self.device.rpartition('/')[0]}/{number}")


class Pace:
    """How long forwards and backwards take at least, on the replica that stands for each stage; `micro_batches` are how many samples."""

    def __init__(
        self,
        evaluator: Evaluator,
        stages: Mapping[int, tuple[Stage, Replica]],
        micro_batches: Sequence[int],
        device: torch.device,
    ) -> None:
        self._evaluator, self._stages, self._micro_batches, self._device = evaluator, stages, micro_batches, device
        self._late = 0.0

    def seconds(self, stage: int, micro_batch: int, *, backward: bool) -> float:
        """What the device needs to compute this; what is sent and received comes on top."""
        modelled = self._evaluator.replica_seconds(*self._stages[stage], float(self._micro_batches[micro_batch]))
        whole = modelled.forward + modelled.backward
        share = (modelled.compute + modelled.recompute) / whole if whole else 0.0
        return share * (modelled.backward if backward else modelled.forward)

    @contextmanager
    def imposed(self, stage: int, micro_batch: int, *directions: bool) -> Iterator[None]:
        """What happens inside, forward (False) or backward (True) or both, takes that long.

        What one takes too long, since sleepers wake late, the next one makes good.
        """
        seconds = sum(self.seconds(stage, micro_batch, backward=backward) for backward in directions)
        due = time.perf_counter() + seconds - self._late
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late = min(seconds, max(0.0, time.perf_counter() - due))


def pace_of_rank(file: str, plan: Plan, replicas: Mapping[int, int], sizes: Sequence[int], graph: Graph, device: torch.device) -> Pace:
    """That of a rank which is in one replica of each of some stages; PlanError if the cluster file does not know the plan's devices."""
    named = [name for stage in plan.stages for replica in stage.replicas for name in replica.devices]
    cluster = _knowing(file, named, f"{SPEEDS}={file}: speeds cannot be imposed: the plan uses {{}}, which that file does not know")
    stages = {stage: (plan.stages[stage], plan.stages[stage].replicas[replica]) for stage, replica in replicas.items()}
    return Pace(Evaluator(graph, cluster), stages, sizes, device)


def pace_of_worker(
    imposed: Imposed,
    graph: Graph,
    bounds: Sequence[int],
    micro_batches: Sequence[tuple[int, int]],
    recompute: Sequence[bool] = (),
    device: torch.device | None = None,
) -> Pace:
    """That of a device which may have any of the stages between bounds; PlanError where the cluster file does not know it."""
    cluster = _knowing(imposed.file, [imposed.device], f"{imposed.file}: speeds cannot be imposed: there is no device '{{}}'")
    replica, again = Replica(devices=(imposed.device,), samples=(1,)), recompute or [False] * (len(bounds) - 1)
    stages = {
        stage: (Stage(start=bounds[stage], stop=bounds[stage + 1], replicas=(replica,), recompute=again[stage]), replica)
        for stage in range(len(bounds) - 1)
    }
    return Pace(Evaluator(graph, cluster), stages, [stop - start for start, stop in micro_batches], device or torch.device("cpu"))


def _knowing(file: str, devices: Sequence[str], sentence: str) -> Cluster:
    cluster = load_cluster(file)
    known = {device.name for device in cluster.devices}
    unknown = [name for name in devices if name not in known]
    if unknown:
        raise PlanError(sentence.format(unknown[0]))
    return cluster
