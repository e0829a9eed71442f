"""One replica of a stage: how long a micro-batch takes it, by what the time goes to."""

from typing import NamedTuple

from atoll.cost.amounts import tensor_fraction
from atoll.cost.communication import Span, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, span_of
from atoll.cost.compute import Compute
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


class _Slowest(NamedTuple):
    """The device of a replica that the others wait for."""

    forward: float
    backward: float
    update: float
    samples: float  # of a micro-batch, in its lane


class ReplicaPrices:
    """Times of any replica; what was computed once is remembered."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._compute = Compute(setting.graph, setting.calibration, setting.optimizer.update_bytes)
        self._known: dict[tuple[object, ...], ReplicaSeconds] = {}
        self._spans: dict[tuple[object, ...], Span] = {}

    def seconds(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        """One micro-batch of `micro_samples` (over all lanes) through a replica."""
        key = (stage.start, stage.stop, stage.tensor, stage.sharded, stage.expert, stage.recompute, replica, micro_samples)
        found = self._known.get(key)
        if found is None:
            slowest = self._slowest(stage, replica, micro_samples)
            found = self._known[key] = self._with_collectives(stage, replica, slowest)
        return found

    def _slowest(self, stage: Stage, replica: Replica, micro_samples: float) -> _Slowest:
        a, b = stage.start, stage.stop
        expert_lanes = stage.lanes if stage.expert else 1
        total = replica.total_samples or 1
        slowest = _Slowest(0.0, 0.0, 0.0, 0.0)
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
                slowest = _Slowest(forward, backward, table.update[b] - table.update[a], samples)
        return slowest

    def _with_collectives(self, stage: Stage, replica: Replica, slowest: _Slowest) -> ReplicaSeconds:
        forward, backward, update, samples = slowest
        tensor = self._tensor(stage, replica, samples)
        expert = self._expert(stage, replica, samples)
        gather = self._gather(stage, replica)
        again = 1.0 if stage.recompute else 0.0
        forth = forward + tensor + expert
        back = backward + forward * again + (tensor + expert) * (1 + again)
        # gathers (and in backward the reduce-scatter) run beside the compute of the layer before: only what exceeds it is waited for
        forth_gather, back_gather = max(0.0, gather - forth), max(0.0, 2 * gather - back)
        return ReplicaSeconds(
            forward=forth + forth_gather,
            backward=back + back_gather,
            compute=forward + backward,
            recompute=forward * again,
            tensor=tensor * (2 + again),
            expert=expert * (2 + again),
            shard=forth_gather + back_gather,
            update=update / stage.lanes if stage.sharded else update,
        )

    def _tensor(self, stage: Stage, replica: Replica, samples: float) -> float:
        """All-reduces of activations along a lane, in forward."""
        amounts = self._setting.amounts
        reductions = amounts.tensor_reductions[stage.stop] - amounts.tensor_reductions[stage.start]
        if stage.tensor == 1 or not reductions:
            return 0.0
        nbytes = (amounts.tensor_bytes[stage.stop] - amounts.tensor_bytes[stage.start]) * samples
        span = self._lane_span(stage, replica)
        return reductions * all_reduce_seconds(span, nbytes / reductions, self._setting.calibration, {}, self._setting.element_bytes)

    def _expert(self, stage: Stage, replica: Replica, samples: float) -> float:
        """Exchanges of tokens between lanes, in forward: to the experts and back."""
        amounts = self._setting.amounts
        layers = amounts.expert_layers[stage.stop] - amounts.expert_layers[stage.start]
        if not stage.expert or stage.lanes == 1 or not layers:
            return 0.0
        nbytes = (amounts.expert_bytes[stage.stop] - amounts.expert_bytes[stage.start]) * samples / stage.tensor
        return 2 * layers * all_to_all_seconds(self._lanes_span(stage, replica), nbytes / layers, self._setting.calibration)

    def _gather(self, stage: Stage, replica: Replica) -> float:
        """One gather of the parameters that lanes shard."""
        if not stage.sharded or stage.lanes == 1:
            return 0.0
        nbytes = self._setting.held(stage, replica, 0).dense * self._setting.element_bytes
        return all_gather_seconds(self._lanes_span(stage, replica), nbytes, self._setting.calibration)

    def _lane_span(self, stage: Stage, replica: Replica) -> Span:
        """Devices of a lane, which all-reduce activations; lanes that leave a host do so all at once."""
        devices = self._setting.devices
        key = ("lane", stage.tensor, replica.devices)
        if key not in self._spans:
            first = [devices[name] for name in replica.devices[: stage.tensor]]
            groups = [first]
            if len({device.host for device in first}) > 1:
                names = stage.devices
                groups = [[devices[n] for n in names[i : i + stage.tensor]] for i in range(0, len(names), stage.tensor)]
            self._spans[key] = span_of(self._setting.cluster, groups, self._setting.calibration)
        return self._spans[key]

    def _lanes_span(self, stage: Stage, replica: Replica) -> Span:
        """The same position of every lane: gathers of shards and exchanges of tokens."""
        key = ("lanes", stage.tensor, replica.devices)
        if key not in self._spans:
            members = [self._setting.devices[name] for name in replica.devices]
            groups = [members[position :: stage.tensor] for position in range(stage.tensor)]
            self._spans[key] = span_of(self._setting.cluster, groups, self._setting.calibration)
        return self._spans[key]
