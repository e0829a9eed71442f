"""Layers that lanes divide: who holds what, what is exchanged, and how it compares with repeating and with tensor parallelism."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.cost import Calibration, Evaluator, cost
from atoll.cost.compute import ComputeTimes
from atoll.graph import Graph, Layer, Work, residual_network
from atoll.plan import Plan, Replica, Stage
from tests.plan.strategies import make_cluster


def classifier(classes: int = 4096, parameters: int = 1_000_000) -> Graph:
    """A small backbone and a classifier of 512 features, all of it divisible."""
    body = Layer(name="body", work=(Work(kind="memory", bytes=4e6),), parameters=10_000, output_bytes=2048.0, saved_bytes=1e5)
    product = Work(
        kind="matmul", flops=2.0 * 512 * classes, rows=1, columns=classes, depth=512, weight_bytes=4.0 * 512 * classes, split="columns"
    )
    head = Layer(
        name="head",
        work=(product,),
        parameters=parameters,
        split_parameters=parameters,
        input_bytes=2048.0,
        saved_bytes=4.0 * classes,
        split_saved_bytes=4.0 * classes,
        tensor_units=classes,
        tensor_bytes=1030.0,
        tensor_reductions=2,
    )
    return Graph.from_layers("g", [body, head])


def lanes_plan(cluster: Cluster, samples: tuple[int, ...], split: tuple[int, ...], **fields: bool) -> Plan:
    names = tuple(device.name for device in cluster.devices)[: len(samples)]
    stage = Stage(start=0, stop=2, replicas=(Replica(devices=names, samples=samples),), split=split, **fields)
    return Plan(graph="g", cluster="c", batch_size=sum(samples), micro_batch_size=sum(samples), stages=(stage,))


def test_each_lane_holds_its_part_and_need_not_exchange_it() -> None:
    cluster, graph = make_cluster(hosts=1, devices=4), classifier()
    evaluator = Evaluator(graph, cluster)
    plan = lanes_plan(cluster, (2, 2, 2, 2), (1,))
    held = evaluator.context.held(plan.stages[0], plan.stages[0].replicas[0], 0)
    assert (held.dense, held.divided) == (10_000, 250_000)
    volumes = dict(evaluator.sync_volumes(plan.stages[0]))
    assert volumes[True] == 4 * 10_000  # between lanes, the backbone alone
    assert volumes[False] == 4 * 250_000  # between replicas, of which there is one
    whole = lanes_plan(cluster, (2, 2, 2, 2), ())
    one, other = (next(iter(evaluator.memory(each).values())) for each in (plan, whole))
    assert other.parameters - one.parameters == pytest.approx(4 * 750_000)
    assert other.gradients - one.gradients == pytest.approx(4 * 750_000)
    assert other.optimizer - one.optimizer == pytest.approx(8 * 750_000)


def test_sharding_and_splitting_divide_everything_once() -> None:
    cluster, graph = make_cluster(hosts=1, devices=4), classifier()
    evaluator = Evaluator(graph, cluster)
    use = next(iter(evaluator.memory(lanes_plan(cluster, (2, 2, 2, 2), (1,), sharded=True)).values()))
    assert use.parameters == pytest.approx(4 * (10_000 + 1_000_000) / 4)


@given(st.integers(2, 8), st.integers(1, 64), st.integers(8, 5000))
def test_a_divided_layer_takes_as_long_as_under_tensor_parallelism(lanes: int, samples: int, classes: int) -> None:
    """All of its work is divisible, so it does not matter whether the samples came from elsewhere."""
    graph = classifier(classes)
    device = make_cluster(hosts=1, devices=1).devices[0]
    compute = ComputeTimes(graph, Calibration(), 16.0)
    part = -(-classes // lanes) / classes
    split = compute.table_with_split(device, float(samples), float(samples * lanes), (1,), lanes)
    tensor = compute.table(device, float(samples * lanes), part, lanes)
    assert split.forward[2] - split.forward[1] == pytest.approx(tensor.forward[2] - tensor.forward[1])
    assert split.update[2] - split.update[1] == pytest.approx(tensor.update[2] - tensor.update[1])
    whole = compute.table(device, float(samples))
    assert split.forward[1] == pytest.approx(whole.forward[1])  # the backbone sees its own samples


def test_lanes_exchange_what_tensor_parallelism_would_reduce_of_all_their_samples() -> None:
    cluster, graph = make_cluster(hosts=1, devices=4), classifier()
    evaluator = Evaluator(graph, cluster)
    names = tuple(device.name for device in cluster.devices)
    replica = Replica(devices=names, samples=(8,))
    tensor = evaluator.replica_seconds(Stage(start=0, stop=2, replicas=(replica,), tensor=4), replica, 8.0)
    split_stage = lanes_plan(cluster, (2, 2, 2, 2), (1,)).stages[0]
    split = evaluator.replica_seconds(split_stage, split_stage.replicas[0], 8.0)
    assert split.tensor == pytest.approx(tensor.tensor)


def test_the_network_carries_the_backbones_gradient_and_the_exchanges() -> None:
    cluster, graph = make_cluster(hosts=2, devices=1), classifier()
    found = cost(graph, cluster, lanes_plan(cluster, (3, 5), (1,))).link_bytes
    assert found == {"s0": pytest.approx(2 * 4 * 10_000 + 4 * 1030.0 * 8)}


def test_unequal_lanes_divide_the_layer_equally() -> None:
    cluster, graph = make_cluster(hosts=1, devices=2), classifier()
    evaluator = Evaluator(graph, cluster)
    uses = list(evaluator.memory(lanes_plan(cluster, (6, 2), (1,))).values())
    assert uses[0].parameters == uses[1].parameters
    assert uses[0].activations > uses[1].activations


@pytest.mark.parametrize("hosts", [2, 4])
def test_splitting_a_large_classifier_beats_data_parallelism_on_a_slow_network(hosts: int) -> None:
    graph = replace(residual_network(name="g", classes=100_000), name="g")
    cluster = make_cluster(hosts=hosts, devices=8)
    evaluator = Evaluator(graph, cluster, optimizer="sgd")
    names = tuple(device.name for device in cluster.devices)
    last = len(graph.layers)
    apart = tuple(Replica(devices=(name,), samples=(16,)) for name in names)
    together = (Replica(devices=names, samples=(16,) * len(names)),)
    plans = [
        Plan(graph="g", cluster="c", batch_size=16 * len(names), micro_batch_size=16 * len(names), stages=(stage,))
        for stage in (
            Stage(start=0, stop=last, replicas=apart),
            Stage(start=0, stop=last, replicas=together, split=(last - 1,)),
        )
    ]
    plain, hybrid = (evaluator.seconds(plan) for plan in plans)
    assert hybrid < plain / 2
