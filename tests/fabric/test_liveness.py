"""Dead, stopped and slow told apart: the rule by itself, and with real processes that are killed, stopped and starved."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.events import AnyEvent, PeerChanged
from atoll.fabric import ConnectionSettings, Fabric, LivenessRule
from atoll.fabric.deadline import Backoff, DeadlineRule, LinkEstimate, RateMeter, Smoothed
from atoll.fabric.liveness import Detector

RULE = LivenessRule(heartbeat_seconds=1.0)
CHILD = """
import sys, time
from atoll.fabric import ConnectionSettings, Fabric, LivenessRule
settings = ConnectionSettings(name="child", liveness=LivenessRule(heartbeat_seconds=0.1))
fabric = Fabric("child", settings=settings)
fabric.run(fabric.connect(sys.argv[1]).connected())
time.sleep(1000)
"""


def test_states_follow_from_what_is_heard() -> None:
    detector = Detector(RULE, now=0.0)
    assert detector.judge(1.0, None).state == "alive"
    assert detector.judge(3.0, True).state == "slow"
    assert detector.judge(7.0, True).state == "stopped"
    assert detector.judge(7.0, False).state == "unreachable"
    detector.heard(7.5)
    assert detector.judge(7.6, None).state == "slow", "it is back, but was late"
    for second in range(8, 17):
        detector.heard(float(second))
    assert detector.judge(16.5, None).state == "alive"
    detector.answered(17.0, round_trip_seconds=4.0)
    assert detector.judge(17.0, None).state == "slow"
    detector.ended("connection reset")
    assert detector.judge(17.0, True).state == "dead"


@given(st.lists(st.floats(0.01, 2.4), min_size=1, max_size=50))
def test_whoever_is_heard_in_time_is_alive(gaps: list[float]) -> None:
    detector, now = Detector(RULE, 0.0), 0.0
    for gap in gaps:
        now += gap
        assert detector.judge(now, None).state == "alive"
        detector.heard(now)


@given(st.integers(1, 100), st.floats(0, 0.999))
def test_delays_are_bounded_and_end(failures: int, random: float) -> None:
    backoff = Backoff(first_seconds=0.1, largest_seconds=5.0, attempts=20)
    delay = backoff.delay_seconds(failures, random)
    assert (delay is None) == (failures >= 20)
    assert delay is None or 0.05 <= delay <= 5.0


@given(st.floats(1e4, 1e10), st.integers(1, 10**10), st.floats(1e-4, 1.0))
def test_deadlines_leave_a_margin_over_what_was_measured(rate: float, size: int, round_trip: float) -> None:
    link, service, rule = LinkEstimate(), Smoothed(), DeadlineRule()
    link.outgoing_bytes_per_s = rate
    for _ in range(30):
        link.round_trip.add(round_trip)
        service.add(0.2)
    timeout = rule.timeout_seconds(link, service, size)
    assert timeout >= 4 * (size / rate + round_trip + 0.2)
    assert timeout <= 2 + 4 * (size / rate + round_trip + 0.2) * 1.2
    assert rule.timeout_seconds(link, service, size, 10**6) > timeout


def test_throughput_counts_only_busy_time() -> None:
    meter, now = RateMeter(), 0.0
    for _ in range(10):
        for _ in range(100):
            meter.arrived(now, 100_000)
            now += 0.001
        meter.pause()
        now += 100.0
    assert meter.bytes_per_s == pytest.approx(1e8, rel=0.02)


class Watched:
    """A child process, and what is said of it."""

    def __init__(self, fabric: Fabric, changes: list[PeerChanged]) -> None:
        self.changes = changes
        self.process = subprocess.Popen([sys.executable, "-c", CHILD, fabric.listen()])
        self.wait_for("alive")

    def wait_for(self, state: str) -> PeerChanged:
        return eventually(lambda: next((change for change in self.changes if change.state == state), None))


def eventually(find: Callable[[], PeerChanged | None]) -> PeerChanged:
    end = time.monotonic() + 60
    while (found := find()) is None:
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.01)
    return found


@pytest.fixture
def watched() -> Iterator[Watched]:
    changes: list[PeerChanged] = []

    def observe(event: AnyEvent) -> None:
        if isinstance(event, PeerChanged):
            changes.append(event)

    settings = ConnectionSettings(name="parent", liveness=LivenessRule(heartbeat_seconds=0.1, silent_beats=20, late_beats=8))
    with Fabric("parent", settings=settings, observer=observe) as fabric:
        child = Watched(fabric, changes)
        yield child
        child.process.kill()
        child.process.wait()


def test_a_killed_process_is_dead(watched: Watched) -> None:
    watched.changes.clear()
    watched.process.kill()
    assert "its process ended or was killed" in watched.wait_for("dead").reason
    assert not any(change.state == "stopped" for change in watched.changes)


def test_a_stopped_process_is_stopped_and_comes_back(watched: Watched) -> None:
    watched.changes.clear()
    os.kill(watched.process.pid, signal.SIGSTOP)
    assert "its kernel acknowledges what it is sent" in watched.wait_for("stopped").reason
    watched.changes.clear()
    os.kill(watched.process.pid, signal.SIGCONT)
    watched.wait_for("alive")
    assert not any(change.state == "dead" for change in watched.changes)


def test_a_starved_process_is_slow_but_neither_stopped_nor_dead(watched: Watched) -> None:
    watched.changes.clear()
    done = threading.Event()

    def starve() -> None:
        while not done.is_set():
            os.kill(watched.process.pid, signal.SIGSTOP)
            time.sleep(1.1)
            os.kill(watched.process.pid, signal.SIGCONT)
            time.sleep(0.4)

    starver = threading.Thread(target=starve)
    starver.start()
    try:
        watched.wait_for("slow")
        time.sleep(2)
    finally:
        done.set()
        starver.join()
    assert {change.state for change in watched.changes} <= {"slow", "alive"}


def test_no_claim_of_a_peer_makes_its_callers_wait_for_ever() -> None:
    link, service, rule = LinkEstimate(), Smoothed(), DeadlineRule()
    link.outgoing_bytes_per_s = 5e-324  # as the peer says
    assert rule.timeout_seconds(link, service, 4096) < 300
