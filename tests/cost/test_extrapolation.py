"""Steps too long to be played whole: extrapolated from shorter ones, against the whole."""

import random
from itertools import pairwise
from statistics import median

import pytest

from atoll.cost import Evaluator, timeline
from atoll.plan import Plan, Replica, Stage
from tests.cost.cases import dense_graph
from tests.plan.strategies import make_cluster


def long_plan(draw: random.Random) -> Plan:
    """Two to four stages, each with its own number of replicas and unequal shares of 300 to 700 micro-batches."""
    stages, total = draw.randint(2, 4), draw.randint(300, 700)
    names = [device.name for device in make_cluster(hosts=4, devices=4).devices]
    per_stage = len(names) // stages
    cuts = [0, *sorted(draw.sample(range(1, 8), stages - 1)), 8]
    rows = []
    for s in range(stages):
        width = draw.randint(1, per_stage)
        edges = [0, *sorted(draw.sample(range(1, total), width - 1)), total]
        own = names[s * per_stage :]
        replicas = [Replica(devices=(own[i],), samples=(2 * (b - a),)) for i, (a, b) in enumerate(pairwise(edges))]
        rows.append(Stage(start=cuts[s], stop=cuts[s + 1], replicas=tuple(replicas)))
    return Plan(graph="g", cluster="c", batch_size=2 * total, micro_batch_size=2, stages=tuple(rows))


def test_extrapolated_steps_are_close_to_those_played_whole() -> None:
    """Up to four times what is played anyway steps are not extrapolated; of longer ones, rounding of small shares shows in a few."""
    draw = random.Random(0)
    plans = [long_plan(draw) for _ in range(60)]
    graph, cluster = dense_graph(8), make_cluster(hosts=4, devices=4)
    extrapolated = [Evaluator(graph, cluster).seconds(plan) for plan in plans]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "_PLAYED_MICRO_BATCHES", 10**6)
        whole = [Evaluator(graph, cluster).seconds(plan) for plan in plans]
    errors = sorted(abs(a / b - 1) for a, b in zip(extrapolated, whole, strict=True))
    assert median(errors) < 0.001
    assert errors[len(errors) * 9 // 10] < 0.02
    assert errors[-1] < 0.05
