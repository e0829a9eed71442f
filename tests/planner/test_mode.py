"""Which execution mode, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import make_cluster, make_site
from atoll.cost import Evaluator, staleness_effect
from atoll.graph import preset
from atoll.plan import Plan, Replica, Stage
from atoll.plan.modes import Failures, mode_rules
from atoll.planner import plan
from atoll.units import format_seconds


def one_stage(replicas: int, lanes: int = 1) -> Plan:
    hosts = [Replica(devices=tuple(f"h{r}/{n}" for n in range(lanes)), samples=(1,) * lanes) for r in range(replicas)]
    stage = Stage(start=0, stop=1, replicas=tuple(hosts))
    return Plan(graph="g", cluster="c", batch_size=replicas * lanes, micro_batch_size=lanes, stages=(stage,))


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 1000), st.integers(1, 1000), st.sampled_from(["lockstep", "swarm", "alone"]))
def test_failures_never_help(a: float, b: float, step: float, devices: int, mode: str) -> None:
    few, many = (mode_rules(mode).goodput(one_stage(devices), Failures(rate, step)) for rate in sorted((a, b)))
    assert 0 < many <= few <= 1


@given(st.floats(0.01, 100), st.floats(0.01, 1000), st.integers(1, 8), st.integers(2, 64))
def test_fewer_replicas_of_as_many_devices_lose_more(failures: float, step: float, lanes: int, replicas: int) -> None:
    rules = mode_rules("swarm")
    small, large = (rules.goodput(one, Failures(failures, step)) for one in (one_stage(replicas * lanes), one_stage(replicas, lanes)))
    assert large <= small


def test_reliable_devices_run_in_lockstep() -> None:
    cluster = make_cluster("calm", [make_site("a", kind="A100-40GB", devices=4)])
    best = plan(preset("bert-large").graph, cluster, batch_size=64).candidates[0]
    assert best.plan.mode == "lockstep"
    assert "preemptible" in best.reasons[0]


def test_preemptible_devices_run_as_a_swarm() -> None:
    site = make_site("a", kind="T4", hosts=16, devices=1, preemptions="4 /h", network="10 Gbit/s")
    best = plan(preset("bert-large").graph, make_cluster("spot", [site]), batch_size=64).candidates[0]
    assert best.plan.mode == "swarm"
    assert "64 preemptions an hour" in best.reasons[0]


@pytest.mark.parametrize(("network", "mentioned"), [("400 Gbit/s", True), ("1 Gbit/s", False)])  # slow links: a plan without sums
def test_staleness_is_never_chosen_and_mentioned_where_it_would_help(network: str, mentioned: bool) -> None:
    site = make_site("a", kind="T4", hosts=4, devices=1, network=network)
    found = plan(preset("bert-large").graph, make_cluster("spot", [site]), batch_size=16, mode="swarm", top=3)
    assert {candidate.plan.staleness for candidate in found.candidates} == {0}
    (said,) = [sentence for sentence in found.relief if "--staleness 1" in sentence] or [""]
    effect = staleness_effect(Evaluator(preset("bert-large").graph, make_cluster("spot", [site])), found.best)
    assert (str(effect) in said) == mentioned == (effect.gain > 1.02)
    steps = [candidate.cost.step_seconds for candidate in found.candidates[1:]]
    assert steps == sorted(steps)


def test_a_swarm_is_chosen_by_what_its_own_steps_take() -> None:
    """Sums that lockstep hides behind the backward follow it in a swarm: it has to be said to take longer."""
    site = make_site("a", kind="T4", hosts=4, devices=1, network="10 Gbit/s")
    best = plan(preset("bert-large").graph, make_cluster("spot", [site]), batch_size=64, mode="swarm").candidates[0]
    said = mode_rules("swarm").goodput(best.plan, Failures(0.0, best.cost.step_seconds))
    assert f"a step takes {format_seconds(best.cost.step_seconds / said)} in swarm mode" in best.reasons[0]


def test_a_mode_asked_for_is_obeyed() -> None:
    cluster = make_cluster("calm", [make_site("a", kind="A100-40GB", devices=4)])
    assert plan(preset("bert-large").graph, cluster, batch_size=64, mode="swarm").candidates[0].plan.mode == "swarm"


def test_a_swarm_does_not_live_on_one_host() -> None:
    cluster = make_cluster("spot host", [make_site("a", kind="T4", devices=8, preemptions="1 /h")])
    best = plan(preset("bert-large").graph, cluster, batch_size=64).candidates[0]
    assert best.plan.mode == "lockstep"
    assert "no plan found has every stage on 2 hosts" in best.reasons[0]


def test_a_swarms_replicas_stay_inside_hosts() -> None:
    site = make_site("a", kind="T4", hosts=8, devices=4, preemptions="2 /h", network="32 Gbit/s")
    cluster = make_cluster("spot", [site])
    best = plan(preset("bert-large").graph, cluster, batch_size=256).best
    assert best.mode == "swarm"
    for stage in best.stages:
        assert len({cluster.device(name).host for name in stage.devices}) > 1
        for replica in stage.replicas:
            assert len({cluster.device(name).host for name in replica.devices}) == 1


def test_alone_is_planned_on_the_fastest_device_when_asked_for_and_never_chosen() -> None:
    sites = [make_site("a", kind="T4", hosts=2, devices=2), make_site("b", kind="A100-40GB", hosts=1, devices=2)]
    cluster = make_cluster("mixed", sites, {("a", "b"): ("10 Gbit/s", "1 ms")})
    found = plan(preset("bert-large").graph, cluster, batch_size=16, mode="alone")
    ((replica,),) = [stage.replicas for stage in found.best.stages]
    assert (found.best.mode, replica.samples) == ("alone", (16,))
    assert [cluster.device(name).kind.name for name in replica.devices] == ["A100-40GB"]
    assert found.candidates[0].reasons[0] == "alone: asked for"
    tiny = make_cluster("one", [make_site("a", kind="T4", hosts=1, devices=1)])
    assert plan(preset("bert-large").graph, tiny, batch_size=4).best.mode == "lockstep"
