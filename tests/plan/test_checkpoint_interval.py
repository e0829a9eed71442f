"""How often to save: Young–Daly where failures are known, never more than a share of the time, never too far apart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.checkpoint_interval import LARGEST_GAP_SECONDS, LARGEST_SHARE, checkpoint_interval


def test_with_a_failure_rate_it_is_young_and_dalys() -> None:
    interval = checkpoint_interval(save_seconds=2.0, failures_per_hour=1.0, step_seconds=0.5)
    assert interval.seconds == pytest.approx(math.sqrt(2 * 2.0 * 3600.0), abs=0.5)
    assert interval.steps == interval.seconds / 0.5
    assert "Young-Daly" in interval.reason


def test_without_one_a_crash_costs_at_most_ten_minutes() -> None:
    for rate in (None, 0.0):
        interval = checkpoint_interval(save_seconds=1.0, failures_per_hour=rate, step_seconds=1.0)
        assert interval.seconds == LARGEST_GAP_SECONDS
        assert "no failure rate" in interval.reason


def test_an_expensive_save_is_made_more_rarely_than_failures_would_want() -> None:
    interval = checkpoint_interval(save_seconds=60.0, failures_per_hour=10.0, step_seconds=1.0)
    assert interval.seconds == 60.0 / LARGEST_SHARE
    assert "2%" in interval.reason


def test_a_save_that_costs_nothing_is_made_after_every_step_where_there_are_failures() -> None:
    assert checkpoint_interval(0.0, 1.0, 10.0).steps == 1


@given(
    save=st.floats(0, 1e4),
    rate=st.none() | st.floats(0, 1e3),
    step=st.floats(0, 1e4),
)
def test_it_is_a_whole_number_of_steps_and_saving_never_takes_more_than_its_share(save: float, rate: float | None, step: float) -> None:
    interval = checkpoint_interval(save, rate, step)
    assert interval.steps >= 1
    assert save <= LARGEST_SHARE * interval.steps * max(step, 1e-9) * (1 + 1e-6)
    if not rate:
        assert interval.seconds <= max(LARGEST_GAP_SECONDS, save / LARGEST_SHARE + step, step) * (1 + 1e-6)
