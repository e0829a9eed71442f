"""When a swarm stores its state by itself: early at first, by Young and Daly later, at once where a stage is down to its last process."""

import pytest

from atoll.control.checkpoint_schedule import CheckpointRound, CheckpointSchedule
from atoll.control.membership import Member


def member(name: str, stage: int) -> Member:
    return Member(name, True, 1, 1, stage, 0.0)


PAIRS = [member("a", 0), member("b", 0), member("c", 1), member("d", 1)]


def run(schedule: CheckpointSchedule, steps: int, step_seconds: float, save_seconds: float, members: list[Member] = PAIRS) -> list[int]:
    """After which of so many steps it stores."""
    schedule.begin(0.0)
    storing, saved, now = CheckpointRound(), [], 0.0
    for step in range(1, steps + 1):
        now += step_seconds
        schedule.look(members, now)
        schedule.committed(step_seconds)
        if schedule.due(now):
            storing.begin(step, members, now)
            schedule.started(now)
            schedule.saved(storing, now + save_seconds)
            saved.append(step)
    return saved


def test_the_first_saves_come_early_and_then_at_intervals() -> None:
    saved = run(CheckpointSchedule(), 2000, 1.0, 4.0)  # with two replicas a save costs 2 s, so 100 s lie between two
    assert saved[:2] == [1, 68]  # after the first, thirty times what a save costs
    assert 100 <= saved[-1] - saved[-2] <= 200
    assert len(saved) < 0.02 * 2000 / 2.0 + 8


def test_first_saves_that_cost_little_come_after_twice_as_long_each() -> None:
    assert run(CheckpointSchedule(), 100, 1.0, 0.02)[:5] == [1, 2, 4, 8, 16]


def test_first_saves_take_three_percent_of_the_time_at_most() -> None:
    for save_seconds in (0.1, 0.5, 2.0, 8.0):
        saved = run(CheckpointSchedule(), 60, 1.0, save_seconds)
        assert len(saved) - 1 <= 0.03 * 60 / (save_seconds / 2), "beside the first, whose cost nobody knew"


def test_a_step_longer_than_the_interval_is_stored_every_time() -> None:
    assert run(CheckpointSchedule(), 5, 1000.0, 4.0) == [1, 2, 3, 4, 5]


def test_lost_stages_make_it_store_more_often_and_quiet_hours_less() -> None:
    schedule = CheckpointSchedule()
    run(schedule, 100, 1.0, 0.02)
    before = schedule.interval().seconds
    for _ in range(5):
        schedule.lost_stage(100.0)
    assert schedule.interval().seconds < before / 2
    quiet = CheckpointSchedule()
    run(quiet, 36000, 1.0, 0.02)
    assert quiet.interval().seconds > 2 * before


def test_a_process_that_serves_a_stage_alone_makes_it_store_more_often_where_processes_die() -> None:
    pairs, alone = CheckpointSchedule(), CheckpointSchedule()
    for schedule, members, seconds in ((pairs, PAIRS, 0.04), (alone, PAIRS[::2], 0.02)):  # which cost the same
        run(schedule, 3600, 1.0, seconds, members)
        for _ in range(20):
            schedule.died()
    assert alone.interval().seconds < 0.7 * pairs.interval().seconds


def test_a_stage_that_comes_down_to_one_process_is_urgent_once() -> None:
    schedule = CheckpointSchedule()
    run(schedule, 100, 1.0, 2.0)
    assert not schedule.urgent(300.0)
    schedule.look(PAIRS[1:], 300.0)
    assert schedule.urgent(300.0)
    schedule.started(300.0)
    schedule.look(PAIRS[1:], 400.0)
    assert not schedule.urgent(400.0)
    schedule.look([*PAIRS[1:3]], 401.0)
    assert schedule.urgent(401.0)
    assert not schedule.urgent(303.0), "not sooner than a few times what it costs after the one before"


def test_workers_of_one_process_are_one() -> None:
    schedule = CheckpointSchedule()
    run(schedule, 100, 1.0, 2.0)
    schedule.look([member("a", 0), member("a+1", 0), member("c", 1), member("d", 1)], 300.0)
    assert schedule.urgent(300.0)


def test_a_round_is_given_up_with_a_writer_or_when_it_takes_far_too_long() -> None:
    schedule, storing = CheckpointSchedule(), CheckpointRound()
    run(schedule, 10, 1.0, 2.0)
    storing.begin(11, PAIRS, 11.0)
    assert not schedule.given_up(storing, PAIRS, 12.0)
    assert not schedule.given_up(storing, [PAIRS[0], *PAIRS[2:]], 12.0), "the other of the stage does not write"
    assert schedule.given_up(storing, PAIRS[1:], 12.0)
    assert schedule.given_up(storing, PAIRS, 11.0 + 3600.0)
    assert storing.replicas == 2


@pytest.mark.parametrize("save_seconds", [0.0, 1e-6, 1e6])
def test_whatever_a_save_costs_an_interval_is_found(save_seconds: float) -> None:
    assert run(CheckpointSchedule(), 50, 1.0, save_seconds)[0] == 1
