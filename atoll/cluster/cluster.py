"""Cluster: sites → hosts → devices, and the links that join them. A noun: frozen, typed, JSON round trip.

Three tiers of link: inside a host (NVLink, PCIe, shared memory), inside a site (each host has one network interface, shared by its devices)
and between two sites (one pipe, shared by everything that crosses). A link's bandwidth is what one direction carries.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

__all__ = ["CONTENT_KINDS", "Cluster", "Device", "DeviceKind", "Host", "Link", "Site"]
__all__ += ["AttentionRate", "ConvRate", "MatmulRate", "Measurements", "MemoryRate", "OperatorRate", "UpdateTime"]


CONTENT_KINDS = {
    "updates": "what training changed in the weights, between rounds",
    "gradients": "gradients of weights, or of activations",
    "activations": "what a stage of a pipeline computed for the next one",
    "logits": "what a model said of samples",
    "features": "what a layer inside a model computed of samples, for another model",
    "ids": "samples themselves, or what was sampled from a model: tokens, labels",
    "states": "weights and optimizers: common states, checkpoints",
}
"""What may cross the border of a site, for `may_send`."""


class MatmulRate(msgspec.Struct, frozen=True, kw_only=True):
    """What a `rows × depth` by `depth × columns` product was measured to run at."""

    precision: str
    rows: int
    columns: int
    depth: int
    flops_per_s: float  # counting 2·rows·columns·depth


class ConvRate(msgspec.Struct, frozen=True, kw_only=True):
    """What a square convolution, stride 1, same size out as in, was measured to run at."""

    precision: str
    batch: int
    inputs: int  # channels
    outputs: int
    size: int  # pixels a side
    kernel: int
    flops_per_s: float  # counting 2·batch·size²·inputs·outputs·kernel²/groups
    backward_flops_per_s: float = 0.0  # counting twice that; 0: not measured
    groups: int = 1


class MemoryRate(msgspec.Struct, frozen=True, kw_only=True):
    """What elementwise work that touches `bytes` in all was measured to run at: cache for small amounts, memory for large ones."""

    bytes: float  # read and written by one operator: its working set
    bytes_per_s: float


class OperatorRate(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator that is bound by memory, or by a function it computes on every element, was measured to run at.

    Bytes are counted as capture counts them (`atoll.graph`), so that an operator of that size takes `bytes / bytes_per_s`.
    """

    operator: str  # as `Work.operator` has it: "gelu"
    bytes: float  # of forward
    bytes_per_s: float
    backward_bytes_per_s: float


class AttentionRate(msgspec.Struct, frozen=True, kw_only=True):
    """What attention of every place of a sequence to every other was measured to run at, all scores counted."""

    variant: str  # "", "causal", "dropout"
    heads: int  # times samples
    sequence: int
    depth: int  # of a head
    flops_per_s: float  # counting 4·heads·sequence²·depth
    backward_flops_per_s: float  # counting 10·heads·sequence²·depth


class UpdateTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long an optimizer was measured to take over one tensor."""

    optimizer: str  # "adamw", "momentum", "sgd"
    elements: int
    seconds: float


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """What `atoll probe` measured of a device; it goes before the roofline of peak figures."""

    operator_seconds: float  # what the smallest operator costs: dispatch, or the launch of a kernel
    matmul: tuple[MatmulRate, ...] = ()
    conv: tuple[ConvRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    operators: tuple[OperatorRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    threads: int = 0  # CPU threads in use; 0 for an accelerator


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True):
    """What planning needs to know of a kind of device. `flops` are dense peak rates by precision, in FLOP/s."""

    name: str
    memory_bytes: float
    flops: Mapping[str, float]  # "fp32", "tf32", "bf16", "fp16", "fp8", "int8"
    memory_bytes_per_s: float
    link_bytes_per_s: float = 0.0  # typical link to its neighbours inside a host, per direction
    link_latency_s: float = 5e-6
    source: str = ""
    cpu: bool = False  # a processor that shares the host's memory with everything else, not an accelerator
    measured: Measurements | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bytes_per_s))  # the flops are a mapping, which has no hash

    def peak(self, precision: str) -> float:
        """FLOP/s at a precision; a device without bf16 units computes it no faster than fp32, and fp32 matmuls stay fp32."""
        return self.flops.get(precision) or self.flops["fp32"]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two sites, or the network inside a site or host (then `between` names one place twice)."""

    between: tuple[str, str]
    bytes_per_s: float
    latency_s: float  # one way
    price_per_byte: float = 0.0  # dollars

    @property
    def name(self) -> str:
        """`"oslo–rome"`, or `"oslo"` for the network inside a place."""
        a, b = self.between
        return a if a == b else f"{a}–{b}"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator or CPU that holds a shard of a stage."""

    name: str  # "host/0"
    kind: DeviceKind
    host: str
    site: str
    memory_bytes: float  # what planning may use of it
    speed: float = 1.0  # of its kind's rates: below 1 for an imposed or shared device
    preemptions_per_hour: float = 0.0
    price_per_hour: float = 0.0


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Devices behind one network interface; `link` is what joins them to each other. With an `address` it is reached over ssh."""

    name: str
    site: str
    devices: tuple[Device, ...]
    link: Link
    address: str = ""  # as ssh knows it: a name, an IP address or a `Host` of the user's ssh configuration
    user: str = ""  # as ssh decides, if not given; so it is for the others
    python: str = ""  # the interpreter with Atoll there
    workdir: str = ""  # where processes are started there, and where the script's directory is copied to


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts on one network; `link.bytes_per_s` is each host's interface."""

    name: str
    hosts: tuple[Host, ...]
    link: Link
    may_send: tuple[str, ...] | None = None  # of CONTENT_KINDS, to other sites; None: all


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to run on. Build one with `Cluster.load("c.toml")`, `load_cluster`, or in Python."""

    name: str
    sites: tuple[Site, ...]
    links: tuple[Link, ...] = ()  # between sites

    def __hash__(self) -> int:
        return id(self)  # looked up by identity in caches; equality stays by value

    @staticmethod
    def load(path: "str | Path") -> "Cluster":
        """The cluster a TOML file describes; see `atoll.cluster.load_cluster`."""
        from atoll.cluster.file import load_cluster  # the reader needs the nouns, so it cannot be imported before them

        return load_cluster(path)

    def to_json(self) -> str:
        """This cluster as JSON; `from_json` reads it back equal. `dump_cluster` writes the shorter TOML."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: "str | bytes") -> "Cluster":
        """The cluster that `to_json` wrote."""
        return msgspec.json.decode(text, type=Cluster)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts, site by site."""
        return tuple(host for site in self.sites for host in site.hosts)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, host by host."""
        return _devices(self)

    def device(self, name: str) -> Device:
        """The device of that name (`"host/0"`)."""
        return device_index(self)[name]

    def link_between(self, a: Device, b: Device) -> Link:
        """The narrowest link on the way from one device to another: their host's, their site's, or the one between their sites."""
        if a.host == b.host:
            return host_index(self)[a.host].link
        if a.site == b.site:
            return site_index(self)[a.site].link
        return wan_index(self)[a.site, b.site]


@lru_cache(maxsize=16)
def _devices(cluster: Cluster) -> tuple[Device, ...]:
    return tuple(device for host in cluster.hosts for device in host.devices)


@lru_cache(maxsize=16)
def device_index(cluster: Cluster) -> dict[str, Device]:
    """Devices by name."""
    return {device.name: device for device in cluster.devices}


@lru_cache(maxsize=16)
def host_index(cluster: Cluster) -> dict[str, Host]:
    """Hosts by name."""
    return {host.name: host for host in cluster.hosts}


@lru_cache(maxsize=16)
def site_index(cluster: Cluster) -> dict[str, Site]:
    """Sites by name."""
    return {site.name: site for site in cluster.sites}


@lru_cache(maxsize=16)
def wan_index(cluster: Cluster) -> dict[tuple[str, str], Link]:
    """Links between sites, both ways round; every pair of sites is there (the loader sees to it)."""
    return {pair: link for link in cluster.links for pair in (link.between, link.between[::-1])}
