"""Making clusters in Python, with the same checks as reading them from a file.

oslo = make_site("oslo", hosts=16, devices=8, kind="A100-80GB", network="100 Gbit/s", latency="10 us")
rome = make_site("rome", hosts=4, devices=8, kind="V100-32GB", network="25 Gbit/s", latency="50 us")
cluster = make_cluster("two sites", [oslo, rome], default_link=("1 Gbit/s", "30 ms"))
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from atoll.cluster.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.cluster.kinds import find_kind
from atoll.cluster.reader import BANDWIDTH, LATENCY, MEMORY, NAME, PREEMPTIONS, PRICE_PER_HOUR
from atoll.errors import ClusterError

__all__ = ["DEFAULT_RESERVE", "MAXIMUM_DEVICES", "Terms", "build_cluster", "build_host", "host_names", "make_cluster", "make_site"]

DEFAULT_RESERVE = 0.05  # of a device's memory: the driver's context, error-correcting bits, the allocator's fragments
MAXIMUM_DEVICES = 1_000_000


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms devices are had. A site's hold for its hosts, a host's for its devices, unless they say otherwise."""

    speed: float = 1.0
    memory_bytes: float | None = None  # what planning may use; None: the kind's memory less the reserve
    memory_reserve: float = DEFAULT_RESERVE
    preemptions_per_hour: float = 0.0
    price_per_hour: float = 0.0

    def usable_bytes(self, kind: DeviceKind) -> float:
        """What planning may use of a device of that kind."""
        return kind.memory_bytes * (1.0 - self.memory_reserve) if self.memory_bytes is None else self.memory_bytes


def host_names(site: str, name: str | None, count: int, already: int) -> list[str]:
    """`o-0 … o-3` for four hosts named `o`; hosts without a name are numbered along the site."""
    if name is None:
        return [f"{site}-{already + i}" for i in range(count)]
    return [f"{name}-{i}" for i in range(count)] if count > 1 else [name]


def build_host(
    site: str, name: str, groups: Sequence[tuple[DeviceKind, int, Terms]], link: tuple[float | None, float | None], where: str
) -> Host:
    """A host with groups of devices; what `link` (bytes/s, latency) leaves open is that of its slowest kind."""
    devices: list[Device] = []
    for kind, count, terms in groups:
        memory_bytes = terms.usable_bytes(kind)
        for _ in range(count):
            devices.append(
                Device(
                    name=f"{name}/{len(devices)}",
                    kind=kind,
                    host=name,
                    site=site,
                    memory_bytes=memory_bytes,
                    speed=terms.speed,
                    preemptions_per_hour=terms.preemptions_per_hour,
                    price_per_hour=terms.price_per_hour,
                )
            )
    bytes_per_s, latency_s = link
    if bytes_per_s is None:
        bytes_per_s = _typical_link([kind for kind, _, _ in groups], len(devices), where)
    if latency_s is None:
        latency_s = max(kind.link_latency_s for kind, _, _ in groups)
    return Host(name=name, site=site, devices=tuple(devices), link=Link(between=(name, name), bytes_per_s=bytes_per_s, latency_s=latency_s))


def _typical_link(kinds: Sequence[DeviceKind], devices: int, where: str) -> float:
    slowest = min(kinds, key=lambda kind: kind.link_bytes_per_s)
    if slowest.link_bytes_per_s:
        return slowest.link_bytes_per_s
    if devices > 1:
        raise ClusterError(
            f"{where} › link: missing, and nothing is known of what joins {slowest.name!r} devices; "
            'write link = { bandwidth = "16 GB/s", latency = "10 us" }'
        )
    return slowest.memory_bytes_per_s  # one device alone: it meets only its own memory


def build_cluster(name: str, sites: Sequence[Site], links: Sequence[Link], default: Link | None, where: str) -> Cluster:
    """A cluster whose names are unique and in which every pair of sites has its link, in the order of the sites."""
    _check_names(sites, where)
    _check_kinds(sites, where)
    order = {site.name: i for i, site in enumerate(sites)}
    given: dict[tuple[str, str], Link] = {}
    for link in links:
        a, b = link.between
        pair = (a, b) if order[a] < order[b] else (b, a)
        if pair in given:
            raise ClusterError(f"{where}: link {a!r}–{b!r}: is there twice")
        given[pair] = msgspec.structs.replace(link, between=pair)
    every: list[Link] = []
    for pair in combinations(order, 2):
        if pair in given:
            every.append(given[pair])
        elif default is not None:
            every.append(msgspec.structs.replace(default, between=pair))
        else:
            raise ClusterError(
                f"{where}: link {pair[0]!r}–{pair[1]!r}: missing; write a [[link]] between them or a [default_link] for all pairs"
            )
    return Cluster(name=name, sites=tuple(sites), links=tuple(every))


def _check_names(sites: Sequence[Site], where: str) -> None:
    if not sites:
        raise ClusterError(f"{where}: a cluster needs at least one site")
    seen: dict[str, str] = {}
    for site in sites:
        if site.name in seen:
            raise ClusterError(f"{where}: site {site.name!r}: another {seen[site.name]} has this name; rename one")
        seen[site.name] = "site"
    for site in sites:
        for host in site.hosts:
            if host.name in seen:
                other = "its site" if host.name == site.name else f"another {seen[host.name]}"
                raise ClusterError(f"{where}: site {site.name!r} › host {host.name!r}: {other} has this name; rename one")
            seen[host.name] = "host"


def _check_kinds(sites: Sequence[Site], where: str) -> None:
    """A name stands for one kind: files describe each kind once."""
    seen: dict[str, DeviceKind] = {}
    for device in (device for site in sites for host in site.hosts for device in host.devices):
        kind = seen.setdefault(device.kind.name, device.kind)
        if kind is not device.kind and kind != device.kind:
            raise ClusterError(f"{where}: device {device.name!r}: another device kind is also named {kind.name!r}")


def make_site(
    name: str,
    *,
    kind: "str | DeviceKind | Sequence[tuple[str | DeviceKind, int]]",
    hosts: int = 1,
    devices: int = 1,
    network: str = "10 Gbit/s",
    latency: str = "50 us",
    link: tuple[str, str] | None = None,
    memory: str | None = None,
    speed: float = 1.0,
    preemptions: str = "0 /h",
    price: str = "$0/h",
) -> Site:
    """A site of `hosts` hosts `name-0 …`, each with `devices` devices of a kind, or with several `(kind, count)`.

    `network` and `latency` are each host's interface, `link` the (bandwidth, latency) inside a host (the kind's own if not given),
    `memory` what planning may use of a device, `price` dollars per device and hour.
    """
    where = f"site {name!r}"
    if not NAME.fullmatch(name):
        raise ClusterError(f"{where}: a name is made of letters, digits, '_', '.' and '-', and begins with a letter or digit")
    groups = [(kind, devices)] if isinstance(kind, str | DeviceKind) else list(kind)
    terms = Terms(
        speed=speed,
        memory_bytes=None if memory is None else MEMORY.read_at(f"{where}: memory", memory),
        preemptions_per_hour=PREEMPTIONS.read_at(f"{where}: preemptions", preemptions),
        price_per_hour=PRICE_PER_HOUR.read_at(f"{where}: price", price),
    )
    if not 1 <= hosts * sum(count for _, count in groups) <= MAXIMUM_DEVICES or min(count for _, count in groups) < 1:
        raise ClusterError(f"{where}: must have between 1 and {MAXIMUM_DEVICES:,} devices, got {hosts} hosts of {groups}")
    if not 0 < speed <= 10:
        raise ClusterError(f"{where}: speed must be above 0 and at most 10, got {speed}")
    kinds = [(find_kind(k, {}, where) if isinstance(k, str) else k, count, terms) for k, count in groups]
    inside = (None, None) if link is None else _figures(f"{where}: link", link)
    built = tuple(build_host(name, host, kinds, inside, where) for host in host_names(name, None, hosts, 0))
    bytes_per_s, latency_s = BANDWIDTH.read_at(f"{where}: network", network), LATENCY.read_at(f"{where}: latency", latency)
    return Site(name=name, hosts=built, link=Link(between=(name, name), bytes_per_s=bytes_per_s, latency_s=latency_s))


def _figures(where: str, figures: tuple[str, str]) -> tuple[float, float]:
    return BANDWIDTH.read_at(where, figures[0]), LATENCY.read_at(where, figures[1])


def make_cluster(
    name: str,
    sites: Sequence[Site],
    links: Mapping[tuple[str, str], tuple[str, str]] | None = None,
    *,
    default_link: tuple[str, str] | None = None,
) -> Cluster:
    """A cluster of sites; links between them are (bandwidth, latency) by pair of names, with a default for pairs not named."""
    where = f"cluster {name!r}"
    known = {site.name for site in sites}
    for pair in links or {}:
        if len(pair) != 2 or pair[0] == pair[1] or not known.issuperset(pair):
            raise ClusterError(f"{where}: link {pair}: must name two of the sites {', '.join(sorted(known))}")
    return build_cluster(
        name,
        sites,
        [_wan(pair, figures, where) for pair, figures in (links or {}).items()],
        None if default_link is None else _wan(("", ""), default_link, where),
        where,
    )


def _wan(between: tuple[str, str], figures: tuple[str, str], where: str) -> Link:
    place = f"{where}: link {between[0]!r}–{between[1]!r}" if any(between) else f"{where}: default_link"
    bytes_per_s, latency_s = _figures(place, figures)
    return Link(between=between, bytes_per_s=bytes_per_s, latency_s=latency_s)
