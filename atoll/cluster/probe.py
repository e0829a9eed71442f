"""This machine as a Cluster: what it is, what it was measured to do, and the peers it was measured against."""

import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll import units
from atoll.cluster.build import DEFAULT_RESERVE, build_cluster
from atoll.cluster.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.cluster.file import parse_cluster
from atoll.cluster.host_name import SITE, this_host
from atoll.cluster.measure import DeviceMeasurement, interleaved, measure_device, one_way_copy
from atoll.cluster.memory import host_memory, keep_freed_memory
from atoll.cluster.neighbours import busy_neighbours
from atoll.cluster.peer import PeerLink, measure_loopback

__all__ = ["Probed", "join_peers", "probe_host", "rounded"]

_NEAR_S = 2e-3  # a round trip shorter than this is a network inside a site
_FALLBACK_LATENCY_S = 5e-6

Tick = Callable[[float], None]
Effort = Callable[[torch.device, float], DeviceMeasurement]


@dataclass(frozen=True)
class Probed:
    """This machine as a cluster of one host, and how busy it was while it was measured (1: not at all)."""

    cluster: Cluster
    busy: float


def probe_host(
    *,
    quick: bool = False,
    budget_s: float | None = None,
    processes: int = 1,
    undisturbed: bool = False,
    tick: Tick = lambda share: None,
) -> Probed:
    """Measure this machine: its accelerators if PyTorch sees any, else its CPU, as one device or as one for each of several processes.

    `undisturbed` leaves out what neighbours cost. Several processes are measured at once, as they will run.
    """
    name = this_host()

    def effort(device: torch.device, available_bytes: float) -> DeviceMeasurement:
        return measure_device(device, available_bytes, quick=quick, budget_s=budget_s, undisturbed=undisturbed, tick=tick)

    devices, busy = _accelerators(name, effort) if torch.accelerator.is_available() else _cpu(name, effort, processes)
    link = _inside_link(name, devices)
    host = Host(name=name, site=SITE, devices=tuple(devices), link=link)
    interface = Link(between=(SITE, SITE), bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
    return Probed(rounded(Cluster(name=name, sites=(Site(name=SITE, hosts=(host,), link=interface),))), busy)


def _cpu(host: str, effort: Effort, processes: int) -> tuple[list[Device], float]:
    """The CPU, or its cores divided among processes; one is measured beside the others, and stands for them."""
    memory = host_memory()
    keep_freed_memory()  # as a run does
    if processes > 1:
        torch.set_num_threads(max(1, _cores() // processes))
    with busy_neighbours(min(processes, _cores()) - 1, torch.get_num_threads()):
        measured = effort(torch.device("cpu"), memory.available_bytes / processes)
    kind = _kind(f"{_cpu_name()}, {torch.get_num_threads()} of {_cores()} cores", memory.total_bytes / processes, measured)
    usable = memory.available_bytes / processes * (1.0 - DEFAULT_RESERVE)
    devices = [Device(name=f"{host}/{i}", kind=kind, host=host, site=SITE, memory_bytes=usable) for i in range(processes)]
    return devices, measured.busy


def _accelerators(host: str, effort: Effort) -> tuple[list[Device], float]:
    """Every accelerator; the first of each name is measured and stands for the others."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "asked only when there is one"
    module = torch.get_device_module(accelerator)
    kinds: dict[str, DeviceKind] = {}
    devices, busy = [], 1.0
    for i in range(torch.accelerator.device_count()):
        name = module.get_device_name(i) if hasattr(module, "get_device_name") else accelerator.type
        free, total = torch.accelerator.get_memory_info(i)
        if name not in kinds:
            torch.accelerator.set_device_index(i)
            measured = effort(torch.device(accelerator.type, i), free)
            kinds[name], busy = _kind(name, total, measured), max(busy, measured.busy)
        usable = free * (1.0 - DEFAULT_RESERVE)
        devices.append(Device(name=f"{host}/{i}", kind=kinds[name], host=host, site=SITE, memory_bytes=usable))
    return devices, busy


def _kind(name: str, memory_bytes: float, measured: DeviceMeasurement) -> DeviceKind:
    flops: dict[str, float] = {}
    for rate in measured.measurements.matmul:
        flops[rate.precision] = max(flops.get(rate.precision, 0.0), rate.flops_per_s)
    return DeviceKind(
        name=name,
        cpu=measured.measurements.threads > 0,
        memory_bytes=float(memory_bytes),
        flops=flops,
        memory_bytes_per_s=measured.memory_bytes_per_s,
        source=f"atoll probe, torch {torch.__version__}; flops are the fastest products measured",
        measured=measured.measurements,
    )


def _inside_link(host: str, devices: Sequence[Device]) -> Link:
    """What joins the host's devices: measured between the first two, or the only one's memory."""
    bytes_per_s = min(device.kind.memory_bytes_per_s for device in devices)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if len(devices) > 1 and accelerator is None:
        found = measure_loopback()
        return Link(between=(host, host), bytes_per_s=min(bytes_per_s, found.bytes_per_s), latency_s=found.round_trip_s / 2)
    if len(devices) > 1:
        assert accelerator is not None
        size, case = one_way_copy(torch.device(accelerator.type, 0), torch.device(accelerator.type, 1))
        (timing,) = interleaved([case], budget_s=1.0, synchronize=torch.accelerator.synchronize)
        bytes_per_s = min(bytes_per_s, size / timing.seconds)
    return Link(between=(host, host), bytes_per_s=bytes_per_s, latency_s=_FALLBACK_LATENCY_S)


def _cores() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine() or "CPU"


def join_peers(here: Cluster, peers: Sequence[PeerLink]) -> Cluster:
    """This machine and the peers it was measured against.

    A peer within two milliseconds joins this machine's site, whose network is then as measured to the slowest such peer; others are sites
    of their own. Between two of those nothing was measured: the way through here is taken, the narrower link and the sum of the latencies.
    """
    site = here.sites[0]
    taken = {site.name, *(host.name for host in site.hosts)}
    kinds = {device.kind.name: device.kind for device in here.devices}
    near: list[PeerLink] = []
    hosts = list(site.hosts)
    far: dict[str, PeerLink] = {}
    sites: list[Site] = []
    for peer in peers:
        described = parse_cluster(peer.description, f"--peer {peer.address}").hosts[0]
        name = _free(described.name, taken)
        if peer.round_trip_s < _NEAR_S:
            near.append(peer)
            hosts.append(_moved(described, name, site.name, kinds))
        else:
            place = _free(f"{name}-site", taken)
            far[place] = peer
            host = _moved(described, name, place, kinds)
            sites.append(Site(name=place, hosts=(host,), link=_link((place, place), host.link.bytes_per_s, host.link.latency_s)))
    own = site.link
    if near:
        own = _link(own.between, min(peer.bytes_per_s for peer in near), max(peer.round_trip_s for peer in near) / 2)
    links = [_link((site.name, place), peer.bytes_per_s, peer.round_trip_s / 2) for place, peer in far.items()]
    for (a, one), (b, other) in combinations(far.items(), 2):
        links.append(_link((a, b), min(one.bytes_per_s, other.bytes_per_s), (one.round_trip_s + other.round_trip_s) / 2))
    return rounded(build_cluster(here.name, [Site(name=site.name, hosts=tuple(hosts), link=own), *sites], links, None, "probe"))


def rounded(cluster: Cluster) -> Cluster:
    """The cluster in three significant digits, which is more than a measurement is worth and what a person can read in a file."""
    return msgspec.convert(_rounded("", msgspec.to_builtins(cluster)), Cluster)


def _rounded(name: str, value: Any) -> Any:
    """Fields say their units, so each number becomes what the text of it in the cluster file reads back as."""
    if isinstance(value, dict):
        return {key: _rounded(key, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(name, inner) for inner in value]
    if not isinstance(value, float) or not value:
        return value
    if (name.endswith(("_seconds", "_s")) and not name.endswith("_per_s")) or name == "seconds":
        return units.parse_seconds(units.format_seconds(value))
    return units.parse_bytes(units.format_bytes(value))  # rates of bytes and of operations have the same prefixes


def _link(between: tuple[str, str], bytes_per_s: float, latency_s: float) -> Link:
    return Link(between=between, bytes_per_s=bytes_per_s, latency_s=latency_s)


def _free(name: str, taken: set[str]) -> str:
    """The name, or with a number behind it if another has it."""
    candidates = [name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))]
    free = next(candidate for candidate in candidates if candidate not in taken)
    taken.add(free)
    return free


def _moved(host: Host, name: str, site: str, kinds: dict[str, DeviceKind]) -> Host:
    """A peer's host under a name and in a site of this cluster. Two hosts of a kind were measured apart, so their kinds are told apart."""
    devices = []
    for i, device in enumerate(host.devices):
        kind = device.kind
        if kinds.setdefault(kind.name, kind) != kind:
            kind = msgspec.structs.replace(kind, name=f"{kind.name} ({name})")
            kinds[kind.name] = kind
        devices.append(msgspec.structs.replace(device, name=f"{name}/{i}", kind=kind, host=name, site=site))
    link = msgspec.structs.replace(host.link, between=(name, name))
    return Host(name=name, site=site, devices=tuple(devices), link=link)
