"""Orders: the classic ones where they apply, and for any workers at all what every schedule promises."""

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops, _get_warmup_ops

from atoll.cost.pipeline import NO_HOP, StageReplica, simulate
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import micro_batch_counts, route
from atoll.plan.schedule_policy import in_flight_bounds
from atoll.runtime.modes.lockstep.schedule import Action, Workers
from atoll.runtime.modes.lockstep.schedule_builder import compute_order, in_flight_limits, make_schedule, post_receives_early
from atoll.runtime.modes.lockstep.schedule_check import check
from atoll.runtime.modes.lockstep.trace import predict, step_seconds
from tests.runtime.modes.lockstep.schedule_cases import SCHEDULES, any_workers, column, columns, random_workers

seconds = st.sampled_from([0.5, 1.0, 1.5, 4.0])


def words(row: list[Action]) -> str:
    return " ".join(map(str, row))


@given(any_workers, SCHEDULES)
def test_every_schedule_keeps_its_promises(workers: Workers, name: str) -> None:
    keeps_its_promises(workers, name)


def test_a_thousand_schedules_keep_their_promises() -> None:
    random_numbers = random.Random(3)
    for _ in range(1000):
        keeps_its_promises(random_workers(random_numbers), random_numbers.choice(["gpipe", "1f1b", "interleaved"]))


def keeps_its_promises(workers: Workers, name: str) -> None:
    schedule = make_schedule(name, workers)
    limits = in_flight_limits(name, workers)
    computed = [(worker, action) for worker, row in enumerate(schedule.actions) for action in row if action.computes]
    pairs = product(range(workers.stages), range(workers.micro_batches))
    assert sorted(computed) == sorted((workers.home(s, m), Action(kind, s, m)) for s, m in pairs for kind in ("F", "B"))
    for (s, homes), r in ((pair, r) for pair in enumerate(workers.homes) for r in range(len(pair[1]))):
        held = most = 0
        for action in schedule[homes[r]]:
            held += (action.stage == s) * {"F": 1, "B": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most <= limits[s][r]
    check(schedule, workers)


@given(any_workers, SCHEDULES)
def test_schedules_are_the_same_every_time(workers: Workers, name: str) -> None:
    assert make_schedule(name, workers) == make_schedule(name, workers)


@given(any_workers, SCHEDULES, st.integers(0, 3))
def test_receives_posted_early_keep_every_promise(workers: Workers, name: str, ahead: int) -> None:
    schedule = make_schedule(name, workers)
    early = post_receives_early(schedule, ahead)
    check(early, workers)
    for row, moved in zip(schedule.actions, early.actions, strict=True):
        assert sorted(row) == sorted(moved)
        assert [a for a in row if not a.receives] == [a for a in moved if not a.receives]
    assert post_receives_early(schedule, 0) == schedule


@given(columns(), SCHEDULES)
def test_in_columns_sends_may_block_where_receives_are_posted_one_ahead(workers: Workers, name: str) -> None:
    check(post_receives_early(make_schedule(name, workers)), workers, rendezvous=True)
    check(make_schedule("gpipe", workers), workers, rendezvous=True)


@given(st.integers(1, 6), st.integers(1, 9))
def test_in_a_column_gpipe_and_1f1b_are_the_classic_orders(depth: int, count: int) -> None:
    workers = column(depth, count)
    for s in range(depth):
        forwards, backwards = [f"{s}F{m}" for m in range(count)], [f"{s}B{m}" for m in range(count)]
        assert words(compute_order("gpipe", workers)[s]) == " ".join(forwards + backwards)
        warm_up = min(count, depth - 1 - s)
        steady = [word for pair in zip(forwards[warm_up:], backwards, strict=False) for word in pair]
        assert words(compute_order("1f1b", workers)[s]) == " ".join(forwards[:warm_up] + steady + backwards[count - warm_up :])


@pytest.mark.parametrize(("depth", "rounds", "blocks"), [(2, 2, 3), (3, 2, 2), (4, 3, 2), (2, 4, 1), (4, 2, 3)])
def test_interleaved_is_the_order_of_torch(depth: int, rounds: int, blocks: int) -> None:
    count = depth * blocks
    order = compute_order("interleaved", column(depth, count, rounds))
    for rank in range(depth):
        warm_up = _get_warmup_ops(rank, rounds, depth, depth, count)
        theirs = _get_1f1b_rank_ops(
            rounds, depth, warm_up, rounds * count - warm_up, warm_up, rank,
            lambda step, rank=rank: step // depth % rounds * depth + rank,
            lambda step, rank=rank, warm_up=warm_up: (rounds - 1 - (step - warm_up) // depth % rounds) * depth + rank,
        )  # fmt: skip
        assert words(order[rank]) == " ".join(str(op) for op in theirs if op is not None)


@pytest.mark.parametrize(("depth", "rounds", "count"), [(2, 2, 8), (4, 2, 12), (3, 3, 9)])
def test_interleaving_divides_the_bubble(depth: int, rounds: int, count: int) -> None:
    schedule = make_schedule("interleaved", column(depth, count, rounds))
    seconds = step_seconds(predict(schedule, lambda _, action: {"F": 1.0, "B": 2.0}.get(action.kind, 0.0)))
    assert seconds == 3 * (rounds * count + depth - 1)  # as Megatron-LM's paper has it: (p - 1)/v of a micro-batch's time


def test_columns_of_virtual_stages_are_each_a_pipeline() -> None:
    one = compute_order("interleaved", column(2, 4, 2))
    two = compute_order("interleaved", Workers(((0, 1), (2, 3), (0, 1), (2, 3)), ((0, 1) * 4,) * 4))
    for worker, row in enumerate(two):
        assert [Action(a.kind, a.stage, a.micro_batch // 2) for a in row] == one[worker // 2]


def plan_of(schedule: str, workers: Workers) -> Plan:
    stages = tuple(
        Stage(start=s, stop=s + 1, replicas=tuple(Replica(devices=(f"d{w}",), samples=(row.count(r) * 3,)) for r, w in enumerate(homes)))
        for s, (homes, row) in enumerate(zip(workers.homes, workers.route, strict=True))
    )
    return Plan(graph="g", cluster="c", batch_size=workers.micro_batches * 3, micro_batch_size=3, stages=stages, schedule=schedule)


@given(any_workers, SCHEDULES)
def test_limits_are_those_that_memory_is_planned_for(workers: Workers, name: str) -> None:
    plan = plan_of(name, workers)
    planned, counts = in_flight_bounds(plan), micro_batch_counts(plan)
    assert in_flight_limits(name, workers) == [
        [max(b, min(1, n)) for b, n in zip(*rows, strict=True)] for rows in zip(planned, counts, strict=True)
    ]


@pytest.mark.parametrize(("counts"), [[(3, 3), (6,)], [(5, 1), (2, 2, 2)], [(12,), (4, 4, 4), (6, 6)], [(7, 3), (10,), (2, 8)]])
def test_irregular_orders_take_no_longer_than_the_cost_model_says(counts: list[tuple[int, ...]]) -> None:
    routes = [route(row) for row in counts]
    homes: list[tuple[int, ...]] = []
    for row in counts:
        first = homes[-1][-1] + 1 if homes else 0
        homes.append(tuple(range(first, first + len(row))))
    workers = Workers(tuple(homes), tuple(routes))
    simulated = [[StageReplica(1.0, 2.0, home) for home in row] for row in homes]
    hops = [dict.fromkeys(product(range(len(a)), range(len(b))), NO_HOP) for a, b in pairwise(counts)]
    limits = [limit for row in in_flight_limits("1f1b", workers) for limit in row]
    predicted = simulate(simulated, routes, hops, hops, "1f1b", limits).seconds
    schedule = make_schedule("1f1b", workers)
    assert step_seconds(predict(schedule, lambda _, action: {"F": 1.0, "B": 2.0}.get(action.kind, 0.0))) <= predicted


def test_one_stage_sends_nothing() -> None:
    workers = Workers(((0, 1),), ((0, 0, 1),))
    assert str(make_schedule("1f1b", workers)) == "0: 0F0 0B0 0F1 0B1 0G O\n1: 0F2 0B2 0G O"
    assert str(make_schedule("gpipe", workers)) == "0: 0F0 0F1 0B0 0B1 0G O\n1: 0F2 0B2 0G O"


def test_stages_of_one_worker_hand_over_by_themselves() -> None:
    assert str(make_schedule("interleaved", Workers(((0,), (0,)), ((0,), (0,))))) == "0: 0F0 1F0 1B0 1G 0B0 0G O"


def test_a_replica_without_a_micro_batch_still_synchronises() -> None:
    assert make_schedule("1f1b", Workers(((0, 1),), ((0, 0),)))[1] == (Action("G", 0), Action("O"))
    assert str(make_schedule("1f1b", Workers(((0,), (1,)), ((), ())))) == "0: 0G O\n1: 1G O"
