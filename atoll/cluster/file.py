"""Cluster files: TOML in, a checked Cluster out (docs/cluster.md), and a Cluster as TOML that reads back equal, like hosts written once."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.cluster.build import DEFAULT_RESERVE, MAXIMUM_DEVICES, Terms, build_cluster, build_host, host_names
from atoll.cluster.cluster import CONTENT_KINDS, Cluster, Device, DeviceKind, Host, Link, Measurements, Site
from atoll.cluster.kinds import RATES, Column, catalogue, find_kind, read_kind
from atoll.cluster.reader import (
    BANDWIDTH,
    FLOPS,
    LATENCY,
    MEMORY,
    MEMORY_BANDWIDTH,
    PREEMPTIONS,
    PRICE_PER_BYTE,
    PRICE_PER_HOUR,
    Quantity,
    Table,
    nearest,
)
from atoll.errors import ClusterError

__all__ = ["dump_cluster", "load_cluster", "parse_cluster"]

_TERMS = ("speed", "memory", "memory_reserve", "preemptions", "price")
_LINK = ("bandwidth", "latency")
_LOGIN = ("user", "python", "workdir")
_ADDRESS = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]\-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\\-]*")
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
        if text.lstrip().startswith(("plan v", "{")):
            raise ClusterError(f"{where}: is a plan, not a cluster file; give it with --plan (`atoll plan --check` checks it)") from None
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
    return build_cluster(table.text("name", "my cluster", default_name if "name" not in table else None), sites, links, default, where)


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
    table = Table(values, where, ("name", "network", "may_send", "host", *_TERMS))
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
    return Site(name=name, hosts=tuple(hosts), link=link, may_send=_may_send(table))


def _may_send(table: Table) -> tuple[str, ...] | None:
    """The kinds of tensors a site may send to others; None where nothing is said."""
    if "may_send" not in table:
        return None
    given = table.required("may_send", "")
    if not isinstance(given, list):
        raise table.wrong("may_send", f'must be a list of what may leave the site, like ["updates"]; [] for nothing; got {given!r}')
    for kind in given:
        if not isinstance(kind, str) or kind not in CONTENT_KINDS:
            hint = nearest(kind, CONTENT_KINDS) if isinstance(kind, str) else ""
            raise table.wrong("may_send", f"nothing is called {kind!r}{hint}; known are {', '.join(CONTENT_KINDS)}")
    return tuple(kind for kind in CONTENT_KINDS if kind in given)


def _hosts(
    values: object, where: str, site: str, already: int, kinds: Mapping[str, DeviceKind], site_terms: Terms, room: int
) -> list[Host]:
    table = Table(values, where, ("name", "count", "devices", "link", "address", *_LOGIN, *_TERMS))
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
    hosts = [build_host(site, host, groups, inside, where) for host in host_names(site, name, count, already)]
    login, addresses = _login(table), _addresses(table, count)
    return [msgspec.structs.replace(host, address=address, **login) for host, address in zip(hosts, addresses, strict=True)]


def _addresses(table: Table, count: int) -> list[str]:
    """Of each of the hosts; empty where none is given."""
    if "address" not in table:
        return [""] * count
    given = table.required("address", "")
    values: list[object] = given if isinstance(given, list) else [given]
    if len(values) != count:
        example = ", ".join(f'"10.0.0.{number + 1}"' for number in range(min(count, 2)))
        raise table.wrong("address", f"must be one for each of {count} hosts, like [{example}{', …' if count > 2 else ''}]")
    addresses: list[str] = []
    for address in values:
        if isinstance(address, str) and "@" in address:
            user, _, rest = address.partition("@")
            raise table.wrong("address", f"is a host without a user: write address = {rest!r} and user = {user!r}")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise table.wrong("address", f"must be a host's name or IP address, like 'gpu1.example.org', got {address!r}")
        addresses.append(address)
    if len(set(addresses)) < count:
        raise table.wrong("address", "is there twice; hosts alike are different machines")
    return addresses


def _login(table: Table) -> dict[str, str]:
    """How one gets to work on a host with an address."""
    login = {key: table.text(key, example) for key, example in zip(_LOGIN, ("me", "python3", "~/atoll"), strict=True) if key in table}
    for key in login:
        if "address" not in table:
            raise table.wrong(key, "is for hosts that are reached over ssh; give the host an address too")
    if "user" in login and not _USER.fullmatch(login["user"]):
        raise table.wrong("user", f"must be a user's name, got {login['user']!r}")
    if "workdir" in login and not login["workdir"].startswith(("/", "~/")):
        raise table.wrong("workdir", f"must begin with / or ~/, got {login['workdir']!r}")
    if any(not value.isprintable() for value in login.values()):
        raise table.wrong(next(key for key, value in login.items() if not value.isprintable()), "must be one line of printable characters")
    return login


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


_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def dump_cluster(cluster: Cluster) -> str:
    """TOML that `parse_cluster` reads back equal, for any cluster that was loaded or made by `make_cluster`."""
    lines = [f"name = {_text(cluster.name)}"]
    for site in cluster.sites:
        lines += ["", *_site_lines(site)]
    lines += _links(cluster.links)
    kinds = {device.kind.name: device.kind for device in cluster.devices}
    for kind in kinds.values():
        if catalogue().get(kind.name) != kind:
            lines += ["", *_kind(kind)]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML basic string."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08X}") for c in value) + '"'


def _exact(kind: Quantity, value: float) -> str:
    return f'"{kind.exact(value)}"'


def _figures(bytes_per_s: float, latency_s: float, bandwidth: Quantity = BANDWIDTH) -> str:
    return f"{{ bandwidth = {_exact(bandwidth, bytes_per_s)}, latency = {_exact(LATENCY, latency_s)} }}"


def _site_lines(site: Site) -> list[str]:
    lines = ["[[site]]", f"name = {_text(site.name)}"]
    inside = site.hosts[0].link
    if len(site.hosts) > 1 or (site.link.bytes_per_s, site.link.latency_s) != (inside.bytes_per_s, inside.latency_s):
        lines.append(f"network = {_figures(site.link.bytes_per_s, site.link.latency_s)}")
    if site.may_send is not None:
        lines.append(f"may_send = [{', '.join(map(_text, site.may_send))}]")
    numbered = all(host.name == f"{site.name}-{i}" for i, host in enumerate(site.hosts))
    position = 0
    while position < len(site.hosts):
        count = _alike(site.hosts[position:], numbered)
        lines += _host(site.hosts[position], count, named=not numbered)
        position += count
    return lines


def _host_without_names(host: Host) -> tuple[object, ...]:
    terms = tuple((d.kind, d.memory_bytes, d.speed, d.preemptions_per_hour, d.price_per_hour) for d in host.devices)
    return (terms, host.link.bytes_per_s, host.link.latency_s, host.address)


def _alike(hosts: Sequence[Host], numbered: bool) -> int:
    """How many hosts from the first on can be written as one table with a count."""
    stem = hosts[0].name.removesuffix("-0")
    if hosts[0].address or (not numbered and stem == hosts[0].name):
        return 1
    first = _host_without_names(hosts[0])
    count = 1
    while count < len(hosts) and (numbered or hosts[count].name == f"{stem}-{count}") and _host_without_names(hosts[count]) == first:
        count += 1
    return count


def _host(host: Host, count: int, named: bool) -> list[str]:
    lines = ["", "  [[site.host]]"]
    if named:
        lines.append(f"  name = {_text(host.name.removesuffix('-0') if count > 1 else host.name)}")
    if count > 1:
        lines.append(f"  count = {count}")
    reached = {"address": host.address, "user": host.user, "python": host.python, "workdir": host.workdir}
    lines += [f"  {key} = {_text(value)}" for key, value in reached.items() if value]
    groups: list[tuple[str, int]] = []
    for terms in map(_device, host.devices):
        if groups and groups[-1][0] == terms:
            groups[-1] = (terms, groups[-1][1] + 1)
        else:
            groups.append((terms, 1))
    written = [f"{{ {terms} }}" if devices == 1 else f"{{ {terms}, count = {devices} }}" for terms, devices in groups]
    lines.append(f"  devices = [{', '.join(written)}]")
    if not _usual_link(host):
        lines.append(f"  link = {_figures(host.link.bytes_per_s, host.link.latency_s, MEMORY_BANDWIDTH)}")
    return lines


def _usual_link(host: Host) -> bool:
    """Whether the host's link is what it would be if nothing were said of it."""
    bandwidths = {device.kind.link_bytes_per_s for device in host.devices}
    latency_s = max(device.kind.link_latency_s for device in host.devices)
    return min(bandwidths) == host.link.bytes_per_s and latency_s == host.link.latency_s


def _device(device: Device) -> str:
    parts = [f"kind = {_text(device.kind.name)}"]
    if device.memory_bytes != device.kind.memory_bytes * (1.0 - DEFAULT_RESERVE):
        parts.append(f"memory = {_exact(MEMORY, device.memory_bytes)}")
    if device.speed != 1.0:
        parts.append(f"speed = {device.speed!r}")
    if device.preemptions_per_hour:
        parts.append(f"preemptions = {_exact(PREEMPTIONS, device.preemptions_per_hour)}")
    if device.price_per_hour:
        parts.append(f"price = {_exact(PRICE_PER_HOUR, device.price_per_hour)}")
    return ", ".join(parts)


def _link_lines(link: Link) -> list[str]:
    lines = [f"bandwidth = {_exact(BANDWIDTH, link.bytes_per_s)}", f"latency = {_exact(LATENCY, link.latency_s)}"]
    return [*lines, f"price = {_exact(PRICE_PER_BYTE, link.price_per_byte)}"] if link.price_per_byte else lines


def _links(links: Sequence[Link]) -> list[str]:
    """Links between sites; figures that at least two of them share become the default."""
    if not links:
        return []
    common, times = Counter(tuple(_link_lines(link)) for link in links).most_common(1)[0]
    lines = ["", "[default_link]", *common] if times > 1 else []
    for link in links:
        if times == 1 or tuple(_link_lines(link)) != common:
            lines += ["", "[[link]]", f"between = [{_text(link.between[0])}, {_text(link.between[1])}]", *_link_lines(link)]
    return lines


def _kind(kind: DeviceKind) -> list[str]:
    flops = ", ".join(f"{precision} = {_exact(FLOPS, rate)}" for precision, rate in kind.flops.items())
    lines = [
        "[[device_kind]]",
        f"name = {_text(kind.name)}",
        f"memory = {_exact(MEMORY, kind.memory_bytes)}",
        f"memory_bandwidth = {_exact(MEMORY_BANDWIDTH, kind.memory_bytes_per_s)}",
        f"flops = {{ {flops} }}",
    ]
    if kind.cpu:
        lines.append("cpu = true")
    if kind.link_bytes_per_s:
        lines.append(f"link = {_figures(kind.link_bytes_per_s, kind.link_latency_s, MEMORY_BANDWIDTH)}")
    if kind.source:
        lines.append(f"source = {_text(kind.source)}")
    return lines + _measured(kind.measured) if kind.measured else lines


def _measured(measured: Measurements) -> list[str]:
    lines = ["[device_kind.measured]", f"threads = {measured.threads}", f"operator = {_exact(LATENCY, measured.operator_seconds)}"]
    for key, (_, columns) in RATES.items():
        rows = [f"  {{ {_row(rate, columns)} }}," for rate in getattr(measured, key)]
        if rows:
            lines += [f"{key} = [", *rows, "]"]
    return lines


def _row(rate: msgspec.Struct, columns: Mapping[str, Column]) -> str:
    defaults = {field.name: field.default for field in msgspec.structs.fields(rate)}
    written = []
    for key, (field, kind) in columns.items():
        value = getattr(rate, field)
        if value != defaults[field]:
            text = _exact(kind, value) if isinstance(kind, Quantity) else str(value) if kind is None else _text(value)
            written.append(f"{key} = {text}")
    return ", ".join(written)
