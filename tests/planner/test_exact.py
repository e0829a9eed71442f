"""The planner against the exhaustive search of the benchmark, which shares nothing with it but the cost model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from optimality import INFINITE, exhaustive
from small_instances import random_instance

from atoll.cluster import Cluster
from atoll.cost import Evaluator
from atoll.errors import NoPlanError
from atoll.graph import Graph
from atoll.planner import plan


def test_synchronisation_runs_beside_the_backward_of_earlier_stages() -> None:
    """A bound that added both up once called a plan the best that was 6% off it."""
    assert_nothing_is_faster(*random_instance(146))


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_no_plan_of_the_space_is_faster(seed: int) -> None:
    assert_nothing_is_faster(*random_instance(seed, most_devices=3, most_layers=4))


def assert_nothing_is_faster(graph: Graph, cluster: Cluster, batch: int) -> None:
    try:
        planned = plan(graph, cluster, batch_size=batch, codecs=("none", "bf16", "int8"))
        ours = planned.candidates[0].cost.step_seconds
        assert planned.exact
    except NoPlanError:
        ours = INFINITE
    best, plans, _ = exhaustive(Evaluator(graph, cluster), batch, ours)
    assert plans > 0
    assert ours == best == INFINITE or ours <= best * (1 + 1e-9)
