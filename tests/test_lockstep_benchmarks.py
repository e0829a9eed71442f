"""The pure parts of the lockstep benchmarks: rates, ideal gains, and plans that are what the benchmark says they are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import lockstep_imposed
import lockstep_links

from atoll import capture
from atoll.cost import Evaluator
from atoll.graph import Graph
from atoll.plan import validate


def test_rates_are_read() -> None:
    assert lockstep_links.rate_bits("1gbit") == 1e9
    assert lockstep_links.rate_bits("200mbit") == 2e8
    with pytest.raises(ValueError, match="gbit or mbit"):
        lockstep_links.rate_bits("1")


@pytest.mark.parametrize(("speeds", "gain"), [((3, 1), 2.0), ((3, 3, 1, 1), 2.0), ((1, 1), 1.0), ((4, 1, 1), 2.0)])
def test_the_ideal_gain_is_that_of_work_divided_at_will(speeds: tuple[int, ...], gain: float) -> None:
    assert lockstep_imposed.ideal_gain(speeds) == pytest.approx(gain)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(lockstep_imposed.plain_job())


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_both_plans_are_lawful_and_the_aware_one_is_predicted_to_be_faster(graph: Graph, layout: str) -> None:
    speeds = (3, 1)
    pair = lockstep_imposed.pair_of(layout, speeds, capture)
    cluster = lockstep_imposed.imposed_cluster(speeds)
    for plan in (pair.equal, pair.aware):
        validate(plan, graph, cluster)
        assert len(plan.stages) == (1 if layout == "data" else 2)
    evaluator = Evaluator(graph, cluster)
    assert evaluator.seconds(pair.equal) > 1.5 * evaluator.seconds(pair.aware)
    if layout == "data":
        assert [replica.total_samples for replica in pair.equal.stages[0].replicas] == [16, 16]
        assert [replica.total_samples for replica in pair.aware.stages[0].replicas] == [24, 8]
    else:
        assert [(stage.start, stage.stop) for stage in pair.equal.stages] == [(0, 9), (9, 18)]
