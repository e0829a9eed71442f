"""Measuring: turns interleave, disturbances do not count, and what is measured can be written and read back."""

import pytest
import torch

from atoll.cluster import dump_cluster, parse_cluster
from atoll.cluster.measure import Case, interleaved
from atoll.cluster.probe import probe_host


class World:
    """A clock that cases move forward."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def case(self, name, seconds, optional=False):
        def run():
            self.log.append(name)
            self.now += seconds(self.now) if callable(seconds) else seconds

        return Case(run, optional)

    def measure(self, cases, budget_s=10.0):
        return interleaved(cases, budget_s=budget_s, synchronize=lambda: None, clock=lambda: self.now)


def test_steady_cases_are_timed_exactly():
    world = World()
    a, b = world.measure([world.case("a", 0.001), world.case("b", 0.02)])
    assert (a.seconds, a.usual_seconds) == pytest.approx((0.001, 0.001))
    assert (b.seconds, b.usual_seconds) == pytest.approx((0.02, 0.02))


def test_a_disturbance_of_most_of_the_time_does_not_count():
    world = World()

    def disturbed(now):
        return 0.001 if now % 0.1 < 0.02 else 0.002

    cases = [world.case("a", disturbed), world.case("b", disturbed)]
    for timing in world.measure(cases, budget_s=20.0):
        assert timing.seconds == pytest.approx(0.001)
        assert timing.usual_seconds > 1.3 * timing.seconds


def test_turns_alternate():
    world = World()
    world.measure([world.case("a", 0.01), world.case("b", 0.01)], budget_s=1.0)
    assert world.log[4:10] == ["a", "b", "a", "b", "a", "b"]


def test_the_budget_holds_and_slow_optional_cases_are_dropped():
    world = World()
    kept, dropped, slow = world.measure([world.case("a", 0.01, optional=True), world.case("b", 5.0, optional=True), world.case("c", 2.0)])
    assert kept.seconds == pytest.approx(0.01)
    assert dropped is None
    assert slow.seconds == pytest.approx(2.0)
    assert world.log.count("b") == 2
    assert world.now < 10 + 4 + 10 + 2.1, "two runs of each to begin with, then the budget and at most one run more"


def test_this_machine_can_be_measured_written_and_read_back():
    shares = []
    probed = probe_host(quick=True, budget_s=0.0, tick=shares.append)
    assert shares[-1] == 1.0
    assert probed.busy >= 1.0
    assert parse_cluster(dump_cluster(probed.cluster)) == probed.cluster
    (device,) = probed.cluster.devices
    measured = device.kind.measured
    assert measured.threads == torch.get_num_threads()
    assert 0 < measured.operator_seconds < 0.1
    assert {rate.precision for rate in measured.matmul} >= {"fp32"}
    assert device.kind.flops["fp32"] == max(rate.flops_per_s for rate in measured.matmul if rate.precision == "fp32")
    assert all(rate.flops_per_s > 0 for rate in measured.conv)
    assert [rate.bytes for rate in measured.memory] == sorted(rate.bytes for rate in measured.memory)
    assert 0 < device.memory_bytes < device.kind.memory_bytes
