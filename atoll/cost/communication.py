"""Collectives and transfers: α–β costs on the tiers of a cluster — inside a host, inside a site, between sites.

A collective takes the cheapest of three shapes: one flat ring through every member (in order of site and host, so that it enters and
leaves each place once), a binary tree, and a hierarchy (inside hosts first, then between hosts, then between sites). Groups that work at
the same time share the interfaces and links they cross: a `Span` says how many do.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, permutations
from typing import NamedTuple

from atoll.cluster import Cluster, Device, Link
from atoll.cluster.cluster import host_index, site_index, wan_index
from atoll.cost.calibration import Calibration

__all__ = [
    "Group", "Span", "all_gather_seconds", "all_reduce_seconds", "all_to_all_seconds", "collective_bytes", "distinct_groups",
    "slowest_of", "span_of",
]  # fmt: skip


class Tier(NamedTuple):
    """One level of a hierarchy: `members` places joined by links of this rate and latency."""

    members: int
    bytes_per_s: float
    latency_s: float
    sharing: float  # groups that use the narrowest link of this tier at the same time


class Span(NamedTuple):
    """Where the members of one collective live, level by level, and how contended their links are."""

    members: int
    host: Tier
    site: Tier
    wan: Tier
    wan_links: tuple[Link, ...]  # of the ring between sites
    site_names: tuple[str, ...]


def span_of(cluster: Cluster, groups: Sequence[Sequence[Device]], calibration: Calibration) -> Span:
    """The span of the first group, when all `groups` (alike in layout) communicate at once."""
    return _span(cluster, groups[0], calibration, *_sharing(groups))


def _span(cluster: Cluster, group: Sequence[Device], calibration: Calibration, leave_host: float, leave_site: float) -> Span:
    """The span of a group, when so many groups leave one host, and one site, at the same time."""
    per_host: dict[str, int] = {}  # a Counter takes longer to make than all the rest
    for device in group:
        per_host[device.host] = per_host.get(device.host, 0) + 1
    hosts = host_index(cluster)
    members = [hosts[name] for name in per_host]
    host_rate = min([host.link.bytes_per_s for host in members]) * calibration.host_link_efficiency
    host = Tier(max(per_host.values()), host_rate, max([host.link.latency_s for host in members]), 1.0)
    per_site: dict[str, int] = {}
    for member in members:
        per_site[member.site] = per_site.get(member.site, 0) + 1
    sites = tuple(sorted(per_site))
    networks = [site_index(cluster)[name].link for name in sites]
    site_rate = min([link.bytes_per_s for link in networks]) * calibration.network_efficiency
    site_latency = max([link.latency_s for link in networks])
    site = Tier(max(per_site.values()), site_rate, site_latency, leave_host)
    if len(sites) == 1:
        return Span(len(group), host, site, Tier(1, site_rate, site_latency, 1.0), (), sites)
    ring = wan_ring(cluster, sites)
    wan_rate = min([link.bytes_per_s for link in ring]) * calibration.network_efficiency
    wan = Tier(len(sites), wan_rate, max([link.latency_s for link in ring]), leave_site)
    return Span(len(group), host, site, wan, ring, sites)


def _sharing(groups: Sequence[Sequence[Device]]) -> tuple[float, float]:
    """The most groups that leave one host, and one site, at the same time."""
    hosts: dict[str, int] = {}
    sites: dict[str, int] = {}
    for group in groups if len(groups) > 1 else ():
        site_of = {device.host: device.site for device in group}
        if len(site_of) > 1:
            for host in site_of:
                hosts[host] = hosts.get(host, 0) + 1
            across = set(site_of.values())
            for site in across if len(across) > 1 else ():
                sites[site] = sites.get(site, 0) + 1
    return float(max(hosts.values(), default=1)), float(max(sites.values(), default=1))


@lru_cache(maxsize=4096)
def wan_ring(cluster: Cluster, sites: tuple[str, ...]) -> tuple[Link, ...]:
    """The links of the ring through these sites whose narrowest link is widest."""
    if len(sites) < 2:
        return ()
    links = wan_index(cluster)
    if len(sites) == 2:
        return (links[sites[0], sites[1]],)
    if len(sites) <= 6:
        first, rest = sites[0], sites[1:]
        rings = [tuple(links[a, b] for a, b in pairwise((first, *order, first))) for order in permutations(rest)]
        return max(rings, key=lambda ring: (min(link.bytes_per_s for link in ring), -sum(link.latency_s for link in ring)))
    order, left = [sites[0]], set(sites[1:])
    while left:  # widest next hop: seven sites and more make too many rings to try
        here = order[-1]
        order.append(max(left, key=lambda site: (links[here, site].bytes_per_s, -links[here, site].latency_s)))
        left.remove(order[-1])
    return tuple(links[a, b] for a, b in pairwise((*order, order[0])))


def _cheapest(span: Span, nbytes: float, passes: float, site_sharing: float = 0.0, wan_sharing: float = 0.0) -> float:
    """`passes` is 2 for an all-reduce, 1 for a gather or a reduce-scatter; a sharing above the span's own goes before it."""
    hierarchy = slowest = latency = 0.0
    for (n, rate, hop, own), sharing in ((span.host, 0.0), (span.site, site_sharing), (span.wan, wan_sharing)):
        if n > 1:
            seconds = nbytes * (own if own > sharing else sharing) / rate
            ring = (n - 1) / n * seconds + (n - 1) * hop
            tree = seconds + (n - 1).bit_length() * hop
            hierarchy += ring if ring < tree else tree
            slowest = seconds if seconds > slowest else slowest
            latency = hop if hop > latency else latency
    n = span.members
    flat = (n - 1) / n * slowest + (n - 1) * latency
    return passes * (hierarchy if hierarchy < flat else flat)


def all_reduce_seconds(
    span: Span, nbytes: float, calibration: Calibration, *, site_sharing: float = 0.0, wan_sharing: float = 0.0
) -> float:
    """All members end with the sum of everyone's `nbytes`; more groups may share the interfaces and links than the span knows of."""
    if span.members < 2 or not nbytes:
        return 0.0
    return _cheapest(span, nbytes, 2.0, site_sharing, wan_sharing) + calibration.collective_seconds


def all_gather_seconds(span: Span, nbytes: float, calibration: Calibration) -> float:
    """All members end with all `nbytes`, of which each held its part; a reduce-scatter takes as long."""
    if span.members < 2 or not nbytes:
        return 0.0
    return _cheapest(span, nbytes, 1.0) + calibration.collective_seconds


def all_to_all_seconds(span: Span, nbytes: float, calibration: Calibration) -> float:
    """Every member sends `nbytes`, spread evenly over all members."""
    n = span.members
    if n < 2 or not nbytes:
        return 0.0
    inside_host, inside_site = span.host.members, span.host.members * span.site.members
    to_host = nbytes * (inside_host - 1) / n / span.host.bytes_per_s if inside_host > 1 else 0.0
    to_site = nbytes * (n - inside_host) / n * inside_host * span.site.sharing / span.site.bytes_per_s if n > inside_host else 0.0
    to_wan = nbytes * (n - inside_site) / n * inside_site * span.wan.sharing / span.wan.bytes_per_s if span.wan.members > 1 else 0.0
    latency = max(tier.latency_s for tier in (span.host, span.site, span.wan) if tier.members > 1)
    return max(to_host, to_site, to_wan) + latency + calibration.collective_seconds


def collective_bytes(span: Span, nbytes: float, passes: float) -> dict[str, float]:
    """Bytes each link carries for one collective of one group (a flat ring or a hierarchy put the same on the narrow ones)."""
    carried: dict[str, float] = {}
    if span.members < 2 or not nbytes:
        return carried
    if span.host.members > 1:
        carried["inside hosts"] = passes * (span.host.members - 1) * nbytes
    hosts = span.site.members
    if hosts > 1:
        for site in span.site_names:
            carried[site] = passes * (hosts - 1) * nbytes
    if span.wan.members > 1:
        n = span.wan.members
        for link in span.wan_links:
            carried[link.name] = carried.get(link.name, 0.0) + passes * (n - 1) / n * nbytes * (2 if n == 2 else 1)
    return carried


_TYPICAL_BYTES = 64e6  # at which layouts are compared


class Group(NamedTuple):
    """One or more groups that live on the same hosts."""

    span: Span  # of any of them, with the contention among all groups
    hosts: tuple[str, ...]  # whose interfaces they use; () for a group inside one host
    links: tuple[str, ...]  # between sites, by name
    times: int  # how many there are


def distinct_groups(
    cluster: Cluster, groups: Sequence[Sequence[Device]], calibration: Calibration, others: Sequence[Sequence[Device]] = ()
) -> tuple[Group, ...]:
    """The different layouts among groups that communicate at once, `others` beside them."""
    by_hosts: dict[tuple[str, ...], list[Sequence[Device]]] = {}
    for group in groups:
        by_hosts.setdefault(tuple(sorted([device.host for device in group])), []).append(group)
    sharing = _sharing([*groups, *others])
    found = []
    for names, alike in by_hosts.items():
        span = _span(cluster, alike[0], calibration, *sharing)
        hosts = tuple(dict.fromkeys(names))
        links = tuple([link.name for link in span.wan_links])
        found.append(Group(span, hosts if len(hosts) > 1 else (), links, len(alike)))
    return tuple(found)


def slowest_of(groups: Sequence[Group], calibration: Calibration) -> Span:
    """The span of that of the groups which takes longest."""
    spans = [group.span for group in groups]
    return spans[0] if len(spans) == 1 else max(spans, key=lambda span: all_reduce_seconds(span, _TYPICAL_BYTES, calibration))
