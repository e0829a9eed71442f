"""Unequal devices for `unequal_devices.py`: a cluster with imposed speeds, and plans of a GPT that know them or do not. Pure."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
from lockstep_models import GPT, Shape, gpt_job

import atoll
from atoll import Job
from atoll.cluster import Cluster, parse_cluster
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from atoll.planner import plan

__all__ = ["SHAPE", "Pair", "ideal_gain", "imposed_cluster", "pair_of", "plain_job"]

SHAPE = Shape(layers=16, width=64, heads=4, vocabulary=64, sequence=32, batch=32)  # little real work: most of a step is imposed
_CLUSTER = """
name = "imposed"
[[site]]
name = "here"
network = {{ bandwidth = "10 Gbit/s", latency = "100 us" }}
  [[site.host]]
  name = "h"
  devices = [{devices}]
  link = {{ bandwidth = "10 Gbit/s", latency = "100 us" }}
[[device_kind]]
name = "imposed"
memory = "8 GB"
memory_bandwidth = "400 GB/s"
flops = {{ fp32 = "2 GFLOPS" }}
"""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two plans for the same devices."""

    equal: Plan
    aware: Plan


def imposed_cluster(speeds: Sequence[int]) -> Cluster:
    """Devices on one host whose speeds are as these numbers, the fastest at its kind's rates."""
    devices = ", ".join(f'{{ kind = "imposed", speed = {speed / max(speeds):.6f} }}' for speed in speeds)
    return parse_cluster(_CLUSTER.format(devices=devices))


def ideal_gain(speeds: Sequence[int]) -> float:
    """How much faster work is that is divided by speed: with equal shares all wait for the slowest device."""
    return sum(speeds) / (len(speeds) * min(speeds))


def plain_job() -> Job:
    """The job that is trained."""
    return gpt_job(SHAPE, "imposed")


def pair_of(layout: str, speeds: Sequence[int], graph_of: Callable[[Job], Graph]) -> Pair:
    """The planner's plan of the layout (`"data"` or `"pipeline"`), and one with equal shares or stages on the same devices."""
    job, cluster = plain_job(), imposed_cluster(speeds)
    annotated = _in_replicas(len(speeds)) if layout == "data" else _in_stages(speeds)
    graph = graph_of(dataclasses.replace(job, model=annotated))
    best = plan(graph, cluster, batch_size=job.batch_size).best
    if layout == "data":
        shares = [samples for replica in best.stages[0].replicas for samples in replica.samples]
        return Pair(_data(best, [job.batch_size // len(speeds)] * len(speeds)), _data(best, shares))
    inner = [1 + SHAPE.layers * s // len(speeds) for s in range(1, len(speeds))]  # equally many blocks; the embedding is layer 0
    bounds = [0, *inner, len(graph.layers)]
    even = tuple(msgspec.structs.replace(stage, start=bounds[s], stop=bounds[s + 1]) for s, stage in enumerate(best.stages))
    return Pair(msgspec.structs.replace(best, stages=even), best)


def _data(best: Plan, shares: Sequence[int]) -> Plan:
    """Data parallel with these shares. (The planner may have sharded the optimizer's state as well; here only shares are compared.)"""
    (stage,) = best.stages
    replicas = tuple(Replica(devices=(name,), samples=(share,)) for name, share in zip(stage.devices, shares, strict=True))
    return msgspec.structs.replace(
        best, micro_batch_size=max(shares), stages=(Stage(start=stage.start, stop=stage.stop, replicas=replicas),)
    )


def _in_replicas(copies: int) -> Callable[[], GPT]:
    def build() -> GPT:
        with atoll.replica(copies):
            return GPT(SHAPE)

    return build


def _in_stages(speeds: Sequence[int]) -> Callable[[], GPT]:
    """One stage for every device: around the block in its middle if layers went by speed. Where stages begin and end is left open."""
    ends = list(accumulate(speeds))
    middles = [int(SHAPE.layers * (end - speed / 2) / ends[-1]) for end, speed in zip(ends, speeds, strict=True)]

    def build() -> GPT:
        with atoll.pipeline(micro_batches=SHAPE.batch):
            model = GPT(SHAPE)
            for middle in middles:
                atoll.stage(model.blocks[middle])
        return model

    return build
