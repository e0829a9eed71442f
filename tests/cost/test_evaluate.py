"""What must hold of any plan's price, and the cases that once were wrong."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.cluster import Cluster, Link
from atoll.cost import Calibration, Evaluator, cost
from atoll.cost.communication import all_reduce_seconds
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from tests.cost.cases import cases, data_parallel, dense_graph, divided_alike, pipeline, renamed, with_devices, with_links
from tests.plan.strategies import make_cluster

Case = tuple[Plan, Graph, Cluster]
SLACK = 1 + 1e-9


@given(cases(), st.floats(0.0, 0.1))
def test_breakdown_sums_to_the_step_and_nothing_is_negative(case: Case, jitter: float) -> None:
    plan, graph, cluster = case
    evaluator = Evaluator(graph, cluster, calibration=Calibration(jitter=jitter, step_seconds=0.01))
    found = evaluator.cost(plan)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds, rel=1e-6)
    assert all(seconds > 0 for seconds in found.breakdown.values())
    assert evaluator.seconds(plan) == pytest.approx(found.step_seconds, rel=1e-12)
    assert found.samples_per_second == pytest.approx(plan.batch_size / found.step_seconds)
    assert found.step_seconds >= max(stage.busy_seconds for stage in found.stages)


@given(cases())
def test_what_an_evaluator_remembers_changes_nothing(case: Case) -> None:
    plan, graph, cluster = case
    warm = Evaluator(graph, cluster)
    for stage in plan.stages:  # parts of the plan in another company
        other = msgspec.structs.replace(stage, replicas=stage.replicas[::-1])
        warm.seconds(msgspec.structs.replace(plan, stages=tuple(other if s is stage else s for s in plan.stages)))
    assert warm.cost(plan) == cost(graph, cluster, plan)


@given(cases(), st.data())
def test_a_faster_device_never_makes_a_slower_step(case: Case, data: st.DataObject) -> None:
    plan, graph, cluster = case
    assume(divided_alike(plan))
    name = data.draw(st.sampled_from([device.name for device in cluster.devices]))
    faster = with_devices(cluster, lambda d: msgspec.structs.replace(d, speed=d.speed * (3 if d.name == name else 1)))
    assert Evaluator(graph, faster).seconds(plan) <= Evaluator(graph, cluster).seconds(plan) * SLACK


@given(cases())
def test_wider_links_never_make_a_slower_step_and_longer_ones_never_a_faster(case: Case) -> None:
    plan, graph, cluster = case
    assume(divided_alike(plan))
    now = Evaluator(graph, cluster).seconds(plan)
    wider = with_links(cluster, lambda link: msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s * 2))
    longer = with_links(cluster, lambda link: msgspec.structs.replace(link, latency_s=link.latency_s * 2))
    assert Evaluator(graph, wider).seconds(plan) <= now * SLACK
    assert Evaluator(graph, longer).seconds(plan) >= now / SLACK


@given(cases())
def test_recomputation_is_never_faster_and_never_takes_more_memory(case: Case) -> None:
    plan, graph, cluster = case
    evaluator = Evaluator(graph, cluster)

    def with_recompute(value: bool) -> Plan:
        return msgspec.structs.replace(plan, stages=tuple(msgspec.structs.replace(stage, recompute=value) for stage in plan.stages))

    without, again = with_recompute(False), with_recompute(True)
    if divided_alike(plan):
        assert evaluator.seconds(again) >= evaluator.seconds(without) / SLACK
    least, most = evaluator.memory(again), evaluator.memory(without)
    assert all(least[name].total_bytes <= most[name].total_bytes * SLACK for name in most)


@given(cases())
def test_names_do_not_matter(case: Case) -> None:
    plan, graph, cluster = case
    known: dict[str, str] = {}
    other_plan, other_cluster = renamed(plan, cluster, lambda old: known.setdefault(old, f"z{len(known):03}"))
    assert Evaluator(graph, other_cluster).seconds(other_plan) == pytest.approx(Evaluator(graph, cluster).seconds(plan), rel=1e-9)


@given(cases())
def test_order_of_hosts_and_sites_in_the_cluster_does_not_matter(case: Case) -> None:
    plan, graph, cluster = case
    sites = [msgspec.structs.replace(site, hosts=site.hosts[::-1]) for site in cluster.sites[::-1]]
    turned = msgspec.structs.replace(cluster, sites=tuple(sites))
    assert Evaluator(graph, turned).seconds(plan) == pytest.approx(Evaluator(graph, cluster).seconds(plan), rel=1e-9)


@given(cases())
def test_order_of_columns_does_not_matter(case: Case) -> None:
    plan, graph, cluster = case
    assume(divided_alike(plan))
    turned = [msgspec.structs.replace(stage, replicas=stage.replicas[::-1]) for stage in plan.stages]
    other = msgspec.structs.replace(plan, stages=tuple(turned))
    assert Evaluator(graph, cluster).seconds(other) == pytest.approx(Evaluator(graph, cluster).seconds(plan), rel=1e-9)


@given(cases())
def test_one_device_has_no_communication(case: Case) -> None:
    _, graph, cluster = case
    plan = data_parallel([8], [cluster.devices[0].name], 2, len(graph.layers))
    found = cost(graph, cluster, plan)
    assert found.link_bytes == {}
    assert set(found.breakdown) <= {"compute", "optimizer"}


def uneven_devices(slow: float) -> tuple[Cluster, list[str]]:
    cluster = make_cluster(hosts=1, devices=4)
    names = [device.name for device in cluster.devices]
    return with_devices(cluster, lambda d: msgspec.structs.replace(d, speed=slow if d.name in names[2:] else 1.0)), names


@pytest.mark.parametrize("slow", [0.25, 0.5])
def test_shares_in_proportion_to_speed_beat_equal_ones(slow: float) -> None:
    cluster, names = uneven_devices(slow)
    graph = dense_graph(6)
    fast_share = round(64 / (1 + slow) / 2)
    aware = data_parallel([fast_share, fast_share, 32 - fast_share, 32 - fast_share], names, 1, 6)
    equal = data_parallel([16] * 4, names, 1, 6)
    evaluator = Evaluator(graph, cluster)
    assert evaluator.seconds(aware) < evaluator.seconds(equal)


def two_sites() -> tuple[Cluster, list[str]]:
    cluster = make_cluster(hosts=2, devices=2, sites=2)
    return cluster, [device.name for device in cluster.devices]


def test_the_slowest_group_counts_not_the_first() -> None:
    """Tensor positions 0 are together in one site, positions 1 in two: the gradients of position 1 cross the link between them."""
    cluster, names = two_sites()
    graph = dense_graph(6)
    a, b, c, _, e, _, _, _ = names
    split = Stage(start=0, stop=6, tensor=2, replicas=(Replica(devices=(a, b), samples=(4,)), Replica(devices=(c, e), samples=(4,))))
    turned = msgspec.structs.replace(split, replicas=(Replica(devices=(b, a), samples=(4,)), Replica(devices=(e, c), samples=(4,))))
    fields = {"graph": "g", "cluster": "c", "batch_size": 8, "micro_batch_size": 4}
    evaluator = Evaluator(graph, cluster)
    one, other = (evaluator.cost(Plan(**fields, stages=(stage,))) for stage in (split, turned))  # type: ignore[arg-type]
    assert one.step_seconds == pytest.approx(other.step_seconds)
    assert one.stages[0].sync_seconds == pytest.approx(other.stages[0].sync_seconds)
    assert one.link_bytes["s0–s1"] == pytest.approx(other.link_bytes["s0–s1"])
    assert one.stages[0].sync_seconds > 0.01


def test_a_lane_across_sites_is_slow_whichever_replica_has_it() -> None:
    """A replica's all-reduces used to be priced by the first lane of its stage."""
    cluster, names = two_sites()
    graph = dense_graph(6)
    inside, across = Replica(devices=(names[0], names[2]), samples=(4,)), Replica(devices=(names[1], names[4]), samples=(4,))
    evaluator = Evaluator(graph, cluster)
    for replicas in ((inside, across), (across, inside)):
        stage = Stage(start=0, stop=6, tensor=2, replicas=replicas)
        assert evaluator.replica_seconds(stage, across, 4).tensor > 5 * evaluator.replica_seconds(stage, inside, 4).tensor


def test_stages_that_share_an_interface_share_it_by_their_bytes() -> None:
    """Two stages, each with a replica on either host: a large stage hardly waits for a small one, a small one for its like."""
    cluster = make_cluster(hosts=2, devices=2)
    names = [device.name for device in cluster.devices]
    graph = dense_graph(10, tied=False)
    devices = [[names[0], names[2]], [names[1], names[3]]]
    evaluator = Evaluator(graph, cluster)

    def alone(start: int, stop: int) -> float:
        stage = Stage(start=start, stop=stop, replicas=tuple(Replica(devices=(name,), samples=(4,)) for name in devices[0]))
        span = evaluator.sync_span(stage, False)
        assert span is not None
        return all_reduce_seconds(span, evaluator.sync_volumes(stage)[0][1], evaluator.calibration)

    halves = evaluator.cost(pipeline([0, 5, 10], devices, 8, 1)).stages
    assert halves[0].sync_seconds == pytest.approx(2 * alone(0, 5), rel=0.1)
    uneven = evaluator.cost(pipeline([0, 1, 10], devices, 8, 1)).stages
    assert uneven[1].sync_seconds < 1.2 * alone(1, 10)
    assert uneven[0].sync_seconds == pytest.approx(2 * alone(0, 1), rel=0.2)


def test_a_replica_over_two_hosts_sends_through_both_interfaces() -> None:
    cluster = make_cluster(hosts=4, devices=1)
    names = [device.name for device in cluster.devices]
    graph = dense_graph(6)

    def plan(lanes: int) -> Plan:
        stages = [
            Stage(start=start, stop=stop, replicas=(Replica(devices=tuple(own), samples=(8 // lanes,) * lanes),))
            for start, stop, own in ((0, 3, names[:lanes]), (3, 6, names[2 : 2 + lanes]))
        ]
        return Plan(graph="g", cluster="c", batch_size=8, micro_batch_size=8, stages=tuple(stages))

    evaluator = Evaluator(graph, cluster)
    one, two = (evaluator.cost(plan(lanes)).stages[0].transfer_seconds for lanes in (1, 2))
    latency = cluster.sites[0].link.latency_s
    assert two - latency == pytest.approx((one - latency) / 2)


def test_columns_of_unequal_shares_each_run_as_their_own_pipeline() -> None:
    cluster, names = two_sites()
    graph = dense_graph(6)
    evaluator = Evaluator(graph, cluster)

    def plan(shares: tuple[int, ...]) -> Plan:
        stages = [
            Stage(start=start, stop=stop, replicas=tuple(Replica(devices=(n,), samples=(s,)) for n, s in zip(own, shares, strict=True)))
            for start, stop, own in ((0, 3, names[0:1] + names[4:5]), (3, 6, names[1:2] + names[5:6]))
        ]
        stages = [msgspec.structs.replace(stage, replicas=stage.replicas[: len(shares)]) for stage in stages]
        return Plan(graph="g", cluster="c", batch_size=sum(shares), micro_batch_size=1, stages=tuple(stages))

    busiest = max(stage.busy_seconds for stage in evaluator.cost(plan((48, 16))).stages)
    assert busiest == pytest.approx(max(stage.busy_seconds for stage in evaluator.cost(plan((48, 48))).stages))


@pytest.mark.parametrize("shares", [((300, 212), (256, 256)), ((400, 112), (170, 171, 171))])
def test_a_long_step_is_extrapolated_to_what_playing_it_gives(shares: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(hosts=1, devices=8)
    names = [device.name for device in cluster.devices]
    graph = dense_graph(6)
    stages = []
    for (start, stop), first, row in zip(((0, 3), (3, 6)), (0, 4), shares, strict=True):
        replicas = tuple(Replica(devices=(names[first + i],), samples=(share,)) for i, share in enumerate(row))
        stages.append(Stage(start=start, stop=stop, replicas=replicas))
    plan = Plan(graph="g", cluster="c", batch_size=512, micro_batch_size=1, stages=tuple(stages))
    extrapolated = Evaluator(graph, cluster).seconds(plan)
    monkeypatch.setattr("atoll.cost.timeline._PLAYED_MICRO_BATCHES", 512)
    assert extrapolated == pytest.approx(Evaluator(graph, cluster).seconds(plan), rel=0.01)


def test_a_codec_pays_on_a_slow_link_and_is_named_in_the_breakdown() -> None:
    cluster, names = two_sites()
    slow = with_links(cluster, lambda link: msgspec.structs.replace(link, bytes_per_s=1e6) if "–" in link.name else link)
    plan = pipeline([0, 3, 6], [names[:1], names[4:5]], 16, 1)
    coded = msgspec.structs.replace(plan, codecs={"s0–s1": "int8"})
    evaluator = Evaluator(dense_graph(6), slow)
    assert evaluator.seconds(coded) < evaluator.seconds(plan)
    assert evaluator.cost(coded).breakdown["codec"] > 0


def test_money_is_time_times_devices_and_bytes_times_links() -> None:
    cluster, names = two_sites()
    priced = with_devices(cluster, lambda d: msgspec.structs.replace(d, price_per_hour=3.6))
    priced = with_links(priced, lambda link: msgspec.structs.replace(link, price_per_byte=1e-9) if "–" in link.name else link)
    found = cost(dense_graph(6), priced, data_parallel([4, 4], [names[0], names[4]], 1, 6))
    assert found.dollars_per_step == pytest.approx(2 * 1e-3 * found.step_seconds + 1e-9 * found.link_bytes["s0–s1"])


def test_a_narrow_interface_bounds_what_crosses_between_sites() -> None:
    cluster, names = two_sites()
    plan = pipeline([0, 3, 6], [names[:1], names[4:5]], 16, 1)

    def narrow(link: Link) -> Link:
        rates = {"s0": 1e6, "s1": 1e6, "s0–s1": 1e8}
        return msgspec.structs.replace(link, bytes_per_s=rates.get(link.name, link.bytes_per_s))

    graph = dense_graph(6)
    sent = graph.layers[2].output_bytes
    assert cost(graph, with_links(cluster, narrow), plan).stages[0].transfer_seconds >= sent / 1e6
