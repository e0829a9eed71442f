"""Which execution mode, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator, staleness_effect
from atoll.graph import preset
from atoll.plan import Mode
from atoll.planner import plan
from atoll.planner.mode import goodput
from atoll.units import format_seconds


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 1000), st.integers(1, 1000), st.sampled_from(["lockstep", "swarm"]))
def test_failures_never_help(a: float, b: float, step: float, devices: int, mode: Mode) -> None:
    few, many = sorted((a, b))
    assert 0 < goodput(mode, many, step, 1 / devices) <= goodput(mode, few, step, 1 / devices) <= 1


@given(st.floats(0.01, 100), st.floats(0.01, 1000), st.integers(1, 64), st.integers(2, 64))
def test_larger_replicas_lose_more(failures: float, step: float, size: int, replicas: int) -> None:
    small, large = (goodput("swarm", failures, step, part / (64 * replicas), 1 / replicas) for part in sorted((1, size)))
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
    said = goodput("swarm", 0.0, best.cost.step_seconds, 0.0)
    assert f"a swarm's {format_seconds(best.cost.step_seconds / said)}" in best.reasons[0]


def test_slow_links_make_islands() -> None:
    sites = [make_site(name, kind="A100-40GB", devices=8) for name in ("a", "b")]
    cluster = make_cluster("wan", sites, {("a", "b"): ("1 Gbit/s", "50 ms")})
    best = plan(preset("bert-large").graph, cluster, batch_size=2048, codecs=("none",), mode="islands").candidates[0]
    assert best.plan.mode == "islands"
    assert best.plan.outer_steps > 1
    assert "not those of one process" in best.reasons[0]


def test_a_mode_asked_for_is_obeyed() -> None:
    cluster = make_cluster("calm", [make_site("a", kind="A100-40GB", devices=4)])
    assert plan(preset("bert-large").graph, cluster, batch_size=64, mode="swarm").candidates[0].plan.mode == "swarm"


def test_a_swarm_does_not_live_on_one_host() -> None:
    cluster = make_cluster("spot host", [make_site("a", kind="T4", devices=8, preemptions="1 /h")])
    best = plan(preset("bert-large").graph, cluster, batch_size=64).candidates[0]
    assert best.plan.mode == "lockstep"
    assert "no plan found has every stage on two hosts" in best.reasons[0]


def test_a_swarms_replicas_stay_inside_hosts() -> None:
    site = make_site("a", kind="T4", hosts=8, devices=4, preemptions="2 /h", network="32 Gbit/s")
    cluster = make_cluster("spot", [site])
    best = plan(preset("bert-large").graph, cluster, batch_size=256).best
    assert best.mode == "swarm"
    for stage in best.stages:
        assert len({cluster.device(name).host for name in stage.devices}) > 1
        for replica in stage.replicas:
            assert len({cluster.device(name).host for name in replica.devices}) == 1


def wan(bandwidth: str, preemptions: str = "0 /h") -> Cluster:
    sites = [make_site(name, kind="V100-32GB", devices=4, preemptions=preemptions) for name in "abc"]
    return make_cluster("wan", sites, default_link=(bandwidth, "40 ms"))


def test_islands_are_taken_where_they_are_much_faster() -> None:
    best = plan(preset("gpt3-350m").graph, wan("100 Mbit/s"), batch_size=256).candidates[0]
    assert best.plan.mode == "islands"
    assert "× faster than synchronising every step" in best.reasons[0]


def test_preemptible_devices_do_not_hide_that_islands_are_faster() -> None:
    assert plan(preset("gpt3-350m").graph, wan("100 Mbit/s", "0.01 /h"), batch_size=256).best.mode == "islands"


def test_islands_that_are_a_little_faster_are_mentioned() -> None:
    best = plan(preset("gpt3-350m").graph, wan("5 Gbit/s"), batch_size=256).candidates[0]
    assert best.plan.mode == "lockstep"
    assert "islands would be" in best.reasons[0]
