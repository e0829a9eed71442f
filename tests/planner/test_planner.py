"""What holds for every answer of the planner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator, cost
from atoll.errors import NoPlanError, PlanError
from atoll.graph import dense_transformer, preset
from atoll.plan import Plan, validate
from atoll.planner import plan

KINDS = ("A100-40GB", "V100-16GB", "P100-16GB", "RTX-3090")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    sites = []
    for i in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(KINDS))
        sites.append(make_site(f"s{i}", kind=kind, hosts=draw(st.integers(1, 3)), devices=draw(st.integers(1, 4))))
    return make_cluster("c", sites, default_link=(draw(st.sampled_from(("100 Mbit/s", "10 Gbit/s"))), "10 ms"))


@settings(max_examples=10)
@given(clusters(), st.sampled_from((4, 8)))
def test_a_job_captured_for_one_number_of_samples_gets_plans_that_give_every_device_as_many(cluster: Cluster, fixed: int) -> None:
    graph = dense_transformer(name="d", layers=4, hidden=1024, heads=16, sequence=256, vocabulary=8192)
    planned = plan(replace(graph, fixed_samples=fixed), cluster, batch_size=64, top=3)
    for candidate in planned.candidates:
        for stage in candidate.plan.stages:
            for replica in stage.replicas:
                rounds = -(-replica.total_samples // candidate.plan.micro_batch_size)
                assert set(replica.samples) == {fixed * rounds}
    other = replace(planned.candidates[0].plan, micro_batch_size=fixed // 2)
    with pytest.raises(PlanError, match=f"could be captured for {fixed} samples at a time only"):
        validate(other, replace(graph, fixed_samples=fixed), cluster)


@settings(max_examples=25)
@given(clusters(), st.sampled_from((1, 12, 64)), st.integers(2, 8))
def test_answers_are_valid_fit_and_come_best_first(cluster: Cluster, batch_size: int, layers: int) -> None:
    graph = dense_transformer(name="d", layers=layers, hidden=1024, heads=16, sequence=256, vocabulary=8192)
    planned = plan(graph, cluster, batch_size=batch_size, top=3)
    steps = []
    for candidate in planned.candidates:
        validate(candidate.plan, graph, cluster)
        assert candidate.cost.fits
        assert candidate.cost == cost(graph, cluster, candidate.plan)
        assert Plan.from_json(candidate.plan.to_json()) == candidate.plan
        steps.append(candidate.cost.step_seconds)
    assert steps == sorted(steps)
    assert planned.bottleneck
    assert planned.candidates[0].reasons


def test_the_same_question_gets_the_same_answer() -> None:
    cluster = make_cluster("c", [make_site("a", kind=[("V100-32GB", 4), ("P100-16GB", 4)], hosts=2)])
    graph = preset("bert-large").graph
    assert plan(graph, cluster, batch_size=64, top=3).candidates == plan(graph, cluster, batch_size=64, top=3).candidates


def test_unequal_devices_get_unequal_shares() -> None:
    cluster = make_cluster("c", [make_site("a", kind=[("V100-32GB", 4), ("P100-16GB", 4)], network="100 Gbit/s")])
    best = plan(preset("resnet50", precision="fp32").graph, cluster, batch_size=512).candidates[0]
    devices = [name for stage in best.plan.stages for name in stage.devices]
    assert len(devices) == 8
    (stage,) = best.plan.stages
    samples: dict[str, set[int]] = {}
    for replica in stage.replicas:
        for lane, count in enumerate(replica.samples):
            samples.setdefault(cluster.device(replica.devices[lane * stage.tensor]).kind.name, set()).add(count)
    assert min(samples["V100-32GB"]) > max(samples["P100-16GB"])


def far_apart() -> Cluster:
    """None of the sites holds the model by itself."""
    sites = [make_site(name, kind="A100-80GB", devices=1) for name in ("a", "b", "c")]
    return make_cluster("c", sites, default_link=("500 Mbit/s", "10 ms"))


def test_codecs_are_chosen_where_asked_on_links_that_activations_cross_and_save_time_there() -> None:
    graph, cluster = preset("gpt3-6.7b").graph, far_apart()
    planned = plan(graph, cluster, batch_size=32, codecs=("none", "bf16", "int8"), top=5)
    evaluator = Evaluator(graph, cluster)
    assert any(candidate.plan.codecs for candidate in planned.candidates)
    for candidate in planned.candidates:
        assert set(candidate.plan.codecs) <= evaluator.activation_links(candidate.plan)
        for link in candidate.plan.codecs:
            without = {other: codec for other, codec in candidate.plan.codecs.items() if other != link}
            assert evaluator.seconds(replace(candidate.plan, codecs=without)) > evaluator.seconds(candidate.plan)


def test_traffic_stays_exact_unless_a_codec_is_asked_for() -> None:
    planned = plan(preset("gpt3-6.7b").graph, far_apart(), batch_size=32, top=5)
    assert not any(candidate.plan.codecs for candidate in planned.candidates)


def test_a_codec_that_was_asked_for_is_on_every_link_that_activations_cross() -> None:
    graph, cluster = preset("gpt3-6.7b").graph, far_apart()
    for candidate in plan(graph, cluster, batch_size=32, codecs=("int4",), top=5).candidates:
        assert candidate.plan.codecs == dict.fromkeys(Evaluator(graph, cluster).activation_links(candidate.plan), "int4")


def test_nothing_fits_says_what_is_missing() -> None:
    cluster = make_cluster("tiny", [make_site("a", kind="T4", devices=2)])
    with pytest.raises(NoPlanError, match=r"gpt3-175b.*tiny.*out of memory.*need 2\.79 TB.*together have 3\d\.\d GB"):
        plan(preset("gpt3-175b").graph, cluster, batch_size=8)


def test_experts_are_divided_where_they_do_not_fit_otherwise() -> None:
    chosen = preset("m6-moe-1t")
    cluster = make_cluster("480 V100", [make_site("a", kind="V100-32GB", hosts=60, devices=8, network="50 Gbit/s")])
    best = plan(chosen.graph, cluster, batch_size=chosen.batch_size, optimizer=chosen.optimizer).candidates[0]
    assert best.cost.fits
    assert best.plan.stages[0].expert


def test_tensor_parallelism_stays_inside_hosts() -> None:
    cluster = make_cluster("c", [make_site("a", kind="A100-80GB", hosts=16, devices=8, network="100 Gbit/s")])
    best = plan(preset("gpt3-175b").graph, cluster, batch_size=256).candidates[0]
    for stage in best.plan.stages:
        for replica in stage.replicas:
            assert len({cluster.device(name).host for name in replica.devices[: stage.tensor]}) == 1
