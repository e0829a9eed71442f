"""Which execution mode, and why."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import make_cluster, make_site
from atoll.graph import preset
from atoll.planner import plan
from atoll.planner.mode import goodput


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 1000), st.integers(1, 1000), st.sampled_from(["lockstep", "swarm"]))
def test_failures_never_help(a: float, b: float, step: float, devices: int, mode: str) -> None:
    few, many = sorted((a, b))
    assert 0 < goodput(mode, many, step, devices) <= goodput(mode, few, step, devices) <= 1  # type: ignore[arg-type]


def test_reliable_devices_run_in_lockstep() -> None:
    cluster = make_cluster("calm", [make_site("a", kind="A100-40GB", devices=4)])
    best = plan(preset("bert-large").graph, cluster, batch_size=64).candidates[0]
    assert best.plan.mode == "lockstep"
    assert "preemptible" in best.reasons[0]


def test_preemptible_devices_run_as_a_swarm() -> None:
    site = make_site("a", kind="T4", hosts=16, devices=1, preemptions="1 /h", network="10 Gbit/s")
    best = plan(preset("bert-large").graph, make_cluster("spot", [site]), batch_size=64).candidates[0]
    assert best.plan.mode == "swarm"
    assert "16 preemptions an hour" in best.reasons[0]


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
