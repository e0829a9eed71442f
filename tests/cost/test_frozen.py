"""What frozen parameters cost in a plan, with figures by hand."""

import msgspec
import pytest

from atoll.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.cost import Cost, cost
from atoll.graph import Graph, Layer, SharedParameter, Work
from atoll.plan import Plan, Replica, Stage

BATCH = 4
TRAINED, FROZEN = 1_000, 100_000  # of a layer


def layer(name: str, *, flows: bool = True, **given: object) -> Layer:
    trained = TRAINED if flows else 0
    weights = 4.0 * FROZEN
    work = Work(kind="matmul", flops=1e6, weight_bytes=weights, rows=1, columns=100, depth=1000, backward=1.0 if flows else 0.0)
    fields = {"parameters": trained, "frozen_parameters": FROZEN, "frozen_bytes": weights, "work": (work,), "output_bytes": 100.0}
    return Layer(name=name, **{**fields, **given})  # type: ignore[arg-type]


def graph(*layers: Layer, **given: object) -> Graph:
    return msgspec.structs.replace(Graph.from_layers("g", layers), **given)  # type: ignore[arg-type]


def cluster() -> Cluster:
    kind = DeviceKind(name="k", cpu=True, memory_bytes=1e9, flops={"fp32": 1e11, "bf16": 1e11}, memory_bytes_per_s=1e10)
    devices = tuple(Device(name=name, kind=kind, host="h", site="s", memory_bytes=1e9) for name in "ab")
    link = Link(between=("h", "h"), bytes_per_s=1e9, latency_s=1e-5)
    host = Host(name="h", site="s", devices=devices, link=link)
    return Cluster(name="c", sites=(Site(name="s", hosts=(host,), link=msgspec.structs.replace(link, between=("s", "s"))),))


def together(model: Graph, **given: object) -> Cost:
    """Both devices in one stage."""
    replica = Replica(devices=("a", "b"), samples=(BATCH,) if "tensor" in given else (BATCH // 2, BATCH // 2))
    stage = Stage(start=0, stop=len(model.layers), replicas=(replica,), **given)  # type: ignore[arg-type]
    return cost(model, cluster(), Plan(graph="g", cluster="c", batch_size=BATCH, micro_batch_size=BATCH, stages=(stage,)))


def apart(model: Graph, cut: int, mode: str = "lockstep", staleness: int = 0) -> Cost:
    """A stage for each device."""
    bounds = [(0, cut, "a"), (cut, len(model.layers), "b")]
    stages = tuple(Stage(start=a, stop=b, replicas=(Replica(devices=(name,), samples=(BATCH,)),)) for a, b, name in bounds)
    plan = Plan(graph="g", cluster="c", batch_size=BATCH, micro_batch_size=BATCH, stages=stages, mode=mode, staleness=staleness)
    return cost(model, cluster(), plan)


def test_shards_of_them_are_gathered_and_those_without_a_backward_once() -> None:
    flowing = together(graph(layer("x"), layer("y")), sharded=True)
    resting = together(graph(layer("x", flows=False), layer("y")), sharded=True)
    assert sum(flowing.link_bytes.values()) == 2 * (2 * 4 * (FROZEN + TRAINED) + 4 * TRAINED)
    assert sum(resting.link_bytes.values()) == 3 * 4 * FROZEN + 3 * 4 * TRAINED
    assert flowing.memory["a"].parameters == 4 * (FROZEN + TRAINED)
    assert flowing.memory["a"].gradients == 4 * TRAINED
    assert resting.breakdown["shard"] < flowing.breakdown["shard"]


def test_tensor_parallelism_divides_what_it_can_and_sums_back_what_needs_it() -> None:
    divided = {"frozen_split_parameters": 80_000, "tensor_units": 2, "tensor_bytes": 100.0, "tensor_reductions": 1}
    both = together(graph(layer("x", **divided)), tensor=2)
    forth = together(graph(layer("x", tensor_backward=0.0, **divided)), tensor=2)
    assert both.memory["a"].parameters == 4 * (TRAINED + 20_000 + 40_000)
    assert sum(both.link_bytes.values()) == 2 * sum(forth.link_bytes.values()) == 2 * 2 * 100 * BATCH
    assert forth.step_seconds < both.step_seconds


def test_expert_parallelism_divides_frozen_experts() -> None:
    experts = {"frozen_expert_parameters": 60_000, "experts": 4, "expert_bytes": 10.0}
    assert together(graph(layer("x", **experts)), expert=True).memory["a"].parameters == 4 * (TRAINED + 40_000 + 30_000)
    assert together(graph(layer("x", **experts)), expert=True, sharded=True).memory["a"].parameters == 4 * (TRAINED / 2 + 20_000 + 30_000)


@pytest.mark.parametrize("trained", [True, False])
def test_a_tied_table_has_a_copy_and_a_sum_of_gradients_only_if_it_is_trained(trained: bool) -> None:
    table = SharedParameter(name="table", parameters=5_000, layers=(0, 1), trained=trained)
    alone, tied = (apart(graph(layer("x"), layer("y"), shared=shared), 1) for shared in ((), (table,)))
    assert tied.memory["b"].parameters - alone.memory["b"].parameters == 4 * 5_000
    assert tied.memory["b"].gradients - alone.memory["b"].gradients == 4 * 5_000 * trained
    more = sum(tied.link_bytes.values()) - sum(alone.link_bytes.values())
    assert more == 2 * 4 * 5_000 * trained


def test_their_dtype_says_what_they_take_and_autocast_copies_what_is_wider() -> None:
    narrow = layer("x", frozen_bytes=2.0 * FROZEN)
    wide, half = graph(layer("x"), precision="bf16"), graph(narrow, precision="bf16")
    assert together(half).memory["a"].parameters == 6 * TRAINED + 2 * FROZEN
    assert together(wide).memory["a"].parameters == 6 * TRAINED + 4 * FROZEN
    assert together(half).memory["a"].activations == 0
    copied = together(wide).memory["a"].activations
    assert copied > 0.9 * 4 * FROZEN, "weights as the product reads them, which the graph says are of four bytes here"
    assert together(graph(layer("x", flows=False), layer("y"), precision="bf16")).memory["a"].activations == copied


def test_a_stale_swarm_has_one_copy_of_them() -> None:
    model = graph(layer("x"), layer("y"))
    fresh, stale = (apart(model, 1, "swarm", staleness).memory["a"] for staleness in (0, 1))
    assert stale.parameters - fresh.parameters == 4 * TRAINED
