"""Transfers between neighbouring stages: the way from one replica to another, and what a micro-batch costs on it.

Lanes divide a micro-batch, so a replica sends as many pieces as the side with more lanes has; pieces that take the same interface or link
queue for it. A path is the slowest of those ways, with the part of the bytes that takes it.
"""

from collections.abc import Hashable
from typing import NamedTuple

from atoll.cluster import Device
from atoll.cluster.cluster import site_index
from atoll.codec import codec_spec
from atoll.cost.context import DevicePlace, Memo, PricingContext
from atoll.cost.pipeline import Hop
from atoll.plan import Plan, Stage

__all__ = ["Boundary", "Path", "SharedLinks", "Transfers"]


class Path(NamedTuple):
    """The way from one replica to another."""

    bytes_per_s: float
    latency: float
    part: float  # of a micro-batch's bytes, on the way that takes longest
    link: str  # name by which codecs and traffic know it; "" on one device
    between_sites: bool
    codec_bytes_per_s: float  # memory rate at which a tensor is encoded or decoded
    resource: tuple[str, ...]  # what transfers of others queue for too: an interface, a link between sites in one direction; () for none


class Boundary(NamedTuple):
    """The ways between two neighbouring stages with as many replicas, column by column."""

    onward: tuple[Path, ...]
    back: tuple[Path, ...]
    kinds: tuple[tuple[int, int], ...]  # equal for columns whose ways are equal
    alike: bool  # whether all columns' are
    queued: tuple[
        tuple[int, Path, tuple[int, ...]], ...
    ]  # direction (0 onward, 1 back), a way that others queue for, the columns that take it
    between_sites: bool  # whether any way leads from site to site
    links: tuple[tuple[tuple[str, bool], tuple[int, ...]], ...]  # by link (and whether it is between sites): the columns that take it


class Transfers:
    """Paths between any replicas, remembered; equal paths are one object."""

    def __init__(self, setting: PricingContext) -> None:
        self._setting = setting
        self._known = Memo(self._slowest_way)
        self._equal: dict[Path, Path] = {}
        self._ways = Memo(self._both_ways)
        self._boundaries = Memo(self._boundary)

    def both_ways(self, here: DevicePlace, there: DevicePlace, i: int, j: int) -> tuple[Path, Path]:
        """The way from replica `i` of a stage to replica `j` of its neighbour, and the way back."""
        return self._ways[here, there, i, j]

    def _both_ways(self, key: tuple[DevicePlace, DevicePlace, int, int]) -> tuple[Path, Path]:
        here, there, i, j = key
        senders, receivers = here.groups[i][:: here.tensor], there.groups[j][:: there.tensor]  # the first of each lane
        return self._known[senders, receivers], self._known[receivers, senders]

    def boundary(self, here: DevicePlace, there: DevicePlace) -> Boundary:
        """The ways between replica i of a stage and replica i of the next, for every i."""
        return self._boundaries[here, there]

    def _boundary(self, both: tuple[DevicePlace, DevicePlace]) -> Boundary:
        columns = [self.both_ways(*both, i, i) for i in range(len(both[0].groups))]
        onward, back = tuple([forth for forth, _ in columns]), tuple([returning for _, returning in columns])
        kinds = tuple([(id(forth), id(returning)) for forth, returning in columns])
        queued: dict[tuple[int, Path], list[int]] = {}
        links: dict[tuple[str, bool], list[int]] = {}
        for direction, row in enumerate((onward, back)):
            for i, path in enumerate(row):
                if path.resource:
                    queued.setdefault((direction, path), []).append(i)
                if path.link and row is onward:
                    links.setdefault((path.link, path.between_sites), []).append(i)
        users = tuple([(direction, path, tuple(users)) for (direction, path), users in queued.items()])
        taken = tuple([(link, tuple(columns)) for link, columns in links.items()])
        between = any(path.between_sites for path in onward)
        return Boundary(onward, back, kinds, len(set(kinds)) == 1, users, between, taken)

    def _slowest_way(self, ends: tuple[tuple[str, ...], tuple[str, ...]]) -> Path:
        """Of the ways the pieces take from the first devices of lanes to those of other lanes; equal ones are one object."""
        senders, receivers = ends
        pieces = max(len(senders), len(receivers))
        if pieces == 1:
            way = self._way(self._setting.devices[senders[0]], self._setting.devices[receivers[0]], 1.0, 1.0)
            return self._equal.setdefault(way, way)
        ways: dict[tuple[str, ...], Path] = {}
        for piece in range(pieces):
            names = senders[piece * len(senders) // pieces], receivers[piece * len(receivers) // pieces]
            sender, receiver = (self._setting.devices[name] for name in names)
            way = self._way(sender, receiver, 1 / pieces, 1 / len(senders))
            queue = way.resource or names  # a wire between two devices is theirs alone
            before = ways.get(queue)
            ways[queue] = way if before is None else way._replace(part=way.part + before.part)
        slowest = max(ways.values(), key=lambda way: (way.part / way.bytes_per_s, way.latency))
        return self._equal.setdefault(slowest, slowest)

    def _way(self, sender: Device, receiver: Device, part: float, coded: float) -> Path:
        calibration = self._setting.calibration
        if sender.name == receiver.name:
            return Path(1.0, 0.0, 0.0, "", False, 1.0, ())
        link = self._setting.cluster.link_between(sender, receiver)
        if sender.host == receiver.host:
            rate = link.bytes_per_s * calibration.host_link_efficiency
            return Path(rate, link.latency_s, part, "inside hosts", False, 1.0, ())
        if sender.site == receiver.site:
            rate = link.bytes_per_s * calibration.network_efficiency
            return Path(rate, link.latency_s, part, link.name, False, 1.0, (sender.host, receiver.site))
        sites = site_index(self._setting.cluster)
        rate = min(link.bytes_per_s, sites[sender.site].link.bytes_per_s, sites[receiver.site].link.bytes_per_s)
        memory = min(device.kind.memory_bytes_per_s * device.speed for device in (sender, receiver)) * calibration.memory_efficiency
        between = (sender.site, receiver.site)
        return Path(rate * calibration.network_efficiency, link.latency_s, part, link.name, True, memory / coded, between)

    def boundary_bytes(self, plan: Plan, after: Stage) -> tuple[float, float]:
        """Bytes of a micro-batch that cross the cut after a stage: activations forth, gradients back."""
        boundary = self._setting.graph.layers[after.stop - 1]
        return boundary.output_bytes * plan.micro_batch_size, boundary.gradient_bytes * plan.micro_batch_size

    def hop(self, plan: Plan, path: Path, nbytes: float) -> Hop:
        """What a micro-batch of `nbytes` holds of the path, where nobody else uses it."""
        if path.between_sites and plan.codecs:
            nbytes *= codec_spec(plan.codecs.get(path.link, "none")).ratio(self._setting.element_bytes)
        return Hop(nbytes * path.part / path.bytes_per_s, path.latency, -1)

    def codec_seconds(self, plan: Plan, path: Path, nbytes: float) -> float:
        """What sender and receiver spend on encoding and decoding a micro-batch of `nbytes`."""
        if not path.between_sites or not plan.codecs:
            return 0.0
        return codec_spec(plan.codecs.get(path.link, "none")).memory_passes * nbytes / path.codec_bytes_per_s


class SharedLinks:
    """Who uses which link, and how often in a step."""

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[int, float]] = {}  # by link: seconds of one transfer of each user, by how often they use it
        self._known: dict[tuple[Hashable, int], float] = {}

    def add(self, link: Hashable, times: int, seconds: float) -> None:
        """A user whose transfers take `seconds` alone, or several that together do; each sends `times`."""
        users = self._users.setdefault(link, {})
        users[times] = users.get(times, 0.0) + seconds

    def occupancy(self, link: Hashable, times: int) -> float:
        """How long a transfer of one who uses a link so often holds it."""
        found = self._known.get((link, times))
        if found is None:
            users = self._users[link].items()
            found = sum([seconds if theirs >= times else seconds * theirs / times for theirs, seconds in users])
            self._known[link, times] = found
        return found
