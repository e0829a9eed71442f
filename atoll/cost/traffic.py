"""Bytes a step puts on every link, by the plan alone."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from atoll.cluster import Device
from atoll.codec import codec_spec
from atoll.cost.communication import Group, collective_bytes, span_of
from atoll.cost.context import DevicePlace, Memo, PricingContext
from atoll.cost.pipeline import Counts
from atoll.cost.synchronisation import ReductionWork, Synchronisation
from atoll.cost.transfer import Transfers
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import pair_counts

__all__ = ["Traffic"]

_PerByte = dict[str, float]  # bytes on each link for one byte of a collective
_Alike = list[tuple[_PerByte, list[tuple[int, int]]]]  # groups that load the same links alike: replica, and lane or position


class Traffic:
    """Bytes on the links of any plan; what repeats is remembered."""

    def __init__(self, setting: PricingContext, synchronisation: Synchronisation, transfers: Transfers) -> None:
        self._setting, self._synchronisation, self._transfers = setting, synchronisation, transfers
        self._alike = Memo(self._per_byte)

    def link_bytes(
        self,
        plan: Plan,
        places: Sequence[DevicePlace],
        counts: Counts,
        works: Sequence[Sequence[ReductionWork]],
        tied_volumes: Sequence[tuple[list[int], float]],
    ) -> dict[str, float]:
        """By link name: `"oslo–rome"` between sites, a site's name for its network, `"inside hosts"` for the rest.

        `counts` are the micro-batches of each replica, `works` what each stage synchronises, `tied_volumes` what several do together.
        """
        carried: dict[str, float] = {}
        for stage, place, row in zip(plan.stages, places, works, strict=True):
            for work in row:
                _add_groups(carried, work.groups, work.nbytes)
            self._add_inside(plan, stage, place, carried)
        for homes, nbytes in tied_volumes:
            _add_groups(carried, self._synchronisation.tied_groups([places[s] for s in homes]), nbytes)
        if len(places) > 1:
            self._add_boundaries(plan, places, counts, carried)
        return {name: nbytes for name, nbytes in carried.items() if nbytes}

    def activation_links(self, places: Sequence[DevicePlace], counts: Counts) -> set[str]:
        """The links between sites that micro-batches cross on their routes."""
        boundaries = zip(pairwise(places), pairwise(counts), strict=True)
        ways = [self._times_by_link(*both, *rows) for both, rows in boundaries]
        return {link for times in ways for (link, between_sites), count in times.items() if between_sites and count}

    def _add_boundaries(self, plan: Plan, places: Sequence[DevicePlace], counts: Counts, carried: dict[str, float]) -> None:
        """Activations forth and gradients back, along the routes of the micro-batches."""
        for s, (before, after) in enumerate(pairwise(counts)):
            times = self._times_by_link(places[s], places[s + 1], before, after)
            both = sum(self._transfers.boundary_bytes(plan, plan.stages[s]))
            for (link, between_sites), count in times.items():
                codec = plan.codecs.get(link) if between_sites and plan.codecs else None
                ratio = codec_spec(codec).ratio(self._setting.element_bytes) if codec else 1.0
                carried[link] = carried.get(link, 0.0) + both * ratio * count

    def _times_by_link(self, here: DevicePlace, there: DevicePlace, before: list[int], after: list[int]) -> dict[tuple[str, bool], int]:
        """How many micro-batches cross a boundary over each link, one way; True for a link between sites."""
        times: dict[tuple[str, bool], int] = {}
        if before == after:
            for link, columns in self._transfers.boundary(here, there).links:
                times[link] = sum([before[column] for column in columns])
            return times
        for (i, j), count in pair_counts(tuple(before), tuple(after)).items():
            path = self._transfers.both_ways(here, there, i, j)[0]
            if path.link:
                link = (path.link, path.between_sites)
                times[link] = times.get(link, 0) + count
        return times

    def _add_inside(self, plan: Plan, stage: Stage, place: DevicePlace, carried: dict[str, float]) -> None:
        """What the replicas of a stage that lives at `place` exchange inside themselves."""
        if stage.tensor > 1:
            self._add_tensor(stage, place, carried)
        if len(place.groups[0]) > stage.tensor:
            if stage.sharded:
                self._add_gathers(plan, stage, place, carried)
            if stage.expert:
                self._add_exchanges(stage, carried)
            if stage.split:
                self._add_split(stage, place, carried)

    def _add_tensor(self, stage: Stage, place: DevicePlace, carried: dict[str, float]) -> None:
        """All-reduces forward and backward, and again where forward is recomputed."""
        alike = self._alike[place, True, 2.0]
        amounts, back = self._setting.amounts.tensor_bytes, self._setting.amounts.tensor_back_bytes
        again = self._setting.recomputed_stop(stage)
        nbytes = amounts[stage.stop] - amounts[stage.start] + back[stage.stop] - back[stage.start] + amounts[again] - amounts[stage.start]
        for per_byte, lanes_alike in alike:
            shares = [replica.samples for replica in stage.replicas]
            samples = sum(map(sum, shares)) if len(alike) == 1 else sum([shares[i][lane] for i, lane in lanes_alike])
            _add(carried, per_byte, nbytes * samples)

    def _add_gathers(self, plan: Plan, stage: Stage, place: DevicePlace, carried: dict[str, float]) -> None:
        """Parameters in forward and in backward, and the trained ones' gradients scattered, for every micro-batch."""
        held = self._setting.held_with(stage, 1 / stage.tensor, stage.lanes)
        nbytes = held.dense * (2 * self._setting.element_bytes + self._setting.calibration.gradient_bytes) + 2 * held.frozen - held.resting
        rounds = [-(-replica.total_samples // plan.micro_batch_size) for replica in stage.replicas]
        for per_byte, groups_alike in self._alike[place, False, 1.0]:
            _add(carried, per_byte, nbytes * sum([rounds[i] for i, _ in groups_alike]))

    def _add_split(self, stage: Stage, place: DevicePlace, carried: dict[str, float]) -> None:
        """What lanes exchange for the layers they divide: in each pass (and again where forward is recomputed) as much as an all-reduce."""
        again = self._setting.recomputed_stop(stage)
        layers = [(self._setting.graph.layers[number], number) for number in stage.split]
        nbytes = sum(layer.tensor_bytes * (1 + layer.tensor_backward + (number < again)) for layer, number in layers)
        for per_byte, groups_alike in self._alike[place, False, 2.0]:
            _add(carried, per_byte, nbytes * sum(stage.replicas[i].total_samples for i, _ in groups_alike))

    def _per_byte(self, key: tuple[DevicePlace, bool, float]) -> _Alike:
        """The groups along the lanes of a place, or across them, for a collective of so many passes."""
        place, along, passes = key
        setting, tensor = self._setting, place.tensor
        alike: dict[tuple[tuple[str, float], ...], list[tuple[int, int]]] = {}
        for i, names in enumerate(place.groups):
            devices = [setting.devices[name] for name in names]
            lanes = [devices[first : first + tensor] for first in range(0, len(devices), tensor)]
            for number, group in enumerate(lanes if along else zip(*lanes, strict=True)):
                span = span_of(setting.cluster, [group], setting.calibration)
                alike.setdefault(tuple(collective_bytes(span, 1.0, passes).items()), []).append((i, number))
        return [(dict(per_byte), who) for per_byte, who in alike.items()]

    def _add_exchanges(self, stage: Stage, carried: dict[str, float]) -> None:
        for replica in stage.replicas:
            devices = [self._setting.devices[name] for name in replica.devices]
            for position in range(stage.tensor):
                _add_exchange(self._setting, stage, replica, devices[position :: stage.tensor], carried)


def _add_groups(carried: dict[str, float], groups: Sequence[Group], nbytes: float) -> None:
    """What groups that agree on gradients of so many bytes put on links."""
    for group in groups:
        for name, amount in collective_bytes(group.span, nbytes, 2.0).items():
            carried[name] = carried.get(name, 0.0) + amount * group.times


def _add(carried: dict[str, float], per_byte: _PerByte, nbytes: float) -> None:
    for name, amount in per_byte.items():
        carried[name] = carried.get(name, 0.0) + amount * nbytes


def _add_exchange(setting: PricingContext, stage: Stage, replica: Replica, group: list[Device], carried: dict[str, float]) -> None:
    """Tokens to the experts and back, forward and backward (and again where forward is recomputed), by where the experts live."""
    amounts = setting.amounts.expert_bytes
    times = 6 if stage.recompute else 4
    pair = times * (amounts[stage.stop] - amounts[stage.start]) * replica.total_samples / stage.tensor / len(group) ** 2
    in_host = Counter(device.host for device in group)
    sites = Counter(device.site for device in group)
    pairs = {"inside hosts": float(sum(n * (n - 1) for n in in_host.values()))}
    for site, n in sites.items():
        hosts = {device.host for device in group if device.site == site}
        pairs[site] = float(n * n - sum(in_host[host] ** 2 for host in hosts))
    for link in setting.cluster.links:
        a, b = link.between
        if sites[a] and sites[b]:
            pairs[link.name] = 2.0 * sites[a] * sites[b]
    _add(carried, pairs, pair)
