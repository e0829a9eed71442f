"""Layouts of random plans: every sample of the batch is computed once by every stage, and everybody gets the share the plan says."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.errors import PlanError
from atoll.graph.graph import Graph, Layer
from atoll.plan import Plan, parse_plan
from atoll.plan.division import apportion
from atoll.runtime.modes.lockstep.layout import Layout

from .equality_random import random_plan

GRAPH = Graph.from_layers("g", [Layer(name=f"{i}", tensor_units=12, experts=4 if i == 2 else 0) for i in range(6)])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return random_plan(GRAPH, draw(st.integers(2, 17)), draw(st.integers(0, 2**32)))


def layout_of(plan: Plan) -> Layout:
    try:
        return Layout(plan)
    except PlanError as error:
        assume("gets no sample" not in str(error))
        raise


@given(plans())
def test_every_stage_computes_every_sample_once(plan: Plan) -> None:
    layout = layout_of(plan)
    for stage in range(len(plan.stages)):
        pieces = sorted(piece for m in range(len(layout.micro_batches)) for piece in layout.pieces(stage, m))
        assert [sample for start, stop in pieces for sample in range(start, stop)] == list(range(plan.batch_size))


@given(plans())
def test_replicas_and_lanes_get_the_plans_shares(plan: Plan) -> None:
    layout = layout_of(plan)
    for s, stage in enumerate(plan.stages):
        for r, replica in enumerate(stage.replicas):
            rows = [layout.pieces(s, m) for m in layout.micro_batches_of(s, r)]
            assert tuple(sum(row[lane][1] - row[lane][0] for row in rows) for lane in range(stage.lanes)) == replica.samples


@given(plans())
def test_micro_batches_are_in_order_and_of_at_most_the_plans_size(plan: Plan) -> None:
    layout = layout_of(plan)
    assert layout.micro_batches[0][0] == 0
    assert layout.micro_batches[-1][1] == plan.batch_size
    assert all(before[1] == after[0] for before, after in pairwise(layout.micro_batches))
    assert all(0 < stop - start <= plan.micro_batch_size for start, stop in layout.micro_batches)


@given(plans())
def test_ranks_and_places_name_each_other(plan: Plan) -> None:
    layout = layout_of(plan)
    for rank, device in enumerate(layout.devices):
        assert layout.rank_of_device(device) == rank
        assert [layout.rank(place) for place in layout.places(rank)] == [rank] * len(layout.places(rank))
        for place in layout.places(rank):
            replica = plan.stages[place.stage].replicas[place.replica]
            assert layout.homes[place.stage][place.replica] == layout.worker_of(rank) == layout.workers[replica.devices]
    assert sum(len(layout.places(rank)) for rank in range(layout.world_size)) == sum(len(stage.devices) for stage in plan.stages)


@given(st.integers(0, 100), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_apportioning_is_whole_and_fair(total: int, weights: list[int]) -> None:
    assume(sum(weights) > 0)
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))


def test_the_short_micro_batch_goes_to_the_replica_whose_share_is_not_whole() -> None:
    text = "plan v1 graph=g cluster=c schedule=1f1b batch=7 micro_batch=2\nstage 0: layers 0-2: a=7\nstage 1: layers 3-5: b=3 c=4\n"
    layout = Layout(parse_plan(text))
    assert layout.micro_batches == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert layout.route[1][-1] == 0
    assert sorted(layout.route[1]) == [0, 0, 1, 1]


def test_a_share_is_cut_evenly_where_lanes_divide_it() -> None:
    layout = Layout(parse_plan("plan v1 graph=g cluster=c schedule=1f1b batch=8 micro_batch=4\nstage 0: layers 0-5: (a b)=3,2 (c d)=2,1\n"))
    assert layout.micro_batches == ((0, 3), (3, 5), (5, 8))
    assert [layout.pieces(0, m) for m in range(3)] == [((0, 2), (2, 3)), ((3, 4), (4, 5)), ((5, 7), (7, 8))]


def test_a_lane_without_work_is_refused_with_advice() -> None:
    plan = parse_plan("plan v1 graph=g cluster=c schedule=1f1b batch=8 micro_batch=2\nstage 0: layers 0-5: (a b)=7,1\n")
    with pytest.raises(
        PlanError, match=r"stage 0, replica 0: lane 1 gets no sample of micro-batch 0 .*lanes take 7, 1.*larger or lanes more"
    ):
        Layout(plan)
