"""How many micro-batches a feeder has under way."""

import pytest

from atoll.control import Settings
from atoll.control.feeder import Window
from atoll.simulate.peers import PeerModel, PeerSwarm


def play(window: Window, seconds: float, apart: float, count: int) -> None:
    for number in range(count):
        window.measured(number * apart, seconds)


def test_a_window_is_what_was_given_until_enough_came_back_and_where_ways_are_short() -> None:
    window = Window(64)
    window.given = 12
    play(window, 10.0, 1.0, 12)
    assert window.size == 12
    window.begin()
    play(window, 4.0, 1.0, 100)  # four in hand or on their way, four waiting: less than three for each of four processes
    assert window.size == 12


def test_a_window_holds_what_is_on_its_way_and_no_more_than_allowed() -> None:
    window = Window(64)
    window.given = 12
    play(window, 20.0, 1.0, 100)
    assert window.size == 20 + 4
    window.measured(100.0, 15.0)
    assert window.size == 15 + 4
    window.begin()
    assert window.size == 15 + 4  # until the next step tells
    play(window, 1000.0, 1.0, 100)
    assert window.size == 64


@pytest.mark.parametrize("round_trip", [0.1, 0.2])
def test_kernels_much_shorter_than_the_way_are_kept_busy(round_trip: float) -> None:
    def rate(latency: float) -> float:
        settings = Settings(stages=3, micro_batches=1500, steps=100, patience_seconds=60.0, in_flight=4096)
        swarm = PeerSwarm(settings, PeerModel(forward_seconds=0.004, backward_seconds=0.01, latency_seconds=latency))
        for index in range(6):
            swarm.start(f"peer{index}")
        swarm.loop.run(1e4, lambda: len(swarm.committed) > 4)
        return (len(swarm.committed) - 1) * 1500 / (swarm.committed[-1].at_seconds - swarm.committed[0].at_seconds)

    still = rate(0.0)
    # filling, draining, sealing and summing take about eight ways of every step; kernels 1500 / 2 times 14 ms
    assert rate(round_trip / 2) > 0.95 * still * 10.5 / (10.5 + 8 * round_trip)
