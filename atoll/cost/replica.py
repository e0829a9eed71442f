"""One replica of a stage: how long a micro-batch takes it, by what the time goes to."""

from collections.abc import Sequence
from typing import NamedTuple

from atoll.cluster import Device
from atoll.cost.communication import Span, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, distinct_groups, slowest_of
from atoll.cost.compute import ComputeTimes, StageTable
from atoll.cost.context import DevicePlace, PricingContext, tensor_fraction
from atoll.plan import Replica, Stage

__all__ = ["ReplicaPrices", "ReplicaSeconds"]


class ReplicaSeconds(NamedTuple):
    """One micro-batch through one replica of a stage, by what the time goes to."""

    forward: float  # everything below that belongs to forward
    backward: float
    compute: float  # forward and backward arithmetic and memory traffic
    recompute: float
    tensor: float
    expert: float
    shard: float
    update: float  # once a step

    def scaled(self, factor: float) -> "ReplicaSeconds":
        """Longer by a factor, the update excepted."""
        return ReplicaSeconds(*(seconds * factor for seconds in self))._replace(update=self.update)


class _Layout(NamedTuple):
    """What a replica's time depends on besides its stage and share: its devices and the links of its collectives, without names."""

    devices: tuple[tuple[str, float], ...]  # kind and speed
    lane: Span | None  # of the lane whose all-reduce takes longest; None where a lane is one device
    lanes: Span | None  # of the position whose exchange between lanes takes longest; None where there is one lane


_Division = tuple[int, tuple[int, ...], tuple[int, ...], float]  # layout, samples of unequal lanes, tensor shares, samples of a micro-batch


class ReplicaPrices:
    """Times of any replica; what was computed once is remembered, and replicas of one layout are priced once."""

    def __init__(self, setting: PricingContext) -> None:
        self._setting = setting
        self._compute = ComputeTimes(setting.graph, setting.calibration, setting.optimizer.update_bytes)
        self._known: dict[tuple[object, ...], ReplicaSeconds] = {}
        self._tables: dict[tuple[_Division, int, tuple[int, ...]], list[tuple[StageTable, float]]] = {}
        self._places: dict[DevicePlace, list[int]] = {}
        self._layout_of: dict[tuple[object, ...], int | None] = {}  # None: it depends on the stage's other replicas
        self._numbers: dict[_Layout, int] = {}
        self._layouts: list[_Layout] = []  # by number

    def seconds(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        """One micro-batch of `micro_samples` (over all lanes) through a replica."""
        layout = self._number_of_layout(self._setting.place(stage), replica.devices)
        return self._price(stage, replica, (layout, _unequal_lanes(replica), replica.tensor_shares, micro_samples))

    def stage(self, stage: Stage, place: DevicePlace, micro_samples: Sequence[float]) -> list[ReplicaSeconds]:
        """One micro-batch of so many samples through each replica of a stage."""
        layouts = self._places.get(place)
        if layouts is None:
            layouts = self._places[place] = [self._number_of_layout(place, group) for group in place.groups]
        row = []
        known: dict[_Division, ReplicaSeconds] = {}
        for layout, replica, samples in zip(layouts, stage.replicas, micro_samples, strict=True):
            division = (layout, _unequal_lanes(replica), replica.tensor_shares, samples)
            found = known.get(division)
            if found is None:
                found = known[division] = self._price(stage, replica, division)
            row.append(found)
        return row

    def _price(self, stage: Stage, replica: Replica, division: _Division) -> ReplicaSeconds:
        key = (stage.start, stage.stop, stage.sharded, stage.expert, stage.recompute, stage.split, division)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._with_collectives(stage, replica, division)
        return found

    def _number_of_layout(self, place: DevicePlace, devices: tuple[str, ...]) -> int:
        """Replicas with the same number differ in names alone."""
        key: tuple[object, ...] = (place.tensor, devices)
        found = self._layout_of.get(key, -1)
        if found is None:  # lanes that leave their host share its interface with the lanes of the other replicas
            key = (place, devices)
            found = self._layout_of.get(key, -1)
        if found is None or found < 0:
            layout = self._layout(place, devices)
            found = self._layout_of[key] = self._numbers.setdefault(layout, len(self._layouts))
            if found == len(self._layouts):
                self._layouts.append(layout)
            if layout.lane and layout.lane.site.members * layout.lane.wan.members > 1:
                self._layout_of[place.tensor, devices] = None
                self._layout_of[place, devices] = found
        return found

    def _layout(self, place: DevicePlace, names: tuple[str, ...]) -> _Layout:
        setting, tensor = self._setting, place.tensor
        devices = [setting.devices[name] for name in names]
        own = [devices[i : i + tensor] for i in range(0, len(devices), tensor)]
        others: list[list[Device]] = []
        if any(device.host != lane[0].host for lane in own for device in lane):
            beside = [name for group in place.groups if group != names for name in group]
            others = [[setting.devices[name] for name in beside[i : i + tensor]] for i in range(0, len(beside), tensor)]
        across = [devices[position::tensor] for position in range(tensor)]
        kinds = tuple((device.kind.name, device.speed) for device in devices)
        return _Layout(kinds, self._slowest(own, others) if tensor > 1 else None, self._slowest(across) if len(own) > 1 else None)

    def _slowest(self, groups: list[list[Device]], others: Sequence[list[Device]] = ()) -> Span:
        """Of the groups, when all of them and `others` communicate at once; without names."""
        found = distinct_groups(self._setting.cluster, groups, self._setting.calibration, others)
        return slowest_of(found, self._setting.calibration)._replace(wan_links=(), site_names=())

    def _tables_of(self, stage: Stage, replica: Replica, division: _Division) -> list[tuple[StageTable, float]]:
        """Times of the layers on each different device of a replica, and its samples of a micro-batch."""
        expert_lanes = stage.lanes if stage.expert else 1
        key = (division, expert_lanes, stage.split)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = []
            total, seen = replica.total_samples or 1, set()
            for index, name in enumerate(replica.devices):
                lane, position = divmod(index, stage.tensor)
                device = self._setting.devices[name]
                samples = division[-1] * replica.samples[lane] / total
                fraction = tensor_fraction(replica, stage.tensor, position)
                kind = (device.kind.name, device.speed, samples, fraction)
                if kind not in seen:
                    seen.add(kind)
                    if stage.split:
                        table = self._compute.table_with_split(device, samples, division[-1], stage.split, stage.lanes, expert_lanes)
                    else:
                        table = self._compute.table(device, samples, fraction, stage.tensor, expert_lanes)
                    found.append((table, samples))
        return found

    def _with_collectives(self, stage: Stage, replica: Replica, division: _Division) -> ReplicaSeconds:
        start, stop, again = stage.start, stage.stop, self._setting.recomputed_stop(stage)
        forward = backward = recompute = update = divided = samples = 0.0
        for (forth, back, updates), own_samples in self._tables_of(stage, replica, division):  # all wait for the slowest device
            if forth[stop] - forth[start] + back[stop] - back[start] >= forward + backward:
                forward, backward, recompute = forth[stop] - forth[start], back[stop] - back[start], forth[again] - forth[start]
                update, samples = updates[stop] - updates[start], own_samples
                divided = sum([updates[number + 1] - updates[number] for number in stage.split])
        layout = self._layouts[division[0]]
        tensor = self._tensor(stage, replica, layout.lane, samples, stop)
        tensor_again = self._tensor(stage, replica, layout.lane, samples, again)
        if stage.split:
            tensor += self._split(stage, layout.lanes, division[-1], stop)
            tensor_again += self._split(stage, layout.lanes, division[-1], again)
        expert = self._expert(stage, layout.lanes, samples)
        expert_again = expert if stage.recompute else 0.0
        gather, back_gather, scatter = self._gathers(stage, replica, layout.lanes)
        forth_seconds = forward + tensor + expert
        tensor_back = tensor * self._tensor_backward(stage)
        back_seconds = backward + tensor_back + expert + recompute + tensor_again + expert_again
        is_cpu = self._setting.devices[replica.devices[0]].kind.cpu
        gathers = (gather, back_gather, scatter)
        forth_gather, back_gather = self._exposed_gathers(stage, gathers, forth_seconds, back_seconds, is_cpu)
        return ReplicaSeconds(
            forward=forth_seconds + forth_gather,
            backward=back_seconds + back_gather,
            compute=forward + backward,
            recompute=recompute,
            tensor=tensor + tensor_back + tensor_again,
            expert=2 * expert + expert_again,
            shard=forth_gather + back_gather,
            update=divided + (update - divided) / stage.lanes if stage.sharded else update,
        )

    def _tensor(self, stage: Stage, replica: Replica, lane: Span | None, samples: float, stop: int) -> float:
        """All-reduces of activations along a lane, in the forward of the stage's layers up to `stop`."""
        if lane is None:
            return 0.0
        amounts = self._setting.amounts
        reductions = amounts.tensor_reductions[stop] - amounts.tensor_reductions[stage.start]
        if not reductions or self._compute.measured_split(self._setting.devices[replica.devices[0]], stage.tensor):
            return 0.0
        nbytes = (amounts.tensor_bytes[stop] - amounts.tensor_bytes[stage.start]) * samples
        return reductions * all_reduce_seconds(lane, nbytes / reductions, self._setting.calibration)

    def _tensor_backward(self, stage: Stage) -> float:
        """What backward exchanges of activations' gradients, as a multiple of what forward exchanges of activations."""
        amounts = self._setting.amounts
        forth = amounts.tensor_bytes[stage.stop] - amounts.tensor_bytes[stage.start]
        return (amounts.tensor_back_bytes[stage.stop] - amounts.tensor_back_bytes[stage.start]) / forth if forth else 1.0

    def _split(self, stage: Stage, lanes: Span | None, together: float, stop: int) -> float:
        """Exchanges between lanes for the layers they divide, in forward up to `stop`: samples are gathered before, results return after.

        Both together are as much as an all-reduce of the samples of all lanes.
        """
        if lanes is None:
            return 0.0
        seconds = 0.0
        for layer in (self._setting.graph.layers[number] for number in stage.split if number < stop):
            if layer.tensor_reductions:
                nbytes = layer.tensor_bytes * together / layer.tensor_reductions
                seconds += layer.tensor_reductions * all_reduce_seconds(lanes, nbytes, self._setting.calibration)
        return seconds

    def _expert(self, stage: Stage, lanes: Span | None, samples: float) -> float:
        """Exchanges of tokens between lanes, in forward: to the experts and back."""
        amounts = self._setting.amounts
        layers = amounts.expert_layers[stage.stop] - amounts.expert_layers[stage.start]
        if not stage.expert or lanes is None or not layers:
            return 0.0
        nbytes = (amounts.expert_bytes[stage.stop] - amounts.expert_bytes[stage.start]) * samples / stage.tensor
        return 2 * layers * all_to_all_seconds(lanes, nbytes / layers, self._setting.calibration)

    def _exposed_gathers(
        self, stage: Stage, gathers: tuple[float, float, float], forth: float, back: float, is_cpu: bool
    ) -> tuple[float, float]:
        """What is waited for of the gathers in forward, and of the gathers and scattered sums in backward.

        They run beside the compute of other layers, as synchronisation does: the first layer's gather and the last one's scatter cannot.
        A processor moves the bytes itself: nothing is hidden there. Packing and unpacking takes turns with the layers everywhere.
        """
        gather, again, scatter = gathers
        if not gather:
            return 0.0, 0.0
        packing = self._setting.calibration.shard_seconds(is_cpu=is_cpu) * (stage.stop - stage.start)
        overlap = 0.0 if is_cpu else self._setting.calibration.sync_overlap
        layers = stage.stop - stage.start if overlap else 1
        exposed = max(gather / layers, gather - overlap * forth), max(scatter / layers, again + scatter - overlap * back)
        return exposed[0] + packing, exposed[1] + 2 * packing

    def _gathers(self, stage: Stage, replica: Replica, lanes: Span | None) -> tuple[float, float, float]:
        """A gather for a forward and one for a backward of the parameters that lanes shard, where a device holds most of them, and the
        scattered sum of the trained ones' gradients."""
        if not stage.sharded or lanes is None:
            return 0.0, 0.0, 0.0
        shares = replica.tensor_shares
        position = shares.index(max(shares)) if shares else 0
        held, calibration = self._setting.held(stage, replica, position), self._setting.calibration
        nbytes = held.dense * self._setting.element_bytes + held.frozen
        gather = all_gather_seconds(lanes, nbytes, calibration)
        again = all_gather_seconds(lanes, nbytes - held.resting, calibration) if held.resting else gather
        return gather, again, all_gather_seconds(lanes, held.dense * calibration.gradient_bytes, calibration)


def _unequal_lanes(replica: Replica) -> tuple[int, ...]:
    """The samples of a replica's lanes, where they differ: lanes that divide a micro-batch evenly are alike whatever they take."""
    samples = replica.samples
    return () if len(samples) == 1 or samples.count(samples[0]) == len(samples) else samples
