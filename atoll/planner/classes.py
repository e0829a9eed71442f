"""Devices that are alike, and the slots they make: the planner places thousands of devices by placing a few classes."""

from collections.abc import Iterable
from typing import NamedTuple

from atoll.cluster import Cluster, Device, Host

__all__ = ["DeviceClass", "Slot", "device_classes", "slots_of"]


class DeviceClass(NamedTuple):
    """Devices of one site that planning cannot tell apart."""

    number: int  # position in the list of classes
    device: Device  # any one of them
    hosts: tuple[tuple[str, ...], ...]  # their names, host by host

    @property
    def size(self) -> int:
        """How many devices there are."""
        return sum(len(names) for names in self.hosts)


class Slot(NamedTuple):
    """Devices that form one replica (or a lane of one), all of one class."""

    kind: int  # the class's number
    devices: tuple[str, ...]


def device_classes(cluster: Cluster) -> tuple[DeviceClass, ...]:
    """Classes in the order of the cluster: site by site."""
    found: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    example: dict[tuple[object, ...], Device] = {}
    for site in cluster.sites:
        for host in site.hosts:
            by_key: dict[tuple[object, ...], list[str]] = {}
            for device in host.devices:
                key = _alike(device, host)
                by_key.setdefault(key, []).append(device.name)
                example.setdefault(key, device)
            for key, names in by_key.items():
                found.setdefault(key, []).append(tuple(names))
    return tuple(DeviceClass(i, example[key], tuple(hosts)) for i, (key, hosts) in enumerate(found.items()))


def _alike(device: Device, host: Host) -> tuple[object, ...]:
    terms = (device.preemptions_per_hour, device.price_per_hour)
    return (device.site, device.kind.name, device.speed, device.memory_bytes, terms, host.link.bytes_per_s, host.link.latency_s)


def slots_of(classes: Iterable[DeviceClass], size: int) -> list[Slot]:
    """Slots of `size` devices. Small ones stay inside a host; larger ones take whole hosts of one class, one after another."""
    slots: list[Slot] = []
    for each in classes:
        whole: list[str] = []
        for names in each.hosts:
            if size <= len(names):
                slots.extend(Slot(each.number, names[i : i + size]) for i in range(0, len(names) - size + 1, size))
            elif size % len(names) == 0:
                whole.extend(names)
                if len(whole) == size:
                    slots.append(Slot(each.number, tuple(whole)))
                    whole = []
    return slots
