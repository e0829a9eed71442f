"""Collectives against the α–β formulas on one tier, and what must hold on any topology."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Calibration
from atoll.cost.communication import all_gather_seconds, all_reduce_seconds, all_to_all_seconds, collective_bytes, span_of, wan_ring

IDEAL = Calibration(host_link_efficiency=1.0, network_efficiency=1.0, collective_seconds=0.0)


def cluster(sites: int = 1, hosts: int = 2, devices: int = 4) -> Cluster:
    shape = {"kind": "A100-80GB", "hosts": hosts, "devices": devices, "network": "8 Gbit/s", "latency": "0 us"}
    made = [make_site(f"s{i}", link=("100 GB/s", "0 us"), **shape) for i in range(sites)]
    return make_cluster("c", made, default_link=("80 Mbit/s", "10 ms"))


def test_inside_a_host_an_all_reduce_is_a_ring() -> None:
    whole = cluster(hosts=1)
    span = span_of(whole, [whole.devices], IDEAL)
    assert all_reduce_seconds(span, 1e9, IDEAL) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9)
    assert all_gather_seconds(span, 1e9, IDEAL) == pytest.approx(3 / 4 * 1e9 / 100e9)


def test_between_hosts_the_interface_decides() -> None:
    whole = cluster(hosts=2, devices=1)
    span = span_of(whole, [whole.devices], IDEAL)
    assert all_reduce_seconds(span, 1e9, IDEAL) == pytest.approx(2 * 1 / 2 * 1e9 / 1e9)


def test_groups_that_leave_a_host_together_share_its_interface() -> None:
    whole = cluster(hosts=2, devices=4)
    groups = [[whole.devices[i], whole.devices[4 + i]] for i in range(4)]
    alone, together = (all_reduce_seconds(span_of(whole, some, IDEAL), 1e9, IDEAL) for some in (groups[:1], groups))
    assert together == pytest.approx(4 * alone)


def test_efficiencies_and_the_cost_of_entering() -> None:
    whole = cluster(hosts=1)
    half = Calibration(host_link_efficiency=0.5, network_efficiency=1.0, collective_seconds=1.0)
    ideal = all_reduce_seconds(span_of(whole, [whole.devices], IDEAL), 1e9, IDEAL)
    assert all_reduce_seconds(span_of(whole, [whole.devices], half), 1e9, half) == pytest.approx(2 * ideal + 1.0)


def test_the_ring_between_sites_avoids_the_narrow_link() -> None:
    sites = [make_site(name, kind="A100-80GB") for name in ("a", "b", "c", "d")]
    narrow = make_cluster("c", sites, {("a", "b"): ("1 Mbit/s", "1 ms")}, default_link=("1 Gbit/s", "1 ms"))
    ring = wan_ring(narrow, ("a", "b", "c", "d"))
    assert len(ring) == 4
    assert min(link.bytes_per_s for link in ring) > 1e8


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.floats(1e3, 1e10))
def test_what_holds_anywhere(sites: int, hosts: int, devices: int, nbytes: float) -> None:
    whole = cluster(sites, hosts, devices)
    calibration = Calibration()
    span = span_of(whole, [whole.devices], calibration)
    reduce, gather = all_reduce_seconds(span, nbytes, calibration), all_gather_seconds(span, nbytes, calibration)
    if len(whole.devices) == 1:
        assert reduce == gather == all_to_all_seconds(span, nbytes, calibration) == 0.0
        return
    assert 0 < gather <= reduce <= 2 * gather * (1 + 1e-9)
    assert all_reduce_seconds(span, 2 * nbytes, calibration) > reduce
    assert all_to_all_seconds(span, nbytes, calibration) > 0
    assert all(amount > 0 for amount in collective_bytes(span, nbytes, 2.0).values())


def test_nothing_to_send_takes_no_time() -> None:
    whole = cluster()
    span = span_of(whole, [whole.devices], IDEAL)
    assert all_reduce_seconds(span, 0.0, IDEAL) == 0.0
    assert collective_bytes(span, 0.0, 2.0) == {}
