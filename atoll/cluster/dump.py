"""Writing a Cluster as the TOML that reads back equal, with hosts that are alike written once."""

from collections import Counter
from collections.abc import Sequence

from atoll import units
from atoll.cluster.build import DEFAULT_RESERVE
from atoll.cluster.cluster import Cluster, ConvRate, Device, DeviceKind, Host, Link, Measurements, Site
from atoll.cluster.kinds import catalogue

__all__ = ["dump_cluster"]

_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def dump_cluster(cluster: Cluster) -> str:
    """TOML that `parse_cluster` reads back equal, for any cluster that was loaded or made by `make_cluster`."""
    lines = [f"name = {_text(cluster.name)}"]
    for site in cluster.sites:
        lines += ["", *_site(site)]
    lines += _links(cluster.links)
    kinds = {device.kind.name: device.kind for device in cluster.devices}
    for kind in kinds.values():
        if catalogue().get(kind.name) != kind:
            lines += ["", *_kind(kind)]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML basic string."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08X}") for c in value) + '"'


def _figures(bytes_per_s: float, latency_s: float) -> str:
    return f'{{ bandwidth = "{units.exact_rate(bytes_per_s)}", latency = "{units.exact_seconds(latency_s)}" }}'


def _site(site: Site) -> list[str]:
    lines = ["[[site]]", f"name = {_text(site.name)}"]
    inside = site.hosts[0].link
    if len(site.hosts) > 1 or (site.link.bytes_per_s, site.link.latency_s) != (inside.bytes_per_s, inside.latency_s):
        lines.append(f"network = {_figures(site.link.bytes_per_s, site.link.latency_s)}")
    numbered = all(host.name == f"{site.name}-{i}" for i, host in enumerate(site.hosts))
    position = 0
    while position < len(site.hosts):
        count = _alike(site.hosts[position:], numbered)
        lines += _host(site.hosts[position], count, named=not numbered)
        position += count
    return lines


def _host_without_names(host: Host) -> tuple[object, ...]:
    terms = tuple((d.kind, d.memory_bytes, d.speed, d.preemptions_per_hour, d.price_per_hour) for d in host.devices)
    return (terms, host.link.bytes_per_s, host.link.latency_s)


def _alike(hosts: Sequence[Host], numbered: bool) -> int:
    """How many hosts from the first on can be written as one table with a count."""
    stem = hosts[0].name.removesuffix("-0")
    if not numbered and stem == hosts[0].name:
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
    groups: list[tuple[str, int]] = []
    for terms in map(_device, host.devices):
        if groups and groups[-1][0] == terms:
            groups[-1] = (terms, groups[-1][1] + 1)
        else:
            groups.append((terms, 1))
    written = [f"{{ {terms} }}" if devices == 1 else f"{{ {terms}, count = {devices} }}" for terms, devices in groups]
    lines.append(f"  devices = [{', '.join(written)}]")
    if not _usual_link(host):
        latency = units.exact_seconds(host.link.latency_s)
        lines.append(f'  link = {{ bandwidth = "{_bytes_rate(host.link.bytes_per_s)}", latency = "{latency}" }}')
    return lines


def _usual_link(host: Host) -> bool:
    """Whether the host's link is what it would be if nothing were said of it."""
    bandwidths = {device.kind.link_bytes_per_s for device in host.devices}
    latency_s = max(device.kind.link_latency_s for device in host.devices)
    return min(bandwidths) == host.link.bytes_per_s and latency_s == host.link.latency_s


def _device(device: Device) -> str:
    parts = [f"kind = {_text(device.kind.name)}"]
    if device.memory_bytes != device.kind.memory_bytes * (1.0 - DEFAULT_RESERVE):
        parts.append(f'memory = "{units.exact_bytes(device.memory_bytes)}"')
    if device.speed != 1.0:
        parts.append(f"speed = {device.speed!r}")
    if device.preemptions_per_hour:
        parts.append(f'preemptions = "{units.exact_per_hour(device.preemptions_per_hour)}"')
    if device.price_per_hour:
        parts.append(f'price = "{units.exact_price_per_hour(device.price_per_hour)}"')
    return ", ".join(parts)


def _link(link: Link) -> list[str]:
    lines = [f'bandwidth = "{units.exact_rate(link.bytes_per_s)}"', f'latency = "{units.exact_seconds(link.latency_s)}"']
    return [*lines, f'price = "{units.exact_price_per_byte(link.price_per_byte)}"'] if link.price_per_byte else lines


def _links(links: Sequence[Link]) -> list[str]:
    """Links between sites; figures that at least two of them share become the default."""
    if not links:
        return []
    common, times = Counter(tuple(_link(link)) for link in links).most_common(1)[0]
    lines = ["", "[default_link]", *common] if times > 1 else []
    for link in links:
        if times == 1 or tuple(_link(link)) != common:
            lines += ["", "[[link]]", f"between = [{_text(link.between[0])}, {_text(link.between[1])}]", *_link(link)]
    return lines


def _kind(kind: DeviceKind) -> list[str]:
    flops = ", ".join(f'{precision} = "{units.exact_flops(rate)}"' for precision, rate in kind.flops.items())
    lines = [
        "[[device_kind]]",
        f"name = {_text(kind.name)}",
        f'memory = "{units.exact_bytes(kind.memory_bytes)}"',
        f'memory_bandwidth = "{_bytes_rate(kind.memory_bytes_per_s)}"',
        f"flops = {{ {flops} }}",
    ]
    if kind.cpu:
        lines.append("cpu = true")
    if kind.link_bytes_per_s:
        lines.append(
            f'link = {{ bandwidth = "{_bytes_rate(kind.link_bytes_per_s)}", latency = "{units.exact_seconds(kind.link_latency_s)}" }}'
        )
    if kind.source:
        lines.append(f"source = {_text(kind.source)}")
    return lines + _measured(kind.measured) if kind.measured else lines


def _bytes_rate(bytes_per_s: float) -> str:
    """Memory bandwidths are spoken of in bytes."""
    nice = f"{units.format_bytes(bytes_per_s)}/s"
    return nice if units.parse_rate(nice) == bytes_per_s else f"{bytes_per_s!r} B/s"


def _measured(measured: Measurements) -> list[str]:
    tables = {
        "matmul": [
            f'precision = "{m.precision}", rows = {m.rows}, columns = {m.columns}, depth = {m.depth}, '
            f'rate = "{units.exact_flops(m.flops_per_s)}"'
            for m in measured.matmul
        ],
        "conv": [_conv(rate) for rate in measured.conv],
        "memory": [f'size = "{units.exact_bytes(m.bytes)}", rate = "{_bytes_rate(m.bytes_per_s)}"' for m in measured.memory],
        "operators": [
            f'name = {_text(o.operator)}, size = "{units.exact_bytes(o.bytes)}", rate = "{_bytes_rate(o.bytes_per_s)}", '
            f'backward = "{_bytes_rate(o.backward_bytes_per_s)}"'
            for o in measured.operators
        ],
        "attention": [
            f'variant = "{a.variant}", heads = {a.heads}, sequence = {a.sequence}, depth = {a.depth}, '
            f'rate = "{units.exact_flops(a.flops_per_s)}", backward = "{units.exact_flops(a.backward_flops_per_s)}"'
            for a in measured.attention
        ],
        "updates": [
            f'optimizer = {_text(u.optimizer)}, elements = {u.elements}, time = "{units.exact_seconds(u.seconds)}"'
            for u in measured.updates
        ],
    }
    lines = ["[device_kind.measured]", f"threads = {measured.threads}", f'operator = "{units.exact_seconds(measured.operator_seconds)}"']
    for key, rows in tables.items():
        if rows:
            lines += [f"{key} = [", *(f"  {{ {row} }}," for row in rows), "]"]
    return lines


def _conv(rate: ConvRate) -> str:
    sides = f"batch = {rate.batch}, inputs = {rate.inputs}, outputs = {rate.outputs}, size = {rate.size}, kernel = {rate.kernel}"
    groups = f", groups = {rate.groups}" if rate.groups > 1 else ""
    backward = f', backward = "{units.exact_flops(rate.backward_flops_per_s)}"' if rate.backward_flops_per_s else ""
    return f'precision = "{rate.precision}", {sides}{groups}, rate = "{units.exact_flops(rate.flops_per_s)}"{backward}'
