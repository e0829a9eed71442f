"""A swarm's step and memory, without staleness and with it, against figures worked out by hand."""

import msgspec
import pytest
from hypothesis import given

from atoll.cluster import Cluster
from atoll.cost import Calibration, Evaluator, LayerTime
from atoll.graph import Graph, Layer, SharedParameter
from atoll.plan import Plan
from tests.cost.cases import cases, data_parallel, pipeline, with_devices, with_links
from tests.plan.strategies import make_cluster

PARAMETERS = 25_000_000  # of a layer: 100 MB of gradient
FROZEN = 5_000_000
CROSSING = 12_500_000  # bytes of a sample between stages
TIMES = LayerTime(layer="h", kind="chip", samples=2, forward_seconds=0.1, backward_seconds=0.2, update_seconds=0.028)
PLAIN = Calibration(
    network_efficiency=1.0, collective_seconds=0.0, layer_times=(TIMES,), memory_overhead=1.0, context_bytes=0.0, sync_overlap=0.8
)


def graph(layers: int, **fields: object) -> Graph:
    same = {"parameters": PARAMETERS, "output_bytes": CROSSING, "gradient_bytes": CROSSING, "signature": "h", **fields}
    return Graph.from_layers("g", [Layer(name=f"h.{i}", **same) for i in range(layers)])  # type: ignore[arg-type]


def cluster(hosts: int, bytes_per_s: float) -> Cluster:
    return with_links(make_cluster(hosts, 1), lambda link: msgspec.structs.replace(link, bytes_per_s=bytes_per_s, latency_s=0.0))


def in_mode(plan: Plan, staleness: int) -> Plan:
    return msgspec.structs.replace(plan, mode="swarm", staleness=staleness)


REPLICAS = data_parallel([8, 8], ["s0-0/0", "s0-1/0"], 2, 2)  # two layers, four micro-batches each: 4 × 2 × 0.3 s of work
STAGES = pipeline([0, 1, 2], [["s0-0/0", "s0-1/0"], ["s0-2/0", "s0-3/0"]], 16, 2)


def test_without_staleness_work_sums_and_optimizer_add_up() -> None:
    evaluator = Evaluator(graph(2), cluster(2, 1e9), calibration=PLAIN)
    found = evaluator.cost(in_mode(REPLICAS, 0))
    # two members each send and receive half of 200 MB twice: 0.2 s; none of it is hidden, as sums begin when the step is sealed
    assert found.breakdown == pytest.approx({"compute": 2.4, "sync": 0.2, "optimizer": 0.056})
    assert found.step_seconds == pytest.approx(2.656)
    lockstep = evaluator.cost(REPLICAS)  # all but the last of two buckets goes on behind the backward
    assert lockstep.breakdown == pytest.approx({"compute": 2.4, "sync": 0.1, "optimizer": 0.056})


def test_with_staleness_sums_that_take_less_than_a_step_cost_nothing() -> None:
    found = Evaluator(graph(2), cluster(2, 1e9), calibration=PLAIN).cost(in_mode(REPLICAS, 1))
    # AdamW moves 28 bytes for a parameter, keeping the weights before it 8 more: 0.056 s × 36 / 28
    assert found.breakdown == pytest.approx({"compute": 2.4, "optimizer": 0.072})
    assert found.step_seconds == pytest.approx(2.472)


def test_with_staleness_steps_are_no_faster_than_their_sums() -> None:
    evaluator = Evaluator(graph(2), cluster(2, 5e7), calibration=PLAIN)  # 4 s of sums
    assert evaluator.cost(in_mode(REPLICAS, 0)).step_seconds == pytest.approx(2.4 + 4.0 + 0.056)
    found = evaluator.cost(in_mode(REPLICAS, 1))
    assert found.step_seconds == pytest.approx(4.0)
    assert found.breakdown == pytest.approx({"compute": 2.4, "optimizer": 0.072, "sync": 4.0 - 2.472})


def test_links_carry_sums_and_activations_one_after_the_other() -> None:
    evaluator = Evaluator(graph(2), cluster(4, 2e7), calibration=PLAIN)
    # each host sends four micro-batches of 25 MB on or back, 5 s, and 100 MB for the sums of its layer, 5 s: less than that no step takes
    assert evaluator.cost(in_mode(STAGES, 1)).step_seconds == pytest.approx(10.0)
    alone = evaluator.cost(in_mode(STAGES, 0))
    assert alone.breakdown["sync"] == pytest.approx(5.0)
    assert alone.step_seconds > 10.0


def test_a_swarms_sums_begin_when_all_stages_have_ended() -> None:
    evaluator = Evaluator(graph(3), cluster(3, 1e9), calibration=PLAIN)
    # stage 0 has one worker and nothing to sum; stage 1 has two, and ends before stage 0 does
    plan = pipeline([0, 1, 3], [["s0-0/0"], ["s0-1/0", "s0-2/0"]], 16, 2)
    found = evaluator.cost(in_mode(plan, 0))
    pipeline_seconds = sum(seconds for name, seconds in found.breakdown.items() if name not in ("sync", "optimizer"))
    assert found.breakdown["sync"] == pytest.approx(0.2)
    assert found.breakdown["optimizer"] == pytest.approx(0.056)
    assert pipeline_seconds >= 8 * 0.3


def test_parameters_of_several_stages_are_summed_beside_the_next_step_too() -> None:
    shared = SharedParameter(name="table", parameters=PARAMETERS, layers=(0, 1))
    tied = msgspec.structs.replace(graph(2), shared=(shared,))
    plan = pipeline([0, 1, 2], [["s0-0/0"], ["s0-1/0"]], 16, 2)
    evaluator = Evaluator(tied, cluster(2, 2e7), calibration=PLAIN)
    # 100 MB that both stages have, summed by two members: 5 s; eight micro-batches of 25 MB cross the same interface: 10 s
    assert evaluator.cost(in_mode(plan, 0)).breakdown["sync"] == pytest.approx(5.0)
    assert evaluator.cost(in_mode(plan, 1)).step_seconds == pytest.approx(max(15.0, evaluator.cost(in_mode(plan, 0)).step_seconds - 5.0))


@pytest.mark.parametrize(("is_processor", "gradients"), [(True, 8), (False, 4)])
def test_staleness_keeps_second_weights_and_the_sums_of_the_step_before(is_processor: bool, gradients: int) -> None:
    """Frozen parameters have neither second weights nor sums. The sums of all workers are in main memory, which processors compute in."""
    there = with_devices(cluster(2, 1e9), lambda d: msgspec.structs.replace(d, kind=msgspec.structs.replace(d.kind, cpu=is_processor)))
    evaluator = Evaluator(graph(2, frozen_parameters=FROZEN), there, calibration=PLAIN)
    without, with_it = (evaluator.cost(in_mode(REPLICAS, staleness)).memory["s0-0/0"] for staleness in (0, 1))
    assert with_it.parameters - without.parameters == pytest.approx(4 * 2 * PARAMETERS)
    assert with_it.gradients - without.gradients == pytest.approx(gradients * 2 * PARAMETERS)
    assert (with_it.optimizer, with_it.activations, with_it.buffers) == (without.optimizer, without.activations, without.buffers)


@given(cases())
def test_staleness_saves_time_and_takes_memory(case: tuple[Plan, Graph, Cluster]) -> None:
    plan, graph, cluster = case
    evaluator = Evaluator(graph, cluster)
    without, with_it = (evaluator.cost(in_mode(plan, staleness)) for staleness in (0, 1))
    copying = without.breakdown.get("optimizer", 0.0) * 8 / 28
    assert with_it.step_seconds <= (without.step_seconds + copying) * (1 + 1e-9)
    assert sum(with_it.breakdown.values()) == pytest.approx(with_it.step_seconds, rel=1e-6)
    assert with_it.step_seconds >= without.step_seconds - without.breakdown.get("sync", 0.0) - without.breakdown.get("optimizer", 0.0)
    assert with_it.link_bytes == without.link_bytes
    assert all(with_it.memory[name].total_bytes > without.memory[name].total_bytes for name in without.memory)
    assert evaluator.memory(in_mode(plan, 1)).keys() == with_it.memory.keys()


@given(cases())
def test_staleness_changes_nothing_outside_of_swarms(case: tuple[Plan, Graph, Cluster]) -> None:
    plan, graph, cluster = case
    plan = msgspec.structs.replace(plan, mode="lockstep")
    evaluator = Evaluator(graph, cluster)
    assert evaluator.cost(msgspec.structs.replace(plan, staleness=1)) == evaluator.cost(plan)
