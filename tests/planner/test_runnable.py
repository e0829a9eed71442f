"""What `atoll plan` prints, `atoll run` runs: every plan the planner emits passes the checks of its mode."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.codec import CodecChoice
from atoll.errors import NoPlanError
from atoll.graph import Graph, dense_transformer, preset
from atoll.plan import Mode, Plan, validate
from atoll.plan.link_codecs import PlanCodecs, allowed_codecs
from atoll.plan.modes import mode_rules
from atoll.planner import plan
from atoll.runtime.modes.lockstep.channels import backward_hops, forward_hops
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import make_plan_schedule

KINDS = ("A100-40GB", "V100-16GB", "P100-16GB", "RTX-3090")
CHOICES: tuple[CodecChoice, ...] = ("none", "auto", "auto", "int8", "bf16", "int4")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One to three sites, some devices of which may be taken away."""
    sites = []
    for i in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(KINDS))
        rate = draw(st.sampled_from(("0 /h", "3 /h")))
        hosts, devices = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        sites.append(make_site(f"s{i}", kind=kind, hosts=hosts, devices=devices, preemptions=rate))
    return make_cluster("c", sites, default_link=(draw(st.sampled_from(("20 Mbit/s", "1 Gbit/s"))), "5 ms"))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    hidden = draw(st.sampled_from((256, 1024, 2048)))
    layers = draw(st.integers(2, 8))
    return dense_transformer(name="g", layers=layers, hidden=hidden, heads=8, sequence=256, vocabulary=draw(st.sampled_from((500, 50_000))))


def check_runs(chosen: Plan, graph: Graph, cluster: Cluster) -> None:
    """All that `atoll run` checks before it starts anything, but what needs the captured program."""
    validate(chosen, graph, cluster)
    PlanCodecs(chosen, cluster)
    assert mode_rules(chosen.mode).why_not(chosen) is None
    if chosen.mode != "lockstep":
        return
    layout = Layout(chosen, [device.name for device in cluster.devices], cluster)
    make_plan_schedule(layout)
    hops = [
        hop
        for m in range(len(layout.micro_batches))
        for s in range(len(chosen.stages))
        for hop in (*(forward_hops(layout, s, m) if s else ()), *(backward_hops(layout, s, m) if s + 1 < len(chosen.stages) else ()))
    ]
    sites = {device.name: device.site for device in cluster.devices}
    for hop in hops:
        if sites[layout.devices[hop.source]] != sites[layout.devices[hop.target]] and hop.codec != "none":
            assert hop.codec in chosen.codecs.values()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(clusters(), graphs(), st.integers(1, 40), st.sampled_from(CHOICES), st.sampled_from(("lockstep", "swarm", None)))
def test_every_plan_can_be_run(cluster: Cluster, graph: Graph, batch_size: int, choice: CodecChoice, mode: Mode | None) -> None:
    try:
        planned = plan(graph, cluster, batch_size=batch_size, mode=mode, codecs=allowed_codecs(choice), top=8, max_priced=60)
    except NoPlanError:
        return
    for candidate in planned.candidates:
        if choice == "none":
            assert not candidate.plan.codecs
        check_runs(candidate.plan, graph, cluster)


@pytest.mark.parametrize("name", ["gpt3-6.7b", "bert-large", "resnet50"])
@pytest.mark.parametrize("choice", ["none", "auto", "int8"])
def test_plans_of_presets_can_be_run(name: str, choice: CodecChoice) -> None:
    sites = [make_site(site, kind=kind, hosts=2, devices=4) for site, kind in (("a", "A100-80GB"), ("b", "V100-32GB"))]
    cluster = make_cluster("c", sites, default_link=("1 Gbit/s", "5 ms"))
    for candidate in plan(preset(name).graph, cluster, batch_size=96, codecs=allowed_codecs(choice), mode="lockstep", top=5).candidates:
        check_runs(candidate.plan, preset(name).graph, cluster)
