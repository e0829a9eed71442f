"""How large a part each peer reduces: a linear program over measured rates (HiGHS). Pure.

A part has an owner. Inside the owner's site contributions go to it directly. In every other site some hosts stand in for the site: each
sums the contributions of its site for a share of the part and sends one sum across; the reduced part comes back the same way and is passed
on inside. So every pair of sites exchanges each value once in either direction, and the shares say which interfaces carry it. Without
sites everybody is in one, and everything is direct.

Variables: x[o], the owner's part, and y[o, h], the share of it host h of another site stands in for. What every interface and link
carries is linear in them; the program minimises the time of the busiest. Sending contributions and gathering results overlap, so a
direction of an interface carries the sum of both. Latencies and processors are not in it: it is a bound.
"""

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from atoll.errors import FabricError

__all__ = ["Network", "Parts", "PeerRates", "WireRatios", "equal_network", "parts"]


class PeerRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One peer's interface, as measured. `inside_*`: towards peers of its own site; None where that is the same interface."""

    name: str
    site: str = ""
    up_bytes_per_s: float = 1.0
    down_bytes_per_s: float = 1.0
    inside_up_bytes_per_s: float | None = None
    inside_down_bytes_per_s: float | None = None


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peers, and what the links between sites carry in one direction where several hosts share them: by (from, to)."""

    peers: tuple[PeerRates, ...]
    links_bytes_per_s: dict[tuple[str, str], float] = {}

    def __post_init__(self) -> None:
        names = [peer.name for peer in self.peers]
        if not names or len(set(names)) != len(names):
            raise FabricError(f"a collective needs peers with different names, got {', '.join(names) or 'none'}")
        for peer in self.peers:
            inside = (peer.inside_up_bytes_per_s or 1.0, peer.inside_down_bytes_per_s or 1.0)
            if not all(0 < rate < math.inf for rate in (peer.up_bytes_per_s, peer.down_bytes_per_s, *inside)):
                raise FabricError(f"{peer.name}: rates must be positive and finite, got {peer}")
        for (source, target), rate in self.links_bytes_per_s.items():
            if not 0 < rate < math.inf:
                raise FabricError(f"link {source!r}–{target!r}: the rate must be positive and finite, got {rate}")

    @property
    def sites(self) -> dict[str, list[str]]:
        """Peers by site, in the order given."""
        found: dict[str, list[str]] = {}
        for peer in self.peers:
            found.setdefault(peer.site, []).append(peer.name)
        return found

    def without_sites(self) -> "Network":
        """The same peers, each exchanging with every other directly."""
        flat = tuple(
            msgspec.structs.replace(peer, site="", inside_up_bytes_per_s=None, inside_down_bytes_per_s=None) for peer in self.peers
        )
        return Network(peers=flat)


def equal_network(names: "list[str] | tuple[str, ...]", bytes_per_s: float = 25e6) -> Network:
    """Peers of which nothing is known: all alike."""
    return Network(peers=tuple(PeerRates(name=name, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s) for name in names))


_Terms = dict[int, float]  # variable → bytes of it for one byte of tensor


class WireRatios(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the wire over bytes in memory."""

    inside: float = 1.0  # contributions inside a site
    outside: float = 1.0  # sums between sites
    reduced: float = 1.0  # what everybody gets back


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the tensor by owner, of each owner's part by the hosts that stand in for their site, and the bound in seconds."""

    owners: dict[str, float]
    relays: dict[str, dict[str, dict[str, float]]]  # owner → site → host → share of the whole tensor
    bound_seconds: float


def parts(
    network: Network,
    nbytes: float,
    *,
    contributors: Collection[str] | None = None,
    receivers: Collection[str] | None = None,
    ratios: WireRatios | None = None,
) -> Parts:
    """The division that takes least time for the busiest interface. Any peer may own a part, whether it contributes or receives or not."""
    program = _Program(network, contributors, receivers, ratios or WireRatios())
    if len(network.peers) == 1 or not nbytes:
        first = network.peers[0].name
        return Parts(owners={first: 1.0}, relays={first: program.relays_of(first, {})}, bound_seconds=0.0)
    seconds, values = program.least_seconds()
    if seconds > 0:
        values = program.most_even(seconds)
    owners = {peer.name: max(0.0, values[index]) for peer, index in zip(network.peers, program.owner_index, strict=True)}
    shares = {key: max(0.0, values[index]) for key, index in program.relay_index.items()}
    relays = {owner: program.relays_of(owner, shares) for owner in owners}
    return Parts(owners=owners, relays=relays, bound_seconds=seconds * nbytes)


class _Program:
    """The linear program in seconds per byte of tensor."""

    def __init__(
        self, network: Network, contributors: Collection[str] | None, receivers: Collection[str] | None, ratios: WireRatios
    ) -> None:
        names = [peer.name for peer in network.peers]
        self.network = network
        self.site = {peer.name: peer.site for peer in network.peers}
        self.contributors = set(names if contributors is None else contributors)
        self.receivers = set(names if receivers is None else receivers)
        unknown = sorted((self.contributors | self.receivers) - set(names))
        if unknown or not self.contributors:
            raise FabricError(f"contributors and receivers are peers of the network, and somebody contributes; unknown: {unknown}")
        self.ratios = ratios
        self.owner_index = list(range(len(names)))
        pairs = [(owner, host) for owner in names for host in names if self.site[owner] != self.site[host]]
        self.relay_index = {pair: len(names) + number for number, pair in enumerate(pairs)}
        self.count = len(names) + len(pairs)
        self.loads = self._loads()

    def relays_of(self, owner: str, shares: dict[tuple[str, str], float]) -> dict[str, dict[str, float]]:
        """Who stands in for each other site, for this owner's part."""
        others = {site: hosts for site, hosts in self.network.sites.items() if site != self.site[owner]}
        return {site: {host: shares.get((owner, host), 0.0) for host in hosts} for site, hosts in others.items()}

    def least_seconds(self) -> tuple[float, list[float]]:
        """The least time for a byte, and a division that takes it. Solved again in units of the result until that is no tiny number."""
        unit = max(amount / rate for terms, rate in self.loads for amount in terms.values()) if self.loads else 1.0
        for _ in range(8):
            rows = [self._load_row(terms, rate * unit, -1.0) for terms, rate in self.loads]
            time, values = self._solve(rows, [0.0] * len(rows))
            if time < 1e-9:
                return 0.0, values  # nothing has to travel
            if time > 0.1:  # HiGHS's tolerances are absolute
                break
            unit *= time
        return time * unit, values

    def most_even(self, seconds: float) -> list[float]:
        """Of the divisions within a time, the most even: where one peer is the bottleneck many are equally fast."""
        rows = [self._load_row(terms, rate * seconds, 0.0) for terms, rate in self.loads]
        bounds = [1 + 1e-6] * len(rows)
        for variables, weight in self._works():
            row = np.zeros(self.count + 1)
            row[variables], row[self.count] = 1.0, -weight
            rows.append(row)
            bounds.append(0.0)
        return self._solve(rows, bounds)[1]

    def _load_row(self, terms: _Terms, rate: float, last: float) -> np.ndarray:
        row = np.zeros(self.count + 1)
        for variable, amount in terms.items():
            row[variable] = amount / rate
        row[self.count] = last
        return row

    def _solve(self, rows: list[np.ndarray], bounds: list[float]) -> tuple[float, list[float]]:
        """Minimises the last variable."""
        from scipy.optimize import linprog  # takes a moment to load, and only whoever plans a reduction needs it

        equalities, wholes = self._equalities(self.count)
        found = linprog(
            np.append(np.zeros(self.count), 1.0),
            A_ub=np.array(rows) if rows else None,
            b_ub=bounds if rows else None,
            A_eq=equalities,
            b_eq=wholes,
            bounds=(0, None),
            method="highs",
        )
        if not found.success or found.x is None or found.fun is None:
            raise FabricError(f"the parts of a reduction could not be divided: {found.message}")
        return float(found.fun), [float(value) for value in found.x[: self.count]]

    def _works(self) -> list[tuple[list[int], float]]:
        """What is to be even: every part, and all that a host sums, which is about twice as much."""
        works: list[tuple[list[int], float]] = [([number], 1.0) for number in self.owner_index]
        for number, peer in enumerate(self.network.peers):
            works.append(([number, *(index for (_, host), index in self.relay_index.items() if host == peer.name)], 2.0))
        return works

    def _equalities(self, count: int) -> tuple[np.ndarray, list[float]]:
        """Parts make the whole; in every other site, shares make the part."""
        rows = [np.zeros(count + 1)]
        rows[0][self.owner_index] = 1.0
        wholes = [1.0]
        for number, owner in enumerate(self.network.peers):
            for site, hosts in self.network.sites.items():
                if site != owner.site:
                    row = np.zeros(count + 1)
                    row[number] = -1.0
                    for host in hosts:
                        row[self.relay_index[owner.name, host]] = 1.0
                    rows.append(row)
                    wholes.append(0.0)
        return np.array(rows), wholes

    def _loads(self) -> list[tuple[_Terms, float]]:
        """What every direction of every interface and link carries, with its rate."""
        carried: dict[tuple[str, ...], _Terms] = {}
        for source, target, variable, amount in self._flows():
            for resource in self._resources(source, target):
                terms = carried.setdefault(resource, {})
                terms[variable] = terms.get(variable, 0.0) + amount
        return [(terms, self._rate(resource)) for resource, terms in carried.items()]

    def _flows(self) -> list[tuple[str, str, int, float]]:
        """Every transfer: from, to, the variable it is proportional to, bytes for each byte of that."""
        flows: list[tuple[str, str, int, float]] = []
        for number, owner in enumerate(self.network.peers):
            for site, hosts in self.network.sites.items():
                heads = [(owner.name, number)] if site == owner.site else [(host, self.relay_index[owner.name, host]) for host in hosts]
                for head, variable in heads:
                    flows += [(host, head, variable, self.ratios.inside) for host in hosts if host != head and host in self.contributors]
                    flows += [(head, host, variable, self.ratios.reduced) for host in hosts if host != head and host in self.receivers]
                    if site != owner.site:
                        flows += [(head, owner.name, variable, self.ratios.outside)] if self.contributors & set(hosts) else []
                        flows += [(owner.name, head, variable, self.ratios.reduced)] if self.receivers & set(hosts) else []
        return flows

    def _resources(self, source: str, target: str) -> list[tuple[str, ...]]:
        here, there = self.site[source], self.site[target]
        peers = {peer.name: peer for peer in self.network.peers}
        inside = here == there
        up = "inside up" if inside and peers[source].inside_up_bytes_per_s is not None else "up"
        down = "inside down" if inside and peers[target].inside_down_bytes_per_s is not None else "down"
        link = [("link", here, there)] if (here, there) in self.network.links_bytes_per_s and not inside else []
        return [(up, source), (down, target), *link]

    def _rate(self, resource: Sequence[str]) -> float:
        if resource[0] == "link":
            return self.network.links_bytes_per_s[resource[1], resource[2]]
        peer = next(peer for peer in self.network.peers if peer.name == resource[1])
        rates = {
            "up": peer.up_bytes_per_s,
            "down": peer.down_bytes_per_s,
            "inside up": peer.inside_up_bytes_per_s,
            "inside down": peer.inside_down_bytes_per_s,
        }
        rate = rates[resource[0]]
        assert rate is not None
        return rate
