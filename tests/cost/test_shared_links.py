"""Links that several replicas share, priced alike whether micro-batches run in columns or are routed one by one."""

import random
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Calibration, Evaluator
from atoll.cost.columns import play_columns
from atoll.cost.context import PricingContext
from atoll.cost.replica import ReplicaPrices
from atoll.cost.timeline import play_routed
from atoll.cost.transfer import SharedLinks, Transfers
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import micro_batch_counts
from tests.cost.cases import dense_graph

GRAPH = dense_graph(10)


def slow_links(speed: float, kind: str) -> Cluster:
    """Two sites of two hosts whose interfaces, and the link between them, are slow enough to matter."""
    oslo = make_site("oslo", kind="A100-80GB", hosts=2, devices=4, network=f"{2 * speed} Gbit/s", latency="10 us")
    rome = make_site("rome", kind=kind, hosts=2, devices=4, network=f"{speed} Gbit/s", latency="20 us")
    return make_cluster("c", [oslo, rome], default_link=(f"{speed} Gbit/s", "1 ms"))


def equal_shares(draw: random.Random, cluster: Cluster, width: int, shuffled: bool) -> Plan:
    """Two to four stages of as many replicas, on devices in order or in any, each with the same share."""
    stages = draw.randint(2, 16 // max(4, width))
    rounds, micro_batch = draw.randint(1, 12), draw.choice([1, 2, 4])
    names = [device.name for device in cluster.devices]
    if shuffled:
        draw.shuffle(names)
    cuts = [0, *sorted(draw.sample(range(1, 10), stages - 1)), 10]
    rows = []
    for s in range(stages):
        own = names[s * width : (s + 1) * width]
        replicas = tuple(Replica(devices=(name,), samples=(rounds * micro_batch,)) for name in own)
        rows.append(Stage(start=cuts[s], stop=cuts[s + 1], replicas=replicas))
    return Plan(
        graph="g",
        cluster="c",
        batch_size=width * rounds * micro_batch,
        micro_batch_size=micro_batch,
        stages=tuple(rows),
        schedule="gpipe" if draw.random() < 0.3 else "1f1b",
        codecs={"oslo–rome": "int8"} if draw.random() < 0.3 else {},
    )


@given(st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 10.0]), st.integers(1, 8), st.booleans())
def test_columns_take_as_long_as_when_they_are_routed_one_by_one(seed: int, speed: float, width: int, shuffled: bool) -> None:
    cluster = slow_links(speed, "V100-32GB")
    plan = equal_shares(random.Random(seed), cluster, width, shuffled)
    setting = PricingContext(GRAPH, cluster, "adamw", Calibration())
    transfers, prices = Transfers(setting), ReplicaPrices(setting)
    places, counts = setting.places(plan), micro_batch_counts(plan)
    replicas = [
        prices.stage(stage, place, [float(plan.micro_batch_size)] * len(place.groups))
        for stage, place in zip(plan.stages, places, strict=True)
    ]
    columns = play_columns(transfers, plan, places, replicas, counts[0], only_step=False)
    routed = play_routed(transfers, plan, places, replicas, counts, counts)
    for a, b in zip(columns.finish, routed.finish, strict=True):
        assert max(a) == pytest.approx(max(b), rel=1e-9)
    assert columns.in_flight == routed.in_flight
    for a, b in zip(columns.busy, routed.busy, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_nearly_equal_shares_take_nearly_as_long(speed: float) -> None:
    """One micro-batch more or less on one replica of one stage: its own work, and no jump between two ways of counting.

    Single plans may gain (a larger share may hold one micro-batch more, which hides transfers) or lose (micro-batches leave their columns).
    """
    cluster = slow_links(speed, "A100-80GB")
    evaluator = Evaluator(GRAPH, cluster)
    draw = random.Random(int(speed * 10))
    ratios: list[float] = []
    while len(ratios) < 40:
        plan = equal_shares(draw, cluster, 4, shuffled=False)
        s = draw.randrange(len(plan.stages))
        stage = plan.stages[s]
        rounds = stage.replicas[0].total_samples // plan.micro_batch_size
        if rounds < 4:
            continue
        first, second, *rest = stage.replicas
        shifted = [
            msgspec.structs.replace(replica, samples=(replica.samples[0] + change * plan.micro_batch_size,))
            for replica, change in ((first, 1), (second, -1))
        ]
        stages = [*plan.stages[:s], msgspec.structs.replace(stage, replicas=(*shifted, *rest)), *plan.stages[s + 1 :]]
        ratios.append(evaluator.seconds(msgspec.structs.replace(plan, stages=tuple(stages))) / evaluator.seconds(plan))
    assert 0.95 < median(ratios) < 1.05


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10.0)), min_size=1, max_size=8))
def test_the_busiest_holds_a_link_for_what_all_need(users: list[tuple[int, float]]) -> None:
    links = SharedLinks()
    for times, seconds in users:
        links.add("link", times, seconds)
    busiest = max(times for times, _ in users)
    assert busiest * links.occupancy("link", busiest) == pytest.approx(sum(times * seconds for times, seconds in users))
    for times, seconds in users:
        assert links.occupancy("link", times) >= seconds * (1 - 1e-9)
