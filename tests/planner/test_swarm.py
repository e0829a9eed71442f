"""Plans of mode swarm: a swarm can run every one of them, and none that is made by hand is faster."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator
from atoll.errors import NoPlanError
from atoll.graph import Graph, dense_transformer, mixture_of_experts, preset
from atoll.plan import Mode, Plan, validate
from atoll.plan.modes.swarm import SWARM
from atoll.planner import Planned, plan
from atoll.planner.reasons import what_would_help
from tests.planner.by_hand import hand_plans, random_problem
from tests.planner.test_annotated import lawful
from tests.planner.test_by_hand import is_possible

KINDS = ("A100-40GB", "V100-16GB", "T4")


@st.composite
def spot_clusters(draw: st.DrawFn) -> Cluster:
    """One or two sites of unequal hosts, some of which may be taken away, some short of memory."""
    sites = []
    for i in range(draw(st.integers(1, 2))):
        kind = [(draw(st.sampled_from(KINDS)), draw(st.integers(1, 4)))]
        memory, preemptions = draw(st.sampled_from((None, "2.2 GB"))), draw(st.sampled_from(("0 /h", "3 /h", "20 /h")))
        network = draw(st.sampled_from(("10 Gbit/s", "200 Gbit/s")))
        hosts = draw(st.integers(1, 4))
        sites.append(make_site(f"s{i}", kind=kind, hosts=hosts, memory=memory, preemptions=preemptions, network=network))
    return make_cluster("c", sites, default_link=(draw(st.sampled_from(("100 Mbit/s", "10 Gbit/s"))), "10 ms"))


def small_graph(layers: int, experts: bool) -> Graph:
    size = {"name": "d", "layers": layers, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 4096}
    return mixture_of_experts(**size, experts=4, active_experts=1, expert_hidden=1024, every=2) if experts else dense_transformer(**size)  # type: ignore[arg-type]


def check_runnable(planned: Planned, graph: Graph, cluster: Cluster) -> int:
    swarms = [candidate for candidate in planned.candidates if candidate.plan.mode == "swarm"]
    for candidate in swarms:
        validate(candidate.plan, graph, cluster)
        assert SWARM.why_not(candidate.plan) is None
        assert candidate.cost.fits
        assert candidate.plan.schedule == "1f1b"
        assert all(r.total_samples % candidate.plan.micro_batch_size == 0 for stage in candidate.plan.stages for r in stage.replicas)
    return len(swarms)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(spot_clusters(), st.sampled_from((7, 12, 256)), st.integers(2, 8), st.booleans(), st.sampled_from((None, "swarm")))
def test_a_swarm_can_run_its_plans(cluster: Cluster, batch_size: int, layers: int, experts: bool, mode: Mode | None) -> None:
    graph = small_graph(layers, experts)
    planned = plan(graph, cluster, batch_size=batch_size, mode=mode, top=4, max_priced=60)
    found = check_runnable(planned, graph, cluster)
    assert found == len(planned.candidates) or mode is None
    assert not any(candidate.plan.codecs for candidate in planned.candidates)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(lawful())
def test_annotated_swarms_can_be_run_or_the_error_says_that_it_was_a_swarm(case: tuple[Graph, Cluster, int]) -> None:
    graph, cluster, batch_size = case
    refusal = ""
    try:
        planned = plan(graph, cluster, batch_size=batch_size, mode="swarm", top=3, max_priced=60)
    except NoPlanError as error:
        refusal = str(error)
    else:
        assert check_runnable(planned, graph, cluster)
    assert not refusal or ("in mode swarm" in refusal and "workers hold whole stages" in refusal)


def by_hand_in_swarm(graph: Graph, cluster: Cluster, batch: int) -> list[Plan]:
    """Those a swarm runs as they are priced."""
    found = (replace(one, mode="swarm") for one in hand_plans(graph, cluster, batch) if one.schedule == "1f1b")
    whole = (one for one in found if all(r.total_samples % one.micro_batch_size == 0 for stage in one.stages for r in stage.replicas))
    return [one for one in whole if SWARM.why_not(one) is None and is_possible(one, graph, cluster)]


@pytest.mark.parametrize("seed", range(12))
def test_no_hand_made_swarm_is_faster(seed: int) -> None:
    graph, cluster, batch = random_problem(seed)
    evaluator = Evaluator(graph, cluster)
    by_hand = [one for one in by_hand_in_swarm(graph, cluster, batch) if evaluator.fits(one)]
    try:
        planned = plan(graph, cluster, batch_size=batch, mode="swarm", top=3)
    except NoPlanError:
        assert not by_hand
        return
    ours = min(candidate.cost.step_seconds for candidate in planned.candidates) * (1 - 1e-9)
    hopeful = [one for one in by_hand if evaluator.seconds(one) < ours]
    assert not [one for one in hopeful if evaluator.cost(one).step_seconds < ours]


def test_what_fits_only_in_shards_is_no_swarm_and_the_error_says_so() -> None:
    cluster = make_cluster("tight", [make_site("a", kind="A100-40GB", hosts=2, devices=4, memory="12 GB")])
    graph = dense_transformer(name="wide", layers=1, hidden=8192, heads=64, sequence=64, vocabulary=1000)
    assert plan(graph, cluster, batch_size=8).best.mode == "lockstep"
    with pytest.raises(NoPlanError, match=r"no plan fits wide .* in mode swarm: out of memory .* A swarm's workers hold whole stages"):
        plan(graph, cluster, batch_size=8, mode="swarm")


def test_a_swarm_competes_with_plans_of_its_own() -> None:
    """The fastest plans shard over all hosts, which no swarm can: the best that one can run is looked for, not found among those."""
    site = make_site("a", kind="V100-32GB", hosts=8, devices=4, preemptions="3 /h", network="50 Gbit/s")
    cluster = make_cluster("spot", [site])
    graph = preset("gpt3-1.3b").graph
    best = plan(graph, cluster, batch_size=256)
    assert best.best.mode == "swarm"
    assert check_runnable(best, graph, cluster) == 1


def test_where_devices_are_more_than_samples_some_of_them_are_a_swarm() -> None:
    site = make_site("a", kind="A100-40GB", hosts=40, devices=8)
    cluster = make_cluster("many", [site, make_site("b", kind="T4", hosts=40, devices=8)], default_link=("5 Gbit/s", "20 ms"))
    graph = small_graph(4, experts=False)
    planned = plan(graph, cluster, batch_size=16, mode="swarm")
    assert check_runnable(planned, graph, cluster) == 1
    assert {name.split("-")[0] for stage in planned.best.stages for name in stage.devices} == {"a"}


def test_advice_follows_from_the_reasons() -> None:
    crowded, full = what_would_help({"fewer micro-batches than replicas": 118, "out of memory": 0}), what_would_help({"out of memory": 3})
    assert "larger batch" in crowded
    assert "fewer devices" in crowded
    assert "memory" not in crowded
    assert "smaller batch" not in crowded
    assert "optimizer with less state" in full
    assert "larger batch" not in full
