"""One replica of a stage: how long a micro-batch takes it, by what the time goes to."""

from typing import NamedTuple

from atoll.cluster import Device
from atoll.cost.amounts import tensor_fraction
from atoll.cost.communication import Span, all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from atoll.cost.compute import Compute
from atoll.cost.groups import slowest_span
from atoll.cost.setting import Setting
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


class _Slowest(NamedTuple):
    """The device of a replica that the others wait for."""

    forward: float
    backward: float
    recompute: float
    update: float
    samples: float  # of a micro-batch, in its lane


class _Layout(NamedTuple):
    """What a replica's time depends on besides its stage and share: its devices and the links of its collectives, without names."""

    devices: tuple[tuple[str, float], ...]  # kind and speed
    lane: Span | None  # of the lane whose all-reduce takes longest; None where a lane is one device
    lanes: Span | None  # of the position whose exchange between lanes takes longest; None where there is one lane


class ReplicaPrices:
    """Times of any replica; what was computed once is remembered, and replicas of one layout are priced once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._compute = Compute(setting.graph, setting.calibration, setting.optimizer.update_bytes)
        self._known: dict[tuple[object, ...], ReplicaSeconds] = {}
        self._layout_of: dict[tuple[object, ...], int | None] = {}  # None: it depends on the stage's other replicas
        self._numbers: dict[_Layout, int] = {}
        self._layouts: list[_Layout] = []  # by number

    def seconds(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        """One micro-batch of `micro_samples` (over all lanes) through a replica."""
        layout = self._number_of_layout(stage, replica)
        lanes = replica.samples if len(replica.samples) > 1 else ()
        shape = (stage.start, stage.stop, stage.tensor, stage.sharded, stage.expert, stage.recompute)
        key = (shape, layout, lanes, replica.tensor_shares, micro_samples)
        found = self._known.get(key)
        if found is None:
            slowest = self._slowest(stage, replica, micro_samples)
            found = self._known[key] = self._with_collectives(stage, replica, slowest, self._layouts[layout])
        return found

    def _number_of_layout(self, stage: Stage, replica: Replica) -> int:
        """Replicas with the same number differ in names alone."""
        key: tuple[object, ...] = (stage.tensor, replica.devices)
        found = self._layout_of.get(key, -1)
        if found is None:  # lanes that leave their host share its interface with the lanes of the other replicas
            key = (stage.tensor, replica.devices, stage.devices)
            found = self._layout_of.get(key, -1)
        if found is None or found < 0:
            layout = self._layout(stage, replica)
            found = self._layout_of[key] = self._numbers.setdefault(layout, len(self._layouts))
            if found == len(self._layouts):
                self._layouts.append(layout)
            if layout.lane and layout.lane.site.members * layout.lane.wan.members > 1:
                self._layout_of[stage.tensor, replica.devices] = None
                self._layout_of[stage.tensor, replica.devices, stage.devices] = found
        return found

    def _layout(self, stage: Stage, replica: Replica) -> _Layout:
        setting, tensor = self._setting, stage.tensor
        devices = [setting.devices[name] for name in replica.devices]
        own = [devices[i : i + tensor] for i in range(0, len(devices), tensor)]
        others: list[list[Device]] = []
        if any(device.host != lane[0].host for lane in own for device in lane):
            names = [name for other in stage.replicas if other is not replica for name in other.devices]
            others = [[setting.devices[name] for name in names[i : i + tensor]] for i in range(0, len(names), tensor)]
        across = [devices[position::tensor] for position in range(tensor)]
        return _Layout(
            tuple((device.kind.name, device.speed) for device in devices),
            _nameless(slowest_span(setting.cluster, own, setting.calibration, others)) if tensor > 1 else None,
            _nameless(slowest_span(setting.cluster, across, setting.calibration)) if len(own) > 1 else None,
        )

    def _slowest(self, stage: Stage, replica: Replica, micro_samples: float) -> _Slowest:
        a, b, again = stage.start, stage.stop, self._setting.recomputed_stop(stage)
        expert_lanes = stage.lanes if stage.expert else 1
        total = replica.total_samples or 1
        slowest = _Slowest(0.0, 0.0, 0.0, 0.0, 0.0)
        seen = set()
        for index, name in enumerate(replica.devices):
            lane, position = divmod(index, stage.tensor)
            device = self._setting.devices[name]
            samples = micro_samples * replica.samples[lane] / total
            fraction = tensor_fraction(replica, stage.tensor, position)
            kind = (device.kind.name, device.speed, samples, fraction)
            if kind in seen:
                continue
            seen.add(kind)
            table = self._compute.table(device, samples, fraction, stage.tensor, expert_lanes)
            forward, backward = table.forward[b] - table.forward[a], table.backward[b] - table.backward[a]
            if forward + backward >= slowest.forward + slowest.backward:
                recompute = table.forward[again] - table.forward[a]
                slowest = _Slowest(forward, backward, recompute, table.update[b] - table.update[a], samples)
        return slowest

    def _with_collectives(self, stage: Stage, replica: Replica, slowest: _Slowest, layout: _Layout) -> ReplicaSeconds:
        forward, backward, recompute, update, samples = slowest
        tensor = self._tensor(stage, replica, layout.lane, samples, stage.stop)
        tensor_again = self._tensor(stage, replica, layout.lane, samples, self._setting.recomputed_stop(stage))
        expert = self._expert(stage, layout.lanes, samples)
        expert_again = expert if stage.recompute else 0.0
        gather = self._gather(stage, layout.lanes)
        forth = forward + tensor + expert
        back = backward + tensor + expert + recompute + tensor_again + expert_again
        # gathers (and in backward the reduce-scatter) run beside the compute of the layer before: only what exceeds it is waited for
        forth_gather, back_gather = max(0.0, gather - forth), max(0.0, 2 * gather - back)
        return ReplicaSeconds(
            forward=forth + forth_gather,
            backward=back + back_gather,
            compute=forward + backward,
            recompute=recompute,
            tensor=2 * tensor + tensor_again,
            expert=2 * expert + expert_again,
            shard=forth_gather + back_gather,
            update=update / stage.lanes if stage.sharded else update,
        )

    def _tensor(self, stage: Stage, replica: Replica, lane: Span | None, samples: float, stop: int) -> float:
        """All-reduces of activations along a lane, in the forward of the stage's layers up to `stop`."""
        amounts = self._setting.amounts
        reductions = amounts.tensor_reductions[stop] - amounts.tensor_reductions[stage.start]
        if lane is None or not reductions or self._compute.measured_split(self._setting.devices[replica.devices[0]], stage.tensor):
            return 0.0
        nbytes = (amounts.tensor_bytes[stop] - amounts.tensor_bytes[stage.start]) * samples
        return reductions * all_reduce_seconds(lane, nbytes / reductions, self._setting.calibration, {}, self._setting.element_bytes)

    def _expert(self, stage: Stage, lanes: Span | None, samples: float) -> float:
        """Exchanges of tokens between lanes, in forward: to the experts and back."""
        amounts = self._setting.amounts
        layers = amounts.expert_layers[stage.stop] - amounts.expert_layers[stage.start]
        if not stage.expert or lanes is None or not layers:
            return 0.0
        nbytes = (amounts.expert_bytes[stage.stop] - amounts.expert_bytes[stage.start]) * samples / stage.tensor
        return 2 * layers * all_to_all_seconds(lanes, nbytes / layers, self._setting.calibration)

    def _gather(self, stage: Stage, lanes: Span | None) -> float:
        """One gather of the parameters that lanes shard."""
        if not stage.sharded or lanes is None:
            return 0.0
        nbytes = self._setting.most_held(stage).dense * self._setting.element_bytes
        return all_gather_seconds(lanes, nbytes, self._setting.calibration)


def _nameless(span: Span) -> Span:
    return span._replace(wan_links=(), host_name="", site_names=())
