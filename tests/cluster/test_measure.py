"""Measuring: turns interleave, disturbances do not count, and what is measured can be written and read back."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, dump_cluster, parse_cluster
from atoll.cluster.cluster import Link, Site
from atoll.cluster.measure import Case, interleaved
from atoll.cluster.probe import probe_host, rounded


class World:
    """A clock that cases move forward."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def case(self, name, seconds, minor=False):
        def run():
            self.log.append(name)
            self.now += seconds(self.now) if callable(seconds) else seconds

        return Case(run, minor)

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
    assert world.log[4:12] == ["a", "a", "b", "b", "a", "a", "b", "b"], "each turn has a run that is not counted and one that is"


def test_the_budget_holds_and_what_matters_less_has_fewer_turns():
    world = World()
    minor, major = world.measure([world.case("a", 0.01, minor=True), world.case("b", 0.01)], budget_s=0.5)
    assert (minor.seconds, major.seconds) == pytest.approx((0.01, 0.01))
    assert 3 <= world.log.count("b") / world.log.count("a") <= 4
    assert world.now < 0.52


def test_processor_time_leaves_others_out():
    world = World()
    ours = 0.0

    def run():
        nonlocal ours
        ours += 0.002
        world.now += 0.008

    (timing,) = interleaved([Case(run)], budget_s=1.0, synchronize=lambda: None, clock=lambda: world.now, stopwatch=lambda: ours)
    assert (timing.seconds, timing.usual_seconds) == pytest.approx((0.002, 0.008))
    assert timing.lasting_seconds == pytest.approx(0.008)


def test_what_lasts_longer_than_a_turn_meets_neighbours_that_most_turns_do_not():
    world = World()

    def sliced(now):
        """A neighbour has the processor for 12 of every 40 ms, in one piece: turns of 4 ms rarely notice."""
        return 0.001 if now % 0.040 < 0.027 else 0.013

    for timing in world.measure([world.case("a", sliced), world.case("b", sliced)], budget_s=20.0):
        assert timing.usual_seconds == pytest.approx(0.001)
        assert timing.lasting_seconds == pytest.approx(0.0014, rel=0.1)


def test_this_machine_can_be_measured_written_and_read_back():
    shares = []
    probed = probe_host(quick=True, budget_s=0.0, tick=shares.append)
    assert shares[-1] == 1.0
    assert len(shares) > 20, "the first round is told of too"
    assert shares == sorted(shares)
    assert probed.busy >= 1.0
    assert parse_cluster(dump_cluster(probed.cluster)) == probed.cluster
    written = dump_cluster(probed.cluster)
    assert "network" not in written, "there is no other host"
    assert not re.search(r'"[\d.]{5,} ', written), "three digits and a point at most"
    (device,) = probed.cluster.devices
    measured = device.kind.measured
    assert device.kind.cpu
    assert measured.threads == torch.get_num_threads()
    assert 0 < measured.operator_seconds < 0.1
    assert {rate.precision for rate in measured.matmul} >= {"fp32"}
    assert device.kind.flops["fp32"] == max(rate.flops_per_s for rate in measured.matmul if rate.precision == "fp32")
    assert all(rate.flops_per_s > 0 and rate.backward_flops_per_s > 0 for rate in measured.conv)
    assert {"gelu", "layer_norm", "dropout", "cross_entropy_loss"} <= {rate.operator for rate in measured.operators}
    assert all(rate.bytes_per_s > 0 and rate.backward_bytes_per_s > 0 for rate in measured.operators)
    assert {rate.variant for rate in measured.attention} == {"", "causal", "dropout"}
    assert {time.optimizer for time in measured.updates} == {"adamw", "momentum", "sgd"}
    assert [rate.bytes for rate in measured.memory] == sorted(rate.bytes for rate in measured.memory)
    assert 0 < device.memory_bytes < device.kind.memory_bytes


@given(st.floats(1e3, 1e14), st.floats(1e-8, 10.0))
def test_rounding_keeps_three_digits_and_is_done_once(rate, seconds):
    link = Link(between=("here", "here"), bytes_per_s=rate, latency_s=seconds)
    host = parse_cluster('[[site]]\nname = "here"\n[[site.host]]\nname = "box"\ndevices = [{ kind = "A100-80GB" }]').hosts[0]
    cluster = Cluster(name="one", sites=(Site(name="here", hosts=(host,), link=link),))
    once = rounded(cluster)
    assert rounded(once) == once
    assert parse_cluster(dump_cluster(once)) == once
    assert once.sites[0].link.bytes_per_s == pytest.approx(rate, rel=5.1e-3)
    assert once.sites[0].link.latency_s == pytest.approx(seconds, rel=5.1e-3)
    assert not re.search(r'network.*"[\d.]{5,} ', dump_cluster(once))
