"""Bytes on links: counted by hand for plans small enough."""

import msgspec
import pytest

from atoll.cluster import Cluster
from atoll.codec import codec_spec
from atoll.cost import Evaluator, cost
from atoll.plan import Plan, Replica, Stage
from tests.cost.cases import data_parallel, dense_graph, pipeline
from tests.plan.strategies import make_cluster


def names_of(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices]


def test_a_boundary_between_sites_carries_activations_and_gradients() -> None:
    cluster = make_cluster(hosts=1, devices=1, sites=2)
    graph = dense_graph(6, tied=False)
    found = cost(graph, cluster, pipeline([0, 3, 6], [[name] for name in names_of(cluster)], 16, 2))
    boundary = graph.layers[2]
    assert found.link_bytes == {"s0–s1": pytest.approx(16 * (boundary.output_bytes + boundary.gradient_bytes))}


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_a_codec_divides_activations_between_sites_by_its_ratio(codec: str) -> None:
    cluster = make_cluster(hosts=1, devices=1, sites=2)
    graph = dense_graph(6, tied=False)
    plan = pipeline([0, 3, 6], [[name] for name in names_of(cluster)], 16, 2)
    coded = msgspec.structs.replace(plan, codecs={"s0–s1": codec})
    ratio = codec_spec(codec).ratio(2.0)  # in half precision
    assert cost(graph, cluster, coded).link_bytes["s0–s1"] == pytest.approx(cost(graph, cluster, plan).link_bytes["s0–s1"] * ratio)


def test_sums_of_gradients_travel_as_they_are_whatever_the_codec() -> None:
    cluster = make_cluster(hosts=1, devices=1, sites=2)
    graph = dense_graph(6)
    plan = data_parallel([8, 8], names_of(cluster), 2, 6)
    coded = msgspec.structs.replace(plan, codecs={"s0–s1": "int8"})
    assert cost(graph, cluster, coded) == cost(graph, cluster, plan)


def test_gradients_of_two_replicas_cross_once_each_way() -> None:
    cluster = make_cluster(hosts=1, devices=1, sites=2)
    graph = dense_graph(6)
    found = cost(graph, cluster, data_parallel([8, 8], names_of(cluster), 2, 6))
    assert found.link_bytes["s0–s1"] == pytest.approx(2 * 4 * graph.parameters)


def test_every_group_is_counted_where_it_lives() -> None:
    """Two tensor positions: one group inside a site, one across; only the second is on the link between sites, and so are the second
    replica's own all-reduces: forward and backward, each value once each way."""
    cluster = make_cluster(hosts=2, devices=2, sites=2)
    names = names_of(cluster)
    graph = dense_graph(6)
    replicas = (Replica(devices=(names[0], names[1]), samples=(4,)), Replica(devices=(names[2], names[4]), samples=(4,)))
    plan = Plan(graph="g", cluster="c", batch_size=8, micro_batch_size=4, stages=(Stage(start=0, stop=6, tensor=2, replicas=replicas),))
    evaluator = Evaluator(graph, cluster)
    volume = evaluator.sync_volumes(plan.stages[0])[0][1]
    found = evaluator.cost(plan).link_bytes
    activations = sum(layer.tensor_bytes for layer in graph.layers) * 4
    assert found["s0–s1"] == pytest.approx(2 * volume + 2 * 2 * activations)
    assert found["s0"] == pytest.approx(2 * volume)


def test_shards_are_gathered_twice_and_scattered_once_for_every_micro_batch() -> None:
    cluster = make_cluster(hosts=2, devices=1, sites=1)
    graph = dense_graph(6)
    replica = Replica(devices=tuple(names_of(cluster)), samples=(4, 4))
    plan = Plan(
        graph="g", cluster="c", batch_size=8, micro_batch_size=4, stages=(Stage(start=0, stop=6, sharded=True, replicas=(replica,)),)
    )
    element = 4.0 if graph.precision == "fp32" else 2.0
    assert cost(graph, cluster, plan).link_bytes == {"s0": pytest.approx(2 * graph.parameters * (2 * element + 4.0))}


def test_gradients_of_a_tied_table_travel_between_the_stages_that_hold_it() -> None:
    cluster = make_cluster(hosts=1, devices=1, sites=2)
    plan = pipeline([0, 3, 6], [[name] for name in names_of(cluster)], 16, 2)
    tied, apart = (cost(graph, cluster, plan).link_bytes["s0–s1"] for graph in (dense_graph(6), dense_graph(6, tied=False)))
    (shared,) = dense_graph(6).shared
    assert tied - apart == pytest.approx(2 * 4 * shared.parameters)  # an all-reduce of two: each sends its fp32 gradient once
