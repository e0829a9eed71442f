"""Cluster files: TOML in, a checked Cluster out. docs/cluster.md describes the format."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from atoll.cluster.build import MAXIMUM_DEVICES, Terms, assemble, build_host, host_names
from atoll.cluster.cluster import Cluster, DeviceKind, Host, Link, Site
from atoll.cluster.kinds import find_kind, read_kind
from atoll.cluster.reader import BANDWIDTH, LATENCY, MEMORY, PREEMPTIONS, PRICE_PER_BYTE, PRICE_PER_HOUR, Table, nearest
from atoll.errors import ClusterError

__all__ = ["load_cluster", "parse_cluster"]

_TERMS = ("speed", "memory", "memory_reserve", "preemptions", "price")
_LINK = ("bandwidth", "latency")
_LARGEST_FILE = 64 * 2**20
_DEVICES_EXAMPLE = 'devices = [{ kind = "A100-80GB", count = 8 }]'


def load_cluster(path: str | Path) -> Cluster:
    """The cluster a TOML file describes, or `ClusterError` with the file, the key and the remedy."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ClusterError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ClusterError(f"{path}: is a directory; give a cluster file") from None
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _LARGEST_FILE:
        raise ClusterError(f"{path}: is larger than {_LARGEST_FILE // 2**20} MiB, so it is no cluster file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ClusterError(f"{path}: line {line}: is not UTF-8 text") from None
    return parse_cluster(text, str(path), default_name=file.stem)


def parse_cluster(text: str, where: str = "cluster", *, default_name: str = "cluster") -> Cluster:
    """The cluster a text in TOML describes; `where` stands in front of errors."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ClusterError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        match = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
        place, problem = (f"{match[2]}: ", match[1]) if match else ("", str(error))
        raise ClusterError(f"{where}: {place}not valid TOML: {problem}") from None
    return _cluster(Table(document, where, ("name", "site", "link", "default_link", "device_kind")), where, default_name)


def _cluster(table: Table, where: str, default_name: str) -> Cluster:
    kinds = _kinds(table, where)
    sites: list[Site] = []
    devices = 0
    for i, values in enumerate(table.entries("site", needed='[[site]] with name = "here"')):
        sites.append(_site(values, _place(where, "site", values, i), kinds, MAXIMUM_DEVICES - devices))
        devices += sum(len(host.devices) for host in sites[-1].hosts)
    known = [site.name for site in sites]
    links = [_wan(values, where, i, known) for i, values in enumerate(table.entries("link"))]
    default = None
    if "default_link" in table:
        default = _link(table.table("default_link", (*_LINK, "price"), "{ … }"), ("", ""))
    return assemble(table.text("name", "my cluster", default_name if "name" not in table else None), sites, links, default, where)


def _place(where: str, noun: str, values: object, position: int) -> str:
    """`cluster.toml: site 'oslo'`, or `site[0]` while it has no name."""
    name = values.get("name") if isinstance(values, Mapping) else None
    joint = " › " if ": " in where else ": "
    return f"{where}{joint}{noun} {name!r}" if isinstance(name, str) and name else f"{where}{joint}{noun}[{position}]"


def _kinds(table: Table, where: str) -> dict[str, DeviceKind]:
    kinds: dict[str, DeviceKind] = {}
    for i, values in enumerate(table.entries("device_kind")):
        place = _place(where, "device_kind", values, i)
        kind = read_kind(values, place)
        if kind.name in kinds:
            raise ClusterError(f"{place}: is there twice")
        kinds[kind.name] = kind
    return kinds


def _site(values: object, where: str, kinds: Mapping[str, DeviceKind], room: int) -> Site:
    table = Table(values, where, ("name", "network", "host", *_TERMS))
    name = table.name("name", "oslo")
    terms = _terms(table, Terms())
    hosts: list[Host] = []
    devices = 0
    for i, entry in enumerate(table.entries("host", needed=f"[[site.host]] with {_DEVICES_EXAMPLE}")):
        hosts += _hosts(entry, _place(where, "host", entry, i), name, len(hosts), kinds, terms, room - devices)
        devices = sum(len(host.devices) for host in hosts)
    if "network" in table:
        link = _link(table.table("network", _LINK, "{ … }"), (name, name))
    elif len(hosts) == 1:  # nobody to talk to inside the site
        link = Link(between=(name, name), bytes_per_s=hosts[0].link.bytes_per_s, latency_s=hosts[0].link.latency_s)
    else:
        raise table.wrong(
            "network", 'missing; write network = { bandwidth = "25 Gbit/s", latency = "50 us" }, what each host\'s interface carries'
        )
    return Site(name=name, hosts=tuple(hosts), link=link)


def _hosts(
    values: object, where: str, site: str, already: int, kinds: Mapping[str, DeviceKind], site_terms: Terms, room: int
) -> list[Host]:
    table = Table(values, where, ("name", "count", "devices", "link", *_TERMS))
    name = table.name("name", "o") if "name" in table else None
    count = table.integer("count", 1, MAXIMUM_DEVICES, 1)
    terms = _terms(table, site_terms)
    groups = []
    for i, entry in enumerate(table.entries("devices", needed=_DEVICES_EXAMPLE)):
        groups.append(_devices(entry, f"{where} › devices[{i}]", kinds, terms))
    if count * sum(devices for _, devices, _ in groups) > room:
        raise ClusterError(f"{where}: the cluster would have more than {MAXIMUM_DEVICES:,} devices")
    inside: tuple[float | None, float | None] = (None, None)
    if "link" in table:
        link = table.table("link", _LINK, "{ … }")
        inside = (link.quantity("bandwidth", BANDWIDTH), link.quantity("latency", LATENCY) if "latency" in link else None)
    return [build_host(site, host, groups, inside, where) for host in host_names(site, name, count, already)]


def _devices(values: object, where: str, kinds: Mapping[str, DeviceKind], terms: Terms) -> tuple[DeviceKind, int, Terms]:
    table = Table(values, where, ("kind", "count", *_TERMS))
    kind = find_kind(table.text("kind", "A100-80GB"), kinds, table.at("kind"))
    return kind, table.integer("count", 1, MAXIMUM_DEVICES, 1), _terms(table, terms)


def _terms(table: Table, outer: Terms) -> Terms:
    """The terms a table gives, and the outer ones for what it leaves open."""
    if "memory" in table and "memory_reserve" in table:
        raise table.wrong("memory_reserve", "give either memory, which is exactly what may be used, or memory_reserve, not both")
    memory = None if "memory_reserve" in table else outer.memory_bytes
    return Terms(
        speed=table.number("speed", 1e-6, 10.0, outer.speed),
        memory_bytes=table.quantity("memory", MEMORY) if "memory" in table else memory,
        memory_reserve=table.number("memory_reserve", 0.0, 0.95, outer.memory_reserve),
        preemptions_per_hour=table.quantity("preemptions", PREEMPTIONS, outer.preemptions_per_hour),
        price_per_hour=table.quantity("price", PRICE_PER_HOUR, outer.price_per_hour),
    )


def _link(table: Table, between: tuple[str, str]) -> Link:
    return Link(
        between=between,
        bytes_per_s=table.quantity("bandwidth", BANDWIDTH),
        latency_s=table.quantity("latency", LATENCY),
        price_per_byte=table.quantity("price", PRICE_PER_BYTE, 0.0),
    )


def _wan(values: object, where: str, position: int, sites: list[str]) -> Link:
    between = values.get("between") if isinstance(values, Mapping) else None
    ends = between if isinstance(between, list) and len(between) == 2 and all(isinstance(end, str) for end in between) else None
    place = f"{where}: link {ends[0]!r}–{ends[1]!r}" if ends else f"{where}: link[{position}]"
    table = Table(values, place, ("between", *_LINK, "price"))
    table.required("between", '["oslo", "rome"]')
    if not ends:
        raise table.wrong("between", f'must be the names of two sites, like ["oslo", "rome"], got {between!r}')
    for end in ends:
        if end not in sites:
            raise table.wrong("between", f"unknown site {end!r}{nearest(end, sites)}")
    if ends[0] == ends[1]:
        raise table.wrong("between", f"must be two different sites; what joins the hosts of {ends[0]!r} is that site's network")
    return _link(table, (ends[0], ends[1]))
