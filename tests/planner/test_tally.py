"""What the planner says it looked at adds up."""

import pytest

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.graph import dense_transformer
from atoll.plan import Mode
from atoll.planner import Planned, plan
from atoll.planner.search import Tally

GRAPH = dense_transformer(name="d", layers=4, hidden=1024, heads=16, sequence=256, vocabulary=8192)
TIGHT = make_site("a", kind="A100-40GB", hosts=2, devices=4, memory="3 GB")
SPOT = make_site("b", kind="T4", hosts=12, devices=1, preemptions="2 /h")
CLUSTERS = [
    make_cluster("small", [make_site("a", kind="A100-40GB", devices=2)]),
    make_cluster("tight", [TIGHT]),
    make_cluster("spot", [SPOT]),
    make_cluster("wan", [TIGHT, SPOT], default_link=("10 Mbit/s", "50 ms")),
]


def ruled_out(planned: Planned) -> int:
    counted = [line.split(" × ")[0].replace(",", "") for line in planned.ruled_out if " × " in line]
    return sum(map(int, counted))


@pytest.mark.parametrize(("cluster", "mode"), [*((cluster, None) for cluster in CLUSTERS), (CLUSTERS[-1], "alone")])
def test_all_plans_considered_but_the_one_chosen_were_ruled_out(cluster: Cluster, mode: Mode | None) -> None:
    planned = plan(GRAPH, cluster, batch_size=64, mode=mode)
    assert planned.considered == ruled_out(planned) + 1
    assert planned.priced < planned.considered


def test_the_one_chosen_is_not_among_those_ruled_out() -> None:
    tally = Tally()
    tally.ruled_out["out of memory"] += 1500
    tally.priced = 3
    assert tally.considered == 1503
    assert tally.lines(True, "slower") == ("1,500 × out of memory", "2 × slower")
    assert tally.lines(False, "slower") == ("1,500 × out of memory", "3 × slower")


def test_reasons_that_ruled_nothing_out_are_not_told() -> None:
    tally = Tally()
    assert tally.reasons() == "no layout is possible"
    tally.ruled_out.update({"out of memory": 0, "fewer micro-batches than replicas": 1180})
    assert tally.reasons() == "fewer micro-batches than replicas (1,180)"
