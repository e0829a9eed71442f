"""Memory against formulas written down separately: Megatron-LM's bytes a parameter, and activations after Korthikanti et al. 2022."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Calibration, Evaluator
from atoll.graph import Graph, Layer, SharedParameter, mixture_of_experts, preset
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import lane_pieces, micro_batches_of, routes_of
from atoll.plan.schedule_policy import in_flight_bounds, interleaved_limits
from tests.cost.cases import cases, dense_graph, pipeline
from tests.plan.strategies import make_cluster as plain_cluster

EXACT = Calibration(memory_overhead=1.0, context_bytes=0.0)
HIDDEN, HEADS, SEQUENCE, BLOCKS = 12288, 96, 2048, 96


def big_cluster() -> Cluster:
    return make_cluster("c", [make_site("s", kind="A100-80GB", hosts=8, devices=8, network="200 Gbit/s")])


def gpt3_plan(graph: Graph, recompute: bool, schedule: str = "1f1b") -> Plan:
    """Tensor 8 inside a host, pipeline 8 over hosts, 12 blocks a stage."""
    cuts = [0, *(1 + 12 * (s + 1) for s in range(7)), len(graph.layers)]
    devices = [[f"s-{s}/{i}" for i in range(8)] for s in range(8)]
    plan = pipeline(cuts, devices, 64, 1, schedule, tensor=8)
    return msgspec.structs.replace(plan, stages=tuple(msgspec.structs.replace(stage, recompute=recompute) for stage in plan.stages))


def test_gpt3_state_is_eighteen_bytes_a_parameter() -> None:
    graph = preset("gpt3-175b").graph
    use = Evaluator(graph, big_cluster(), calibration=EXACT).memory(gpt3_plan(graph, recompute=False))["s-3/0"]
    block = 12 * HIDDEN**2 + 13 * HIDDEN  # four matmuls of attention and feed-forward, their biases, two layer norms
    repeated = 6 * HIDDEN  # norms, and the biases of row-split matmuls, are on every device
    held = 12 * ((block - repeated) / 8 + repeated)
    assert use.parameters + use.gradients + use.optimizer == pytest.approx(18 * held, rel=1e-3)


@pytest.mark.parametrize(("stage", "in_flight"), [(1, 7), (3, 5), (6, 2)])
def test_gpt3_activations_are_korthikantis(stage: int, in_flight: int) -> None:
    graph = preset("gpt3-175b").graph
    evaluator = Evaluator(graph, big_cluster(), calibration=EXACT)
    sbh = SEQUENCE * HIDDEN
    whole = sbh * (10 + 24 / 8 + 5 * HEADS * SEQUENCE / (HIDDEN * 8))
    kept = evaluator.memory(gpt3_plan(graph, recompute=False))[f"s-{stage}/0"].activations
    assert kept == pytest.approx(12 * in_flight * whole, rel=0.02)
    again = evaluator.memory(gpt3_plan(graph, recompute=True))[f"s-{stage}/0"].activations
    assert again == pytest.approx(12 * in_flight * 2 * sbh + whole - 2 * sbh, rel=0.02)


@given(cases())
def test_one_forward_one_backward_never_holds_more_than_gpipe(case: tuple[Plan, Graph, Cluster]) -> None:
    plan, graph, cluster = case
    evaluator = Evaluator(graph, cluster)
    one, all_of_them = (evaluator.memory(msgspec.structs.replace(plan, schedule=schedule)) for schedule in ("1f1b", "gpipe"))
    assert all(one[name].total_bytes <= all_of_them[name].total_bytes for name in one)


@given(cases())
def test_the_bound_holds_what_the_played_step_holds(case: tuple[Plan, Graph, Cluster]) -> None:
    plan, graph, cluster = case
    evaluator = Evaluator(graph, cluster)
    bound, played = evaluator.memory(plan), evaluator.cost(plan).memory
    assert all(played[name].total_bytes <= bound[name].total_bytes * (1 + 1e-9) for name in played)
    assert evaluator.fits(plan) == all(use.total_bytes <= cluster.device(name).memory_bytes for name, use in bound.items())


@pytest.mark.parametrize(("stages", "depth"), [(4, 2), (8, 4), (12, 4)])
def test_the_bound_of_virtual_stages_is_their_devices_limit(stages: int, depth: int) -> None:
    """Megatron-LM's warm-up bounds all the stages of a device together, not each of them."""
    cluster = plain_cluster(hosts=1, devices=depth)
    names = [device.name for device in cluster.devices]
    graph = dense_graph(stages + 2)
    cuts = [*range(stages), stages + 2]
    plan = pipeline(cuts, [[names[s % depth]] for s in range(stages)], 4 * depth, 1, "interleaved")
    bounds = in_flight_bounds(plan)
    for position, limit in enumerate(interleaved_limits(stages, depth)):
        assert limit <= sum(bounds[s][0] for s in range(position, stages, depth)) <= 1.5 * limit  # its stages' peaks do not coincide
    assert [stage.in_flight for stage in Evaluator(graph, cluster).cost(plan).stages] == [row[0] for row in bounds]


def test_sharding_divides_state_by_lanes() -> None:
    cluster = plain_cluster(hosts=1, devices=4)
    names = tuple(device.name for device in cluster.devices)
    graph = dense_graph(6)

    def state(sharded: bool) -> float:
        replica = Replica(devices=names, samples=(2,) * 4)
        plan = Plan(
            graph="g",
            cluster="c",
            batch_size=8,
            micro_batch_size=8,
            stages=(Stage(start=0, stop=6, replicas=(replica,), sharded=sharded),),
        )
        use = Evaluator(graph, cluster).memory(plan)[names[0]]
        return use.parameters + use.gradients + use.optimizer

    assert state(sharded=True) == pytest.approx(state(sharded=False) / 4)


def test_tied_weights_on_two_stages_cost_memory_on_both_and_a_synchronisation() -> None:
    cluster = plain_cluster(hosts=2, devices=1)
    names = [device.name for device in cluster.devices]
    plan = pipeline([0, 3, 6], [[names[0]], [names[1]]], 8, 1)
    tied, free = dense_graph(6, tied=True), dense_graph(6, tied=False)
    one, other = (Evaluator(graph, cluster) for graph in (tied, free))
    for name in names:
        assert one.memory(plan)[name].parameters == pytest.approx(other.memory(plan)[name].parameters, rel=1e-3)
    assert one.cost(plan).breakdown["sync"] > 0
    assert "sync" not in other.cost(plan).breakdown
    whole = pipeline([0, 6], [[names[0]]], 8, 1)
    table = tied.shared[0].parameters
    assert other.memory(whole)[names[0]].parameters - one.memory(whole)[names[0]].parameters == pytest.approx(6 * table, rel=0.01)


def test_a_shared_parameter_within_one_later_stage_is_counted_there_once() -> None:
    layers = [Layer(name=f"l{i}", parameters=100 if i in (0, 2) else 0) for i in range(4)]
    graph = Graph.from_layers("g", layers, shared=(SharedParameter(name="w", parameters=100, layers=(2, 3)),))
    cluster = plain_cluster(hosts=1, devices=2)
    names = [device.name for device in cluster.devices]
    use = Evaluator(graph, cluster).memory(pipeline([0, 2, 4], [[names[0]], [names[1]]], 2, 1))
    assert use[names[0]].gradients == use[names[1]].gradients == 400


def test_frozen_parameters_take_their_weights_alone() -> None:
    """LoRA: no gradient, no optimizer state, no fp32 copy beside a half-precision weight."""
    cluster = plain_cluster(hosts=1, devices=1)
    for precision, size in (("fp32", 4), ("bf16", 2)):
        layer = Layer(name="l", parameters=10, frozen_parameters=1000)
        graph = Graph.from_layers("g", [layer], precision=precision)  # type: ignore[arg-type]
        use = Evaluator(graph, cluster, calibration=EXACT).memory(pipeline([0, 1], [["s0-0/0"]], 1, 1))["s0-0/0"]
        assert use.gradients == 40
        assert use.optimizer == 80
        assert use.parameters == 1000 * size + 10 * (4 if precision == "fp32" else 6)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_experts_are_divided_by_lanes_and_the_rest_by_tensor(tensor: int, lanes: int) -> None:
    graph = mixture_of_experts(
        name="g", layers=2, hidden=256, heads=8, sequence=64, vocabulary=512, experts=8, active_experts=1, expert_hidden=4096
    )
    cluster = plain_cluster(hosts=1, devices=16)
    names = tuple(device.name for device in cluster.devices)[: tensor * lanes]
    replica = Replica(devices=names, samples=(1,) * lanes)
    stage = Stage(start=0, stop=4, replicas=(replica,), tensor=tensor, expert=lanes > 1)
    held = Evaluator(graph, cluster).context.held(stage, replica, 0)
    experts = sum(layer.expert_parameters for layer in graph.layers)
    split = sum(layer.split_parameters for layer in graph.layers)
    assert held.expert == pytest.approx(experts / lanes)  # tensor parallelism does not divide experts
    assert held.dense == pytest.approx(graph.parameters - experts - split * (1 - 1 / tensor))


def test_an_odd_micro_batch_on_two_lanes_is_priced_for_the_larger_piece() -> None:
    """3 samples on 2 lanes are 2 and 1, not 1.5 twice."""
    cluster = plain_cluster(hosts=1, devices=2)
    names = tuple(device.name for device in cluster.devices)
    layer = Layer(name="l", parameters=1, saved_bytes=1000.0)
    graph = Graph.from_layers("g", [layer])
    stage = Stage(start=0, stop=1, replicas=(Replica(devices=names, samples=(6, 6)),))
    plan = Plan(graph="g", cluster="c", batch_size=12, micro_batch_size=3, stages=(stage,))
    use = Evaluator(graph, cluster, calibration=EXACT).memory(plan)
    assert use[names[0]].activations == use[names[1]].activations == 2000


@given(cases())
def test_no_lane_ever_holds_more_than_was_priced(case: tuple[Plan, Graph, Cluster]) -> None:
    """Whatever micro-batches a lane holds at once, they have no more samples than its memory was priced for."""
    plan, _, cluster = case
    layers = plan.stages[-1].stop
    graph = Graph.from_layers("flat", [Layer(name=f"l{i}", parameters=1, saved_bytes=1.0, input_bytes=1.0) for i in range(layers)])
    plain = msgspec.structs.replace(plan, stages=tuple(msgspec.structs.replace(s, recompute=False, split=()) for s in plan.stages))
    priced = Evaluator(graph, cluster, calibration=EXACT).memory(plain)
    held: dict[str, float] = dict.fromkeys(priced, 0.0)
    bounds, sizes, route = in_flight_bounds(plain), micro_batches_of(plain), routes_of(plain)
    for s, stage in enumerate(plain.stages):
        for r, replica in enumerate(stage.replicas):
            own = [stop - start for m, (start, stop) in enumerate(sizes) if route[s][m] == r]
            rows = lane_pieces(own, replica.samples)
            for index, device in enumerate(replica.devices):
                most = sum(sorted((row[index // stage.tensor] for row in rows), reverse=True)[: bounds[s][r]])
                held[device] += most * (stage.stop - stage.start)
    assert all(priced[name].activations >= samples for name, samples in held.items())


def test_a_swarm_holds_its_share_of_three_micro_batches_for_every_worker() -> None:
    """Two stages of two workers: twelve are under way, of which each worker of the first stage holds six until they come back."""
    cluster = plain_cluster(hosts=4, devices=1)
    names = [device.name for device in cluster.devices]
    layers = [Layer(name=f"l{i}", parameters=1, saved_bytes=1000.0) for i in range(2)]
    graph = Graph.from_layers("g", layers)
    stages = tuple(
        Stage(start=s, stop=s + 1, replicas=tuple(Replica(devices=(names[2 * s + r],), samples=(16,)) for r in range(2))) for s in range(2)
    )
    plan = Plan(graph="g", cluster="c", batch_size=32, micro_batch_size=2, stages=stages)
    evaluator = Evaluator(graph, cluster, calibration=EXACT)

    def held(mode: str) -> list[float]:
        own = msgspec.structs.replace(plan, mode=mode)
        assert evaluator.memory(own) == evaluator.cost(own).memory
        return [evaluator.memory(own)[name].activations / 2000 for name in names]

    assert held("lockstep") == [2, 2, 1, 1]
    assert held("swarm") == [6, 6, 1, 1]
