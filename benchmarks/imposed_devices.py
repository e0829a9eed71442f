"""Devices of an imposed speed for benchmarks in a lab: as fast as makes a micro-batch take so long, so that many overlap on few cores."""

from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.cluster import dump_cluster, parse_cluster
from atoll.cluster.cluster import Cluster
from atoll.graph import Graph
from atoll.runtime.imposed_speed import Imposed, pace_of_worker

__all__ = ["imposed", "speed_for"]

_KIND = """
[[device_kind]]
name = "imposed"
memory = "4 GB"
memory_bandwidth = "1000 GB/s"
flops = {{ fp32 = "{flops:.6g} FLOPS" }}
"""


def imposed(sites: str, flops: float) -> Cluster:
    """A cluster file's sites and links, whose devices are of kind `imposed`, with that kind."""
    return parse_cluster(sites + _KIND.format(flops=flops))


def speed_for(
    seconds: float, graph: Graph, bounds: Sequence[int], samples: int, device: str, cluster: Callable[[float], Cluster], file: Path
) -> float:
    """The FLOPS at which forward and backward of so many samples take so long, on average over the stages. `file` is written to."""
    flops, stages = 1e9, range(len(bounds) - 1)
    for _ in range(3):  # time is not quite proportional
        file.write_text(dump_cluster(cluster(flops)))
        pace = pace_of_worker(Imposed(str(file), device), graph, bounds, [(0, samples)])
        taken = sum(pace.seconds(stage, 0, backward=back) for stage in stages for back in (False, True)) / len(stages)
        flops *= taken / seconds
    return flops
