"""Small clusters for tests of the lab."""

from atoll.cluster import Cluster, make_cluster, make_site

__all__ = ["two_sites"]


def two_sites(hosts: int = 2, devices: int = 1, latency: str = "1 ms", inside: str = "50 us") -> Cluster:
    """Oslo and Rome."""
    sites = [
        make_site(name, hosts=hosts, devices=devices, kind="A10", network="1 Gbit/s", latency=inside if name == "oslo" else "50 us")
        for name in ("oslo", "rome")
    ]
    return make_cluster("two", sites, {("oslo", "rome"): ("200 Mbit/s", latency)})
