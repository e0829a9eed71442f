"""Moves: only where they pay, never flapping, never emptying a stage."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.membership import Members
from atoll.control.messages import WorkerBeat
from atoll.control.rebalancing import Move, RatedPeer, best_throughput, move_at_once, place, plan_moves, throughput
from atoll.control.settings import Settings

Rows = list[list[RatedPeer]]


def rows(*counts: int, speed: float = 1.0) -> Rows:
    return [[RatedPeer(f"s{stage}p{i}", speed) for i in range(count)] for stage, count in enumerate(counts)]


def plan(stages: Rows, work: list[float] | None = None, minimum: int = 1) -> tuple[Move, ...]:
    return plan_moves(stages, work or [1.0] * len(stages), migration_seconds=10, horizon_seconds=300, minimum_replicas=minimum)


def carried_out(stages: Rows, moves: tuple[Move, ...]) -> Rows:
    after = [list(row) for row in stages]
    for move in moves:
        peer = next(peer for peer in after[move.source] if peer.worker == move.worker)
        after[move.source].remove(peer)
        after[move.target].append(peer)
    return after


def capacities(stages: Rows, work: list[float]) -> list[float]:
    return [sum(peer.speed for peer in row) / each for row, each in zip(stages, work, strict=True)]


def test_balanced_stages_stay() -> None:
    assert plan(rows(4, 4, 4, 4)) == ()
    assert plan(rows(5, 4, 4, 4)) == ()


def test_several_moves_at_once_where_one_would_not_help() -> None:
    stages = rows(6, 6, 2, 2)
    moves = plan(stages)
    assert sorted(map(len, carried_out(stages, moves))) == [4, 4, 4, 4]
    assert len(moves) == 4
    assert moves[0].reason == "the swarm is expected to go 2.0 times as fast once these 4 moves are made"


def test_a_move_says_what_people_get_of_it() -> None:
    (move,) = plan(rows(6, 4))
    assert move.reason == "the swarm is expected to go 25% faster once this move is made"
    assert plan(rows(2, 0))[0].reason == "a stage does nothing yet; once this move is made all of them work"


def test_a_gain_smaller_than_its_cost_moves_nobody() -> None:
    stages = [[RatedPeer("a", 10.0), RatedPeer("b", 0.2)], [RatedPeer("c", 9.9)]]
    assert plan(stages) == ()  # 2 % more is within the hysteresis
    assert plan_moves(rows(3, 1), [1.0, 1.0], migration_seconds=100, horizon_seconds=90) == ()


def test_whoever_is_on_its_way_counts_and_is_left_alone() -> None:
    balanced = [[*rows(2)[0]], [RatedPeer("x", 1.0), RatedPeer("joining", 1.0, ready=False)]]
    assert plan(balanced) == ()
    on_its_way = [[RatedPeer(f"j{i}", 1.0, ready=False) for i in range(3)] + [RatedPeer("a", 1.0)], [RatedPeer("b", 1.0)]]
    assert plan(on_its_way) == ()  # "a" alone has the state of its stage


def test_an_idle_fast_peer_goes_where_the_work_is() -> None:
    stages = [[RatedPeer("a", 3.0), RatedPeer("b", 1.0)], [RatedPeer("c", 1.0)]]
    (move,) = plan(stages, [1.0, 3.0])
    assert (move.worker, move.target) == ("a", 1)


peers = st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 5.0]), min_size=1, max_size=6)


@given(st.lists(peers, min_size=2, max_size=4), st.integers(1, 2))
def test_moves_raise_throughput_settle_and_leave_enough(speeds: list[list[float]], minimum: int) -> None:
    stages = [[RatedPeer(f"s{s}p{i}", speed) for i, speed in enumerate(row)] for s, row in enumerate(speeds)]
    work = [1.0] * len(stages)
    moves = plan(stages, work, minimum)
    after = carried_out(stages, moves)
    if moves:
        assert throughput(capacities(after, work)) > 1.03 * throughput(capacities(stages, work))
    for before, row in zip(stages, after, strict=True):
        assert len(row) >= min(minimum, len(before))
    for _ in range(6):  # moving on and on ends
        moves = plan(after, work, minimum)
        after = carried_out(after, moves)
    assert plan(after, work, minimum) == ()


@given(st.integers(1, 3), st.integers(0, 7))
def test_the_optimum_of_equal_peers_is_exact(stages: int, count: int) -> None:
    best = max(
        (min(assignment.count(stage) for stage in range(stages)) for assignment in itertools.product(range(stages), repeat=count)),
        default=0,
    )
    assert best_throughput([1.0] * count, [1.0] * stages) == best


def test_a_joiner_goes_to_the_weakest_stage() -> None:
    assert place([2.0, 1.0, 1.0]) == 1


def test_one_that_a_plan_means_for_a_stage_goes_there() -> None:
    assert place([2.0, 0.0], planned=0) == 0
    assert place([2.0, 0.0], planned=2) == 1  # a plan of another run
    assert place([2.0, 1.0, 1.0], {0}, planned=0) == 1  # its process has it
    members = Members(Settings(stages=2, micro_batches=1, steps=1), 1)
    for number, planned in enumerate((1, 1, -1, 0)):
        members.hear(WorkerBeat(f"w{number}", 0, 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None, planned=planned), 0.0)
    assert [member.stage for member in members] == [1, 1, 0, 0]


def at_once(stages: list[list[RatedPeer]], summed: dict[str, float], remaining: float) -> tuple[str, int] | None:
    move = move_at_once(stages, [1.0] * len(stages), summed, remaining, migration_seconds=10.0)
    return (move.worker, move.target) if move is not None else None


def test_one_that_has_just_come_takes_the_place_of_one_that_was_lost() -> None:
    stages = [[RatedPeer(name, 3.5) for name in row] for row in (("a", "b", "new"), ("c",))]
    assert at_once(stages, {"a": 50.0, "b": 50.0, "new": 1.0, "c": 50.0}, 200.0) == ("new", 1)
    assert at_once(stages, {"a": 50.0, "b": 50.0, "new": 1.0, "c": 50.0}, 5.0) is None, "the step is nearly over"
    assert at_once(stages, dict.fromkeys(("a", "b", "new", "c"), 190.0), 200.0) is None, "it would leave more behind than it brings"
    arriving = [[*stages[0][:2], RatedPeer("new", 3.5, ready=False)], stages[1]]
    assert at_once(arriving, {"a": 50.0, "b": 50.0, "c": 50.0}, 200.0) == ("new", 1), "one without a state leaves nothing behind"


def test_nobody_moves_at_once_to_a_stage_without_state_or_from_the_last_of_one() -> None:
    assert at_once([[RatedPeer("a", 3.5), RatedPeer("b", 3.5)], []], {}, 100.0) is None
    assert at_once([[RatedPeer("a", 3.5), RatedPeer("b", 3.5)], [RatedPeer("c", 3.5, ready=False)]], {}, 100.0) is None
    assert at_once([[RatedPeer("a", 35.0)], [RatedPeer("c", 3.5)]], {}, 100.0) is None
    assert at_once([[RatedPeer("a", 3.5), RatedPeer("a+1", 3.5)], [RatedPeer("c", 3.5)]], {}, 100.0) is None
