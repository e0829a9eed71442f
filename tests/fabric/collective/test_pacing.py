"""Streams that share an interface stay together, and nobody waits for one that stands still."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.collective.link_codecs import BusyRate, RateWindow
from atoll.fabric.collective.pull import Pacing
from tests.fabric.collective.simulated import run_virtually


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), st.integers(1, 20))
def test_no_stream_is_far_ahead_while_all_move(seconds: list[float], steps: int) -> None:
    async def race() -> None:
        pacing = Pacing()
        lanes = [pacing.begin() for _ in seconds]

        async def run(number: int) -> None:
            for step in range(steps):
                await pacing.turn(lanes[number])
                slowest = min((lane.fraction for lane in lanes if not lane.still), default=1.0)
                assert lanes[number].fraction <= slowest + 0.08 + 1e-9
                await asyncio.sleep(seconds[number] * 0.2)  # always sooner than patience ends
                pacing.advanced(lanes[number], (step + 1) / steps)
            pacing.end(lanes[number])
            lanes[number].fraction = 1.0

        await asyncio.gather(*(run(number) for number in range(len(seconds))))

    run_virtually(race())


def test_a_stream_that_stands_still_is_not_waited_for() -> None:
    async def race() -> float:
        pacing = Pacing()
        moving, _ = pacing.begin(), pacing.begin()
        for step in range(100):
            await pacing.turn(moving)
            pacing.advanced(moving, (step + 1) / 100)
        return asyncio.get_running_loop().time()

    assert run_virtually(race()) < 1.0


def test_overlapping_transfers_make_the_interface_s_rate() -> None:
    window = RateWindow()
    for number in range(40):
        for stream in range(3):
            window.add(number * 0.1, (number + 1) * 0.1, 100_000 * (stream + 1))
    window.end_round()
    assert abs(window.bytes_per_s / 6e6 - 1) < 0.05
    for _ in range(20):
        window.end_round()
    assert window.bytes_per_s < 2e6, "what was not seen again is believed less and less"


def test_the_rate_of_a_link_counts_busy_time_once() -> None:
    rate = BusyRate()
    for number in range(20):
        rate.add(number * 10.0, number * 10.0 + 0.1, 100_000)
        rate.add(number * 10.0, number * 10.0 + 0.1, 100_000)
    assert abs(rate.bytes_per_s / 2e6 - 1) < 0.1


def test_a_link_that_changes_is_believed_within_a_second_or_two() -> None:
    rate, now = BusyRate(), 0.0
    for speed in (25e6, 2.5e6, 25e6):
        end = now + 2.0
        while now < end:
            rate.add(now, now + 100_000 / speed, 100_000)
            now += 100_000 / speed + 0.01
        assert abs(rate.bytes_per_s / speed - 1) < 0.05


def test_what_only_went_into_buffers_says_nothing_of_a_link_that_filled_them() -> None:
    rate, now = BusyRate(), 0.0
    for _ in range(50):
        rate.add(now, now + 0.0001, 100_000)  # swallowed
        rate.add(now + 0.0001, now + 0.0401, 100_000)
        now += 0.05
    assert abs(rate.bytes_per_s / 2.5e6 - 1) < 0.05
    for _ in range(100):  # nothing fills them any more: the link is faster than what is sent
        rate.add(now, now + 0.0005, 100_000)
        now += 0.05
    assert rate.bytes_per_s > 1e8
