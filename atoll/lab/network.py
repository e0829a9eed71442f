"""Network: addresses and names of a lab's hosts, the commands that build it, those that lead from some conditions to others, and what the
forwarder does to a packet. Pure: times and chances are given.

Each host has a network namespace with one interface, `eth0`, at a port of its site's bridge; both ends are shaped to the interface's
bandwidth. A site's namespace sends everything for other sites into a TUN device, where the forwarder (`forwarder.py`) gives each pair of
sites its bandwidth and latency. Traffic inside a site takes the bridge, unless the forwarder has to do something to it: latencies that a
bridge cannot make, loss, a cut in one direction.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from atoll.cluster import Cluster, Host, Site
from atoll.cluster.cluster import wan_index
from atoll.errors import LabError
from atoll.lab.faults import Conditions

__all__ = [
    "INTERFACE",
    "SLOWEST_BRIDGE_SECONDS",
    "TUNNEL",
    "Command",
    "ForwarderState",
    "LabNetwork",
    "Pipe",
    "PipeState",
    "Pipes",
    "wire_bytes",
]

INTERFACE, TUNNEL, _BRIDGE = "eth0", "tun0", "br0"
SLOWEST_BRIDGE_SECONDS = 0.0005  # latencies inside a site from here on are imposed by the forwarder; a bridge has about 0.05 ms
_BURST_SECONDS, _LEAST_BURST_BYTES, _MOST_BURST_BYTES = 0.004, 32 * 1024, 8 << 20
_QUEUE_MILLISECONDS = 50
_LEAST_BUFFER_BYTES = 16 << 20  # of a socket; more where a link holds more
_MOST_SITES, _MOST_HOSTS = 250, 60_000
_FORWARDED_TABLE = "100"
_BUFFERS_IN_FLIGHT = 4
_ROUTER_SETTINGS = "; ".join(
    f"echo {value} > /proc/sys/net/{name}"
    for name, value in (
        ("ipv4/ip_forward", 1),
        ("ipv4/conf/all/rp_filter", 0),
        ("ipv4/conf/default/rp_filter", 0),
        ("ipv4/conf/all/send_redirects", 0),
        (f"ipv4/conf/{_BRIDGE}/send_redirects", 0),
    )
)
_QUEUE_SECONDS = 0.05  # a link's buffer holds so much, and a round trip
_LEAST_QUEUE_BYTES = 256 * 1024

Command = tuple[str, ...]


class _Place(msgspec.Struct, frozen=True):
    """A host and its numbers."""

    host: Host
    site: Site
    site_number: int
    number: int  # among all hosts: h3
    address: str


class PipeState(msgspec.Struct, frozen=True, array_like=True):
    """One direction of the link of two sites, by their numbers; or the inside of a site."""

    source: int
    target: int
    bytes_per_s: float | None  # None: as fast as it goes
    latency_s: float
    loss: float


class ForwarderState(msgspec.Struct, frozen=True):
    """Everything the forwarder has to know. `blocked` are pairs of addresses, or of prefixes that end in a dot."""

    pipes: tuple[PipeState, ...]
    blocked: tuple[tuple[str, str], ...] = ()
    lossy: dict[str, float] = {}

    @property
    def loses(self) -> bool:
        """Whether packets are lost anywhere: then they must come one by one, not in bundles of up to 64 KB."""
        return bool(self.lossy) or any(pipe.loss for pipe in self.pipes)


class LabNetwork:
    """The network of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        if len(cluster.sites) > _MOST_SITES or any(len(site.hosts) > _MOST_HOSTS for site in cluster.sites):
            raise LabError(f"a lab has at most {_MOST_SITES} sites of {_MOST_HOSTS} hosts")
        self.cluster = cluster
        self._places: dict[str, _Place] = {}
        for i, site in enumerate(cluster.sites):
            for j, host in enumerate(site.hosts):
                address = f"10.{i + 1}.{(j + 2) // 256}.{(j + 2) % 256}"
                self._places[host.name] = _Place(host, site, i, len(self._places), address)
        self._sites = {site.name: i for i, site in enumerate(cluster.sites)}

    @property
    def site_networks(self) -> tuple[str, ...]:
        """Names of the sites' namespaces."""
        return tuple(f"s{i}" for i in range(len(self.cluster.sites)))

    def address(self, host: str) -> str:
        """A host's address."""
        return self._places[host].address

    def host_network(self, host: str) -> str:
        """The name of a host's namespace."""
        return f"h{self._places[host].number}"

    def hosts_file(self, own: str) -> str:
        """`/etc/hosts` as a host sees it."""
        lines = ["127.0.0.1 localhost", *(f"{place.address} {name}" for name, place in self._places.items())]
        return "\n".join(lines) + "\n"

    def host_settings(self) -> dict[str, str]:
        """Kernel settings of every host: buffers that fill the longest link, nothing remembered from one connection to the next."""
        links = [*self.cluster.links, *(site.link for site in self.cluster.sites)]
        longest = max(_BUFFERS_IN_FLIGHT * link.bytes_per_s * 2 * link.latency_s for link in links)
        most = int(min(max(longest, _LEAST_BUFFER_BYTES), 2**30))
        return {
            "net/ipv4/tcp_rmem": f"4096 131072 {most}",
            "net/ipv4/tcp_wmem": f"4096 16384 {most}",
            "net/ipv4/tcp_no_metrics_save": "1",
            "net/ipv6/conf/all/disable_ipv6": "1",
        }

    def build(self) -> list[Command]:
        """Namespaces, bridges, ports; TUN devices are the forwarder's."""
        commands: list[Command] = []
        for i, network in enumerate(self.site_networks):
            commands += [
                ("ip", "netns", "add", network),
                ("ip", "-n", network, "link", "add", _BRIDGE, "type", "bridge"),
                ("ip", "-n", network, "addr", "add", f"{_gateway(i)}/16", "dev", _BRIDGE),
                ("ip", "-n", network, "link", "set", _BRIDGE, "up"),
                ("ip", "netns", "exec", network, "sh", "-c", _ROUTER_SETTINGS),
            ]
        for place in self._places.values():
            commands += self._plug_in(place)
        return commands

    def connect_sites(self) -> list[Command]:
        """Once the forwarder has made a TUN device in every site: what comes from the bridge goes there, and the other way round."""
        commands: list[Command] = []
        for network in self.site_networks:
            commands += [
                ("ip", "-n", network, "link", "set", TUNNEL, "txqueuelen", "5000", "up"),
                ("ip", "-n", network, "rule", "add", "iif", _BRIDGE, "lookup", _FORWARDED_TABLE),
                ("ip", "-n", network, "route", "add", "default", "dev", TUNNEL, "table", _FORWARDED_TABLE),
                ("ip", "-n", network, "route", "add", "default", "dev", TUNNEL),
            ]
        return commands

    def change(self, before: Conditions, after: Conditions) -> list[Command]:
        """What has to be done to hosts and ports."""
        commands: list[Command] = []
        for name, place in self._places.items():
            if before.slowdown(name) != after.slowdown(name):
                commands += self._shape(place, after)
            if before.connected(name) != after.connected(name):
                commands.append(
                    ("ip", "-n", f"s{place.site_number}", "link", "set", _port(place), "up" if after.connected(name) else "down")
                )
            if self._forwarded(place.site, before) != self._forwarded(place.site, after):
                commands.append(self._route_inside_site(place, after))
        return commands

    def forwarder_state(self, conditions: Conditions) -> ForwarderState:
        """What the forwarder does to packets."""
        blocked = sorted((self._selector(a), self._selector(b)) for a, b in conditions.blocked(self.cluster))
        lossy = {place.address: conditions.loss(name) for name, place in self._places.items() if conditions.loss(name)}
        return ForwarderState(pipes=tuple(self._pipes(conditions)), blocked=tuple(blocked), lossy=lossy)

    def _pipes(self, conditions: Conditions) -> Iterator[PipeState]:
        links = wan_index(self.cluster)
        for a, i in self._sites.items():
            for b, j in self._sites.items():
                if a == b:
                    latency = self.cluster.sites[i].link.latency_s
                    yield PipeState(i, j, None, latency if latency >= SLOWEST_BRIDGE_SECONDS else 0.0, 0.0)
                else:
                    link = links[a, b]
                    yield PipeState(i, j, link.bytes_per_s / conditions.slowdown(a, b), link.latency_s, conditions.loss(a, b))

    def _selector(self, place: str) -> str:
        """An address, or the prefix of a site's addresses."""
        return self.address(place) if place in self._places else f"10.{self._sites[place] + 1}."

    def _forwarded(self, site: Site, conditions: Conditions) -> bool:
        """Whether traffic between the site's own hosts takes the way through the forwarder."""
        names = {host.name for host in site.hosts} | {site.name}
        within = any(a in names and b in names for a, b in conditions.blocked(self.cluster))
        return site.link.latency_s >= SLOWEST_BRIDGE_SECONDS or within or any(conditions.loss(host.name) for host in site.hosts)

    def _plug_in(self, place: _Place) -> list[Command]:
        own, site = self.host_network(place.host.name), f"s{place.site_number}"
        return [
            ("ip", "netns", "add", own),
            ("ip", "link", "add", _port(place), "netns", site, "type", "veth", "peer", "name", INTERFACE, "netns", own),
            ("ip", "-n", site, "link", "set", _port(place), "master", _BRIDGE, "up"),
            ("ip", "-n", own, "link", "set", "lo", "up"),
            ("ip", "-n", own, "addr", "add", f"{place.address}/32", "dev", INTERFACE),
            ("ip", "-n", own, "link", "set", INTERFACE, "up"),
            ("ip", "-n", own, "route", "add", _gateway(place.site_number), "dev", INTERFACE, "scope", "link"),
            ("ip", "-n", own, "route", "add", "default", "via", _gateway(place.site_number), "dev", INTERFACE),
            self._route_inside_site(place, Conditions()),
            *self._shape(place, Conditions()),
        ]

    def _route_inside_site(self, place: _Place, conditions: Conditions) -> Command:
        subnet = f"10.{place.site_number + 1}.0.0/16"
        way = ("via", _gateway(place.site_number)) if self._forwarded(place.site, conditions) else ("scope", "link")
        return ("ip", "-n", self.host_network(place.host.name), "route", "replace", subnet, "dev", INTERFACE, *way)

    def _shape(self, place: _Place, conditions: Conditions) -> list[Command]:
        """Both directions: what the host sends, and what its port sends to it."""
        rate = place.site.link.bytes_per_s / conditions.slowdown(place.host.name)
        ends = ((self.host_network(place.host.name), INTERFACE), (f"s{place.site_number}", _port(place)))
        return [("tc", "-n", network, "qdisc", "replace", "dev", device, "root", *token_bucket(rate)) for network, device in ends]


def token_bucket(bytes_per_s: float) -> Sequence[str]:
    """The queueing discipline of an interface with this bandwidth."""
    burst = int(min(max(bytes_per_s * _BURST_SECONDS, _LEAST_BURST_BYTES), _MOST_BURST_BYTES))
    return ("tbf", "rate", f"{max(1, round(bytes_per_s * 8))}bit", "burst", str(burst), "latency", f"{_QUEUE_MILLISECONDS}ms")


def _gateway(site_number: int) -> str:
    return f"10.{site_number + 1}.255.254"


def _port(place: _Place) -> str:
    return f"p{place.number}"


class Pipe:
    """A narrow place followed by a long way. A packet enters when those before it have passed, or is dropped when too many wait."""

    def __init__(self, state: PipeState) -> None:
        self.state = state  # may be replaced: what is on its way stays on its way, what waits passes at the new speed
        self._free_at = 0.0  # when all that entered will have passed the narrow place

    def leaves_at(self, now: float, size_bytes: int) -> float | None:
        """When a packet that comes now is at the other end; None: dropped."""
        state = self.state
        if state.bytes_per_s is None:
            return now + state.latency_s
        queue_bytes = max(state.bytes_per_s * (2 * state.latency_s + _QUEUE_SECONDS), _LEAST_QUEUE_BYTES)
        if (self._free_at - now) * state.bytes_per_s > queue_bytes:
            return None
        self._free_at = max(now, self._free_at) + size_bytes / state.bytes_per_s
        return self._free_at + state.latency_s


class Pipes:
    """All pipes, and which packets may enter them."""

    def __init__(self, state: ForwarderState, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._pipes: dict[tuple[int, int], Pipe] = {}
        self.change(state)

    def change(self, state: ForwarderState) -> None:
        """Other conditions from now on."""
        for one in state.pipes:
            self._pipes.setdefault((one.source, one.target), Pipe(one)).state = one
        self._blocked = [(_bytes(a), _bytes(b)) for a, b in state.blocked]
        self._lossy = {_bytes(address): share for address, share in state.lossy.items()}

    def leaves_at(self, now: float, source: bytes, target: bytes, size_bytes: int) -> float | None:
        """When a packet from one address to another is there; None: never."""
        pipe = self._pipes.get((source[1] - 1, target[1] - 1))
        if pipe is None or (self._blocked and self._is_blocked(source, target)):
            return None
        if (pipe.state.loss or self._lossy) and self._is_lost(pipe.state.loss, source, target):
            return None
        return pipe.leaves_at(now, size_bytes)

    def _is_lost(self, of_pipe: float, source: bytes, target: bytes) -> bool:
        shares = (of_pipe, self._lossy.get(source, 0.0), self._lossy.get(target, 0.0))
        return any(share and self._chance() < share for share in shares)

    def _is_blocked(self, source: bytes, target: bytes) -> bool:
        return any(source.startswith(a) and target.startswith(b) for a, b in self._blocked)


def _bytes(text: str) -> bytes:
    """`"10.1.0.2"` or `"10.1."` as the bytes addresses begin with."""
    return bytes(int(part) for part in text.split(".") if part)


def wire_bytes(size_bytes: int, segment_bytes: int, header_bytes: int) -> int:
    """What a packet, or a bundle of segments that the kernel left together, takes on a wire: every segment has headers."""
    if not segment_bytes or size_bytes <= header_bytes:
        return size_bytes
    segments = -(-(size_bytes - header_bytes) // segment_bytes)
    return size_bytes + (segments - 1) * header_bytes
