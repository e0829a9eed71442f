"""The planner is never slower than what an engineer would try by hand. (`by_hand.py` shares nothing with it but the nouns.)"""

import pytest

from atoll.cluster import Cluster
from atoll.cost import Evaluator
from atoll.errors import NoPlanError, PlanError
from atoll.graph import Graph
from atoll.plan import Plan, validate
from atoll.plan.division import has_empty_lane
from atoll.planner import plan
from tests.planner.by_hand import hand_plans, random_problem

SLOWER_ONCE = (8, 38, 57, 67, 136, 178, 196, 209, 274, 375, 427, 440, 457, 473, 492)  # by up to 30%, before baselines knew such plans


def is_possible(candidate: Plan, graph: Graph, cluster: Cluster) -> bool:
    try:
        validate(candidate, graph, cluster)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("seed", sorted({*range(25), *SLOWER_ONCE}))
def test_no_hand_made_plan_is_faster(seed: int) -> None:
    graph, cluster, batch = random_problem(seed)
    evaluator = Evaluator(graph, cluster)
    possible = [one for one in hand_plans(graph, cluster, batch) if is_possible(one, graph, cluster) and not has_empty_lane(one)]
    by_hand = [one for one in possible if evaluator.fits(one)]
    try:
        best = plan(graph, cluster, batch_size=batch, mode="lockstep").candidates[0]
    except NoPlanError:
        assert not by_hand
        return
    validate(best.plan, graph, cluster)
    limit = best.cost.step_seconds * (1 - 1e-9)
    hopeful = [one for one in by_hand if evaluator.seconds(one) < limit]
    faster = [one for one in hopeful if evaluator.cost(one).step_seconds < limit]
    assert not faster, f"{best.cost.step_seconds} s:\n{best.plan}but {evaluator.cost(faster[0]).step_seconds} s:\n{faster[0]}"
