"""The commands that build a lab and change it, without running them."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster import make_cluster, make_site
from atoll.errors import LabError
from atoll.lab import LabFault, parse_fault
from atoll.lab.faults import Conditions
from atoll.lab.network import LabNetwork, token_bucket
from tests.lab.clusters import two_sites
from tests.lab.test_faults import faults

CLUSTER = two_sites()
NETWORK = LabNetwork(CLUSTER)


def after(*lines: str) -> Conditions:
    conditions = Conditions()
    for line in lines:
        conditions = conditions.after(parse_fault(f"0s {line}", CLUSTER))
    return conditions


def test_every_host_has_an_address_of_its_own_that_is_no_gateway() -> None:
    network = LabNetwork(two_sites(hosts=600))
    addresses = [network.address(host.name) for host in network.cluster.hosts]
    assert len(set(addresses)) == 1200
    assert all(
        ipaddress.ip_address(address) not in (ipaddress.ip_address("10.1.255.254"), ipaddress.ip_address("10.1.0.0"))
        for address in addresses
    )


def test_too_many_sites_are_refused() -> None:
    sites = [make_site(f"s{i}", hosts=1, devices=1, kind="A10") for i in range(251)]
    with pytest.raises(LabError, match="at most 250 sites"):
        LabNetwork(make_cluster("many", sites, {}, default_link=("1 Gbit/s", "1 ms")))


@settings(max_examples=30)
@given(st.lists(faults(), max_size=5), st.lists(faults(), max_size=5))
def test_a_change_and_the_change_back_touch_the_same_things(first: list[LabFault], second: list[LabFault]) -> None:
    one, two = Conditions(), Conditions()
    for fault in first:
        one = one.after(fault)
    for fault in second:
        two = two.after(fault)
    assert NETWORK.change(one, one) == []
    there, back = NETWORK.change(one, two), NETWORK.change(two, one)
    assert [command[:6] for command in there] == [command[:6] for command in back]


def test_a_cut_host_loses_its_port_and_a_slow_one_its_bandwidth_in_both_directions() -> None:
    assert NETWORK.change(Conditions(), after("cut rome-0")) == [("ip", "-n", "s1", "link", "set", "p2", "down")]
    slow = NETWORK.change(Conditions(), after("slow oslo-1 10"))
    assert [(command[2], command[6]) for command in slow] == [("h1", "eth0"), ("s0", "p1")]
    assert all("100000000bit" in command for command in slow)


def test_faults_inside_a_site_lead_its_traffic_through_the_forwarder() -> None:
    for fault in ("loss oslo-0 1%", "one-way-cut oslo-0 oslo-1", "cut oslo-0 oslo"):
        commands = NETWORK.change(Conditions(), after(fault))
        assert [(command[2], command[-1]) for command in commands] == [("h0", "10.1.255.254"), ("h1", "10.1.255.254")], fault
    assert NETWORK.change(Conditions(), after("one-way-cut oslo-0 rome-0", "loss oslo rome 1%", "cut rome")) == []


def test_latencies_a_bridge_cannot_make_are_the_forwarders() -> None:
    slow = LabNetwork(two_sites(inside="2 ms"))
    routes = [command for command in slow.build() if "replace" in command and "route" in command]
    assert [command[-1] for command in routes] == ["10.1.255.254", "10.1.255.254", "link", "link"]
    inside = {(pipe.source, pipe.target): pipe for pipe in slow.forwarder_state(Conditions()).pipes}
    assert (inside[0, 0].latency_s, inside[1, 1].latency_s, inside[0, 0].bytes_per_s) == (0.002, 0.0, None)


def test_the_forwarder_is_told_what_is_in_force() -> None:
    state = NETWORK.forwarder_state(after("slow oslo rome 10", "loss rome oslo 2%", "loss rome-1 3%", "one-way-cut oslo-0 rome"))
    between = {(pipe.source, pipe.target): pipe for pipe in state.pipes}
    assert between[0, 1].bytes_per_s == between[1, 0].bytes_per_s == 2.5e6
    assert (between[0, 1].loss, between[0, 0].loss) == (0.02, 0.0)
    assert state.blocked == (("10.1.0.2", "10.2."),)
    assert state.lossy == {"10.2.0.3": 0.03}


@given(st.floats(125.0, 1e12))
def test_a_bucket_holds_a_packet_and_little_time(bytes_per_s: float) -> None:
    words = token_bucket(bytes_per_s)
    burst = int(words[words.index("burst") + 1])
    assert 32 * 1024 <= burst <= max(32 * 1024, 0.004 * bytes_per_s)
