"""Several workers in one process: their names, where they are placed, and what counts as a replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.membership import Members
from atoll.control.messages import WorkerBeat
from atoll.control.multi_stage import hosted_number, hosted_workers, process_of, processes
from atoll.control.rebalancing import RatedPeer, place, plan_moves
from atoll.control.settings import Settings
from atoll.errors import AtollError
from atoll.fabric.security.certificates import check_name


def beat(worker: str, speed: float = 0.0, nonce: int = 1, incarnation: int = 0) -> WorkerBeat:
    return WorkerBeat(worker, incarnation, nonce, -1, 0, 0, 0, 0, -1, speed, None, "", None)


def members(stages: int, **settings: int) -> Members:
    return Members(Settings(stages=stages, micro_batches=4, steps=10, **settings), 1)


def joined(swarm: Members, process: str, count: int) -> list[int]:
    """The stages a process is given."""
    found = [swarm.hear(beat(worker), 0.0)[0] for worker in hosted_workers(process, count)]
    return [member.stage for member in found if member is not None]


def test_names_tell_their_process_and_no_member_can_be_called_so() -> None:
    names = hosted_workers("oslo", 3)
    assert names == ("oslo", "oslo+1", "oslo+2")
    assert processes(names) == {"oslo"} == {process_of("oslo")}
    assert [hosted_number(name) for name in names] == [0, 1, 2]
    check_name("oslo")
    for name in names[1:]:
        with pytest.raises(AtollError):
            check_name(name)


@pytest.mark.parametrize("name", ["oslo+", "oslo+0", "oslo+01", "oslo+one", "oslo+1+1", "oslo+-1", "oslo+²", "+1", "oslo+9999999"])
def test_what_is_no_hosted_worker(name: str) -> None:
    assert hosted_number(name) is None


def test_a_process_gets_different_stages_next_to_each_other() -> None:
    swarm = members(4)
    assert joined(swarm, "a", 2) == [0, 1]
    assert joined(swarm, "b", 2) == [2, 3]
    assert joined(swarm, "c", 3) == [0, 1, 2]
    assert joined(swarm, "d", 1) == [3]
    assert joined(members(2), "a", 2) == [0, 1]


def test_more_workers_than_stages_are_not_taken() -> None:
    swarm = members(2)
    assert joined(swarm, "a", 3) == [0, 1]
    assert swarm.hear(beat("a+garbage"), 0.0) == (None, False)


def test_weakness_matters_more_than_neighbours_and_neighbours_more_than_noise() -> None:
    assert place([1.0, 0.5, 1.0, 0.5], {1}) == 3
    assert place([1.0, 1.0, 1.05, 0.98], {1}) == 0
    assert place([1.0, 1.0, 1.05, 0.98]) == 3
    assert place([1.0, 0.2], {0, 1}) == 1


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6), st.sets(st.integers(0, 5), max_size=4))
def test_a_hosted_worker_goes_to_a_free_stage_hardly_stronger_than_the_weakest_free_one(capacities: list[float], hosted: set[int]) -> None:
    stage = place(capacities, hosted)
    free = [other for other in range(len(capacities)) if other not in hosted] or list(range(len(capacities)))
    assert stage in free
    assert capacities[stage] <= 1.1 * min(capacities[other] for other in free)


def test_workers_not_measured_yet_share_the_speed_of_their_process() -> None:
    swarm = members(2)
    joined(swarm, "a", 2)
    assert swarm.capacities(0.0) == [0.5, 0.5]
    joined(swarm, "b", 1)
    swarm.hear(beat("b", speed=4.0, incarnation=swarm.get("b").incarnation), 0.0)  # type: ignore[union-attr]
    assert swarm.capacities(0.0) == [6.0, 2.0]


def test_a_process_started_again_is_not_kept_away_by_what_it_was() -> None:
    swarm = members(3)
    joined(swarm, "a", 3)
    found = [swarm.hear(beat(worker, nonce=2), 0.0)[0] for worker in hosted_workers("a", 3)]
    assert sorted(member.stage for member in found if member is not None) == [0, 1, 2]


def test_one_that_is_back_before_its_silence_is_noticed_goes_where_it_is_missing() -> None:
    swarm = members(2)
    for name in ("a", "b", "c", "d"):
        joined(swarm, name, 1)
    for name in "abcd":
        before = swarm.get(name)
        again, _ = swarm.hear(beat(name, nonce=2), 0.0)
        assert again is not None
        assert again.stage == before.stage  # type: ignore[union-attr]


def test_replicas_are_processes() -> None:
    swarm = members(3)
    for process in ("a", "b"):
        joined(swarm, process, 3)
    first, second = (swarm.get(name) for name in ("a", "b"))
    assert first is not None
    assert second is not None
    assert first.stage == second.stage
    assert Members.may_go(first, swarm, 1)
    assert not Members.may_go(first, swarm, 2)
    twin = swarm.get("b+1")
    assert twin is not None
    swarm.move(twin, second.stage)  # two of one process on a stage are one replica
    assert not Members.may_go(first, swarm, 2)
    assert Members.may_go(second, swarm, 2)


def rows(*stages: str) -> list[list[RatedPeer]]:
    return [[RatedPeer(worker, 1.0) for worker in row.split()] for row in stages]


def moved(stages: list[list[RatedPeer]], minimum: int = 1) -> list[tuple[str, int]]:
    moves = plan_moves(stages, [1.0] * len(stages), migration_seconds=10, horizon_seconds=300, minimum_replicas=minimum)
    return [(move.worker, move.target) for move in moves]


def test_nobody_moves_to_a_stage_its_process_has() -> None:
    assert moved(rows("a b c", "a+1")) in ([("b", 1)], [("c", 1)])
    assert moved(rows("a b", "a+1 b+1", "c d e f")) == []
    moves = moved(rows("a b c d", "a+1 b+1 c+1 d+1", "c+2"))
    assert [target for _, target in moves] == [2, 2]
    assert len(processes(worker for worker, _ in moves) - {"c"}) == 2


def test_of_equals_one_moves_whose_process_is_near() -> None:
    assert moved(rows("a b c d", "e", "e+1 f b+1"))[0] == ("b", 1)


hosting = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0])), min_size=2, max_size=7)


@given(hosting, st.integers(2, 4), st.integers(1, 2), st.randoms())
def test_moves_leave_enough_processes_keep_workers_of_one_apart_and_settle(
    drawn: list[tuple[int, float]], stages: int, minimum: int, random: object
) -> None:
    at: list[list[RatedPeer]] = [[] for _ in range(stages)]
    for number, (count, speed) in enumerate(drawn):
        free = list(range(stages))
        random.shuffle(free)  # type: ignore[attr-defined]
        for worker, stage in zip(hosted_workers(f"p{number}", count), free, strict=False):
            at[stage].append(RatedPeer(worker, speed / count))
    for _ in range(12):
        before = [len(processes(peer.worker for peer in row)) for row in at]
        moves = plan_moves(at, [1.0] * stages, migration_seconds=10, horizon_seconds=300, minimum_replicas=minimum)
        for move in moves:
            peer = next(peer for peer in at[move.source] if peer.worker == move.worker)
            at[move.source].remove(peer)
            at[move.target].append(peer)
        for count, row in zip(before, at, strict=True):
            found = [process_of(peer.worker) for peer in row]
            assert len(set(found)) == len(found) >= min(count, minimum)
        if not moves:
            return
    raise AssertionError("it flaps")
