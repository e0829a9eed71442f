"""Clusters made in Python."""

import pytest

from atoll.cluster import DeviceKind, make_cluster, make_site
from atoll.errors import ClusterError


def test_a_fleet_in_a_few_lines():
    kinds = ("A100-80GB", "V100-32GB", "RTX-3090")
    sites = [make_site(f"s{i}", hosts=16, devices=8, kind=kinds[i % 3], network="100 Gbit/s", latency="10 us") for i in range(8)]
    fleet = make_cluster("fleet", sites, {("s1", "s0"): ("10 Gbit/s", "5 ms")}, default_link=("1 Gbit/s", "30 ms"))
    assert len(fleet.devices) == 1024
    assert len({device.name for device in fleet.devices}) == 1024
    assert len(fleet.links) == 28
    a, b, c = fleet.device("s0-0/0"), fleet.device("s1-15/7"), fleet.device("s2-0/0")
    assert fleet.link_between(a, b).bytes_per_s == 1.25e9
    assert fleet.link_between(b, a).name == "s0–s1"
    assert fleet.link_between(b, c).latency_s == 0.03
    assert fleet.link_between(a, fleet.device("s0-1/0")).bytes_per_s == 12.5e9
    assert fleet.link_between(a, fleet.device("s0-0/1")).bytes_per_s == 300e9


def test_mixed_hosts_and_own_kinds():
    slow = DeviceKind(name="slow", memory_bytes=8e9, flops={"fp32": 1e12}, memory_bytes_per_s=1e11, link_bytes_per_s=1e9)
    site = make_site("s", kind=[("A100-80GB", 2), (slow, 1)], memory="7 GB", speed=0.5, preemptions="1 /h", price="$1/h")
    (host,) = site.hosts
    assert [device.kind.name for device in host.devices] == ["A100-80GB", "A100-80GB", "slow"]
    assert host.link.bytes_per_s == 1e9, "the slowest kind's link joins a mixed host"
    assert {(d.memory_bytes, d.speed, d.preemptions_per_hour, d.price_per_hour) for d in host.devices} == {(7e9, 0.5, 1.0, 1.0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "A100"}, "unknown accelerator 'A100'; did you mean"),
        ({"hosts": 0}, "between 1 and"),
        ({"devices": 0}, "between 1 and"),
        ({"devices": 10**9}, "between 1 and"),
        ({"network": "0 Gbit/s"}, "network: must be positive"),
        ({"latency": "-1 ms"}, "latency: must not be negative"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"speed": float("nan")}, "speed must be above 0"),
        ({"price": "2"}, "cannot read '2' as a price per hour"),
        ({"kind": DeviceKind(name="x", memory_bytes=8e9, flops={"fp32": 1e12}, memory_bytes_per_s=1e11)}, "link: missing"),
    ],
)
def test_bad_sites_are_refused(change, message):
    with pytest.raises(ClusterError, match=message):
        make_site("s", **({"kind": "T4", "devices": 2} | change))


def test_bad_clusters_are_refused():
    a, b = make_site("a", kind="T4"), make_site("b", kind="T4")
    with pytest.raises(ClusterError, match="link 'a'–'b': missing"):
        make_cluster("c", [a, b])
    with pytest.raises(ClusterError, match="site 'a': another site has this name"):
        make_cluster("c", [a, a])
    with pytest.raises(ClusterError, match="must name two of the sites a, b"):
        make_cluster("c", [a, b], {("a", "x"): ("1 Gbit/s", "1 ms")})
    with pytest.raises(ClusterError, match="is there twice"):
        make_cluster("c", [a, b], {("a", "b"): ("1 Gbit/s", "1 ms"), ("b", "a"): ("1 Gbit/s", "1 ms")})
    with pytest.raises(ClusterError, match="at least one site"):
        make_cluster("c", [])
    other = DeviceKind(name="T4", memory_bytes=8e9, flops={"fp32": 1e12}, memory_bytes_per_s=1e11)
    with pytest.raises(ClusterError, match="another device kind is also named 'T4'"):
        make_cluster("c", [a, make_site("b", kind=other)], default_link=("1 Gbit/s", "1 ms"))
