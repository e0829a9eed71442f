"""Bucket sizes: between what leaves most to wait for and what wastes most on latency."""

import pytest

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator
from atoll.cost.evaluate import DEFAULT_BUCKET_BYTES, bucket_bytes
from atoll.graph import Graph, dense_transformer
from atoll.plan import Plan, Replica, Stage


def cluster(network: str, latency: str) -> Cluster:
    return make_cluster("c", [make_site("here", kind="A100-80GB", hosts=4, devices=1, network=network, latency=latency)])


def model() -> Graph:
    return dense_transformer(name="m", layers=8, hidden=1024, heads=16, sequence=512, vocabulary=32000)


def data_parallel(graph: Graph, devices: list[str]) -> Plan:
    replicas = tuple(Replica(devices=(name,), samples=(4,)) for name in devices)
    stage = Stage(start=0, stop=len(graph.layers), replicas=replicas)
    return Plan(graph=graph.name, cluster="c", batch_size=4 * len(devices), micro_batch_size=4, stages=(stage,))


def size(network: str, latency: str) -> int:
    graph, here = model(), cluster(network, latency)
    return bucket_bytes(Evaluator(graph, here), data_parallel(graph, [device.name for device in here.devices]))


@pytest.mark.parametrize(("quick", "slow"), [("1 us", "1 ms"), ("10 us", "10 ms")])
def test_long_latency_asks_for_larger_buckets(quick: str, slow: str) -> None:
    assert size("10 Gbit/s", quick) < size("10 Gbit/s", slow)


def test_a_narrow_link_asks_for_smaller_ones() -> None:
    assert size("100 Mbit/s", "100 us") < size("100 Gbit/s", "100 us")


def test_one_device_synchronises_nothing() -> None:
    graph, here = model(), cluster("10 Gbit/s", "10 us")
    assert bucket_bytes(Evaluator(graph, here), data_parallel(graph, [here.devices[0].name])) == DEFAULT_BUCKET_BYTES
