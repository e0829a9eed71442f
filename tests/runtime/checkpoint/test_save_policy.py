"""When saves are due: as told, or so that a crash costs little and saving too."""

import pytest

from atoll.runtime.checkpoint.checkpointer import SavePolicy


def saves(policy: SavePolicy, *, steps: int, step_seconds: float, save_seconds: float) -> list[int]:
    """The steps after which a run of so long steps saves, each save in the background until the step after."""
    found, under_way = [], False
    for step in range(1, steps + 1):
        if under_way:
            policy.ended(save_seconds)
            under_way = False
        if policy.due(step, step * step_seconds):
            policy.begun(step)
            found.append(step)
            under_way = True
    return found


def test_as_told() -> None:
    assert saves(SavePolicy(4, step=0, moment=0.0), steps=12, step_seconds=100.0, save_seconds=1e9) == [4, 8, 12]


def test_a_crash_costs_ten_minutes_at_most_where_nothing_is_known() -> None:
    assert saves(SavePolicy(None, step=0, moment=0.0), steps=30, step_seconds=60.0, save_seconds=1.0) == [10, 20, 30]


def test_an_expensive_save_is_made_seldom() -> None:
    assert saves(SavePolicy(None, step=0, moment=0.0), steps=130, step_seconds=60.0, save_seconds=60.0) == [10, 60, 110]


def test_with_failures_the_first_save_measures_what_it_costs() -> None:
    policy = SavePolicy(None, step=0, moment=0.0, failures_per_hour=2.0)
    assert saves(policy, steps=300, step_seconds=1.0, save_seconds=1.0) == [1, 61, 121, 181, 241]


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    policy = SavePolicy(None, step=100, moment=5.0)
    assert not policy.due(101, 65.0)
    assert policy.due(110, 605.0)


@pytest.mark.parametrize("failures", [None, 3.0])
def test_asked_only_when_told_to_be_it_saves_as_if_asked_after_every_step(failures: float | None) -> None:
    policy, ask_at, found, asked = SavePolicy(None, step=0, moment=0.0, failures_per_hour=failures), 0, [], 0
    for step in range(1, 2001):
        if step < ask_at:
            continue
        asked += 1
        due = policy.due(step, step * 2.0)
        if due:
            policy.begun(step)
            policy.ended(1.0)
            found.append(step)
        ask_at = policy.ask_again(step, step * 2.0)
    assert found == saves(SavePolicy(None, step=0, moment=0.0, failures_per_hour=failures), steps=2000, step_seconds=2.0, save_seconds=1.0)
    assert asked < 30 + len(found)
