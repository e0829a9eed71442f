"""Arrangements: devices that are alike form classes and slots, and each strategy says which slots serve which stage. Pure functions.

The planner places thousands of devices by placing a few classes.

Sites are joined into `columns`: each column of sites holds the whole row of stages, so only gradients pass between columns and only
activations inside one. Inside a column, slots line up site after site (along the widest links) and the line is cut into stages:
`chained` keeps kinds apart (a stage has one kind where it can), `mixed` spreads every kind over all stages.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from atoll.cluster import Cluster, Device, Host
from atoll.cluster.cluster import wan_index

__all__ = ["DeviceClass", "Slot", "arrange", "device_classes", "site_columns", "slots_of"]


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


def site_columns(cluster: Cluster, sites: Sequence[str]) -> list[list[list[str]]]:
    """Ways to join sites into columns, from one column of all to each site on its own: the closest sites join first."""
    links = wan_index(cluster)
    columns = [[site] for site in sites]
    ways = [[list(column) for column in columns]]
    while len(columns) > 1:
        pairs = [(i, j) for i in range(len(columns)) for j in range(len(columns)) if i != j]
        # a column is a line of sites: what matters is the link that joins the end of one to the start of the other
        i, j = max(pairs, key=lambda p: (links[columns[p[0]][-1], columns[p[1]][0]].bytes_per_s, -len(columns[p[0]]) - len(columns[p[1]])))
        joined = columns[i] + columns[j]
        columns = [column for k, column in enumerate(columns) if k not in (i, j)] + [joined]
        ways.append([list(column) for column in columns])
    return ways


def arrange(
    slots: Sequence[Slot],
    classes: Sequence[DeviceClass],
    columns: Sequence[Sequence[str]],
    stages: int,
    speed: Callable[[int], float],
    mixed: bool,
    reverse: bool = False,
) -> list[list[Slot]] | None:
    """Slots of every stage, or None where some stage would have none. `speed` is of one slot of a class, in any unit.

    `reverse` turns the line round, so that the devices with most memory, rather than the fewest, come first.
    """
    result: list[list[Slot]] = [[] for _ in range(stages)]
    for column in columns:
        inside = [slot for site in column for slot in slots if classes[slot.kind].device.site == site]
        if not inside:
            continue
        if len(inside) < stages:
            return None  # this column cannot hold the row of stages; another way of joining sites can
        line = _by_memory(inside, classes, column, reverse)
        parts = _spread(line, stages) if mixed else _cut_line(line, stages, speed)
        for stage, part in zip(result, parts, strict=True):
            stage.extend(part)
    return result if all(result) else None


def _by_memory(slots: Sequence[Slot], classes: Sequence[DeviceClass], column: Sequence[str], reverse: bool) -> list[Slot]:
    """Site by site along the column; inside a site the kinds with most memory first, since early stages hold most activations."""
    place = {site: i for i, site in enumerate(column)}
    sign = 1 if reverse else -1

    def key(slot: Slot) -> tuple[float, float, int]:
        device = classes[slot.kind].device
        return (place[device.site], sign * device.memory_bytes, slot.kind)

    return sorted(slots, key=key)


def _spread(line: Sequence[Slot], stages: int) -> list[list[Slot]]:
    """Every kind over all stages, in turn; the slots that remain of a kind go where the fewest are."""
    parts: list[list[Slot]] = [[] for _ in range(stages)]
    kinds: dict[int, list[Slot]] = {}
    for slot in line:
        kinds.setdefault(slot.kind, []).append(slot)
    for members in kinds.values():
        each, rest = divmod(len(members), stages)
        fewest = set(sorted(range(stages), key=lambda s: len(parts[s]))[:rest])
        taken = 0
        for s in range(stages):
            size = each + (s in fewest)
            parts[s].extend(members[taken : taken + size])
            taken += size
    return parts


def _cut_line(line: Sequence[Slot], stages: int, speed: Callable[[int], float]) -> list[list[Slot]]:
    """Consecutive slots for each stage: every kind gets a number of stages in proportion to its speed, its slots evenly divided.

    Kinds too slow for a stage of their own join their neighbour.
    """
    runs: list[list[Slot]] = []
    for slot in line:
        if runs and runs[-1][-1].kind == slot.kind:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    runs = _merged(runs, stages, speed)
    weights = [sum(speed(slot.kind) for slot in run) for run in runs]
    numbers = _apportion(stages, weights, [len(run) for run in runs])
    parts: list[list[Slot]] = []
    for run, number in zip(runs, numbers, strict=True):
        parts.extend(run[len(run) * i // number : len(run) * (i + 1) // number] for i in range(number))
    return parts


def _merged(runs: list[list[Slot]], stages: int, speed: Callable[[int], float]) -> list[list[Slot]]:
    """Joins the slowest run to its slower neighbour until there are no more runs than stages."""
    runs = list(runs)
    while len(runs) > stages:
        weights = [sum(speed(slot.kind) for slot in run) for run in runs]
        i = min(range(len(runs)), key=weights.__getitem__)
        neighbours = [k for k in (i - 1, i + 1) if 0 <= k < len(runs)]
        j = min(neighbours, key=weights.__getitem__)
        a, b = sorted((i, j))
        runs[a : b + 1] = [runs[a] + runs[b]]
    return runs


def _apportion(stages: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Stages of each run: at least one, at most one a slot, in proportion to weight."""
    numbers = [1] * len(weights)
    for _ in range(stages - len(weights)):
        open_runs = [i for i in range(len(weights)) if numbers[i] < most[i]]
        if not open_runs:
            break
        numbers[max(open_runs, key=lambda i: weights[i] / numbers[i])] += 1
    return numbers
