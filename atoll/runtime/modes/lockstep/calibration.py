"""Calibration: from what a run measured to the constants that make the cost model predict it, and other plans on the same devices.

The cost model keeps its shape; what was measured scales it. A stage's measured time is spread over its layers in proportion to what each
was predicted to take, corrected until the layers of all stages together explain every stage. Links get the rate they were seen at. What a
step took beyond all of that becomes its constant part.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from atoll.cluster import Cluster, Device
from atoll.cost import Calibration, Evaluator
from atoll.cost.calibration import KindFactor, LayerTime
from atoll.cost.compute import ComputeTimes, LayerSeconds
from atoll.cost.context import tensor_fraction
from atoll.graph import Graph, Layer
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.modes.lockstep.measurement import RankMeasured, StageMeasured, measure_links

__all__ = ["calibrate"]

_ROUNDS = 200  # of correction; each costs a few sums
_LEAST_COMPUTE = 0.2  # of what was measured of a stage, whatever its exchanges were predicted to take
_MOST_SIZES = 12
_CORRECTIONS = 5


def calibrate(graph: Graph, cluster: Cluster, plan: Plan, ranks: Sequence[RankMeasured]) -> Calibration:
    """The calibration with which `cost(graph, cluster, plan)` is close to what the ranks measured of this plan."""
    links = measure_links(cluster, plan, ranks)
    base = msgspec.structs.replace(Calibration(), **links.constants())
    times, factors = _LayerTimes(graph, cluster, plan, ranks, base).found()
    steps = max(rank.first_step + rank.steps - 1 for rank in ranks)
    source = f"{plan.graph} on {plan.cluster}, as it ran until step {steps}"
    found = msgspec.structs.replace(base, layer_times=times, kind_factors=factors, source=source)
    return _with_rest(graph, cluster, plan, found, max(rank.step_seconds for rank in ranks))


def _with_rest(graph: Graph, cluster: Cluster, plan: Plan, found: Calibration, measured: float) -> Calibration:
    """What the step took beyond the prediction is its constant part: data, agreeing on loss and norm, the loop's own Python.

    Where parts add up to more than the step took, which medians of each may, layers are taken to be faster by as much.
    """
    predicted = Evaluator(graph, cluster, calibration=found).cost(plan).step_seconds
    for _ in range(_CORRECTIONS):
        if predicted <= measured:
            break
        found = _faster(found, measured / predicted)
        predicted = Evaluator(graph, cluster, calibration=found).cost(plan).step_seconds
    return msgspec.structs.replace(found, step_seconds=max(0.0, measured - predicted))


def _faster(found: Calibration, part: float) -> Calibration:
    """Forward and backward in this part of the time."""
    rows = [
        msgspec.structs.replace(row, forward_seconds=row.forward_seconds * part, backward_seconds=row.backward_seconds * part)
        for row in found.layer_times
    ]
    kinds = [msgspec.structs.replace(kind, forward=kind.forward * part, backward=kind.backward * part) for kind in found.kind_factors]
    return msgspec.structs.replace(found, layer_times=tuple(rows), kind_factors=tuple(kinds))


class _Seen(NamedTuple):
    """What a rank measured of a stage, as a device of full speed would take, and what the model says each layer takes."""

    kind: str
    tensor: int
    forward: float
    backward: float
    layers: Mapping[str, LayerSeconds]  # summed by what tells layers apart
    again: Mapping[str, float]  # forward of those that are recomputed


_Factors = dict[tuple[str, str], float]  # by kind of device and layer: measured over predicted


class _LayerTimes:
    """Rows for `Calibration.layer_times`."""

    def __init__(self, graph: Graph, cluster: Cluster, plan: Plan, ranks: Sequence[RankMeasured], base: Calibration) -> None:
        self.graph, self.cluster, self.plan, self.ranks = graph, cluster, plan, ranks
        self.evaluator = Evaluator(graph, cluster, calibration=base)
        self.compute = ComputeTimes(graph, base, self.evaluator.optimizer.update_bytes)
        self.seen = [self._seen(rank, stage) for rank in ranks for stage in rank.stages if stage.forward_seconds and stage.samples]

    def found(self) -> tuple[tuple[LayerTime, ...], tuple[KindFactor, ...]]:
        """Every layer on every kind of device that ran, at many sizes; and what kinds are to be scaled by elsewhere."""
        forward = _explain([(row.kind, row.forward, {key: one.forward for key, one in row.layers.items()}) for row in self.seen])
        backward = _explain([self._without_recomputation(row, forward) for row in self.seen])
        update = self._update_factors()
        rows = []
        for kind, tensor in sorted({(row.kind, row.tensor) for row in self.seen}):
            device = self._full_speed(kind)
            rest = _average(forward, kind), _average(backward, kind), update.get(kind, 1.0)
            for layer in _distinct(self.graph.layers):
                factors = forward.get((kind, _key(layer)), rest[0]), backward.get((kind, _key(layer)), rest[1]), rest[2]
                rows += [self._row(layer, device, tensor, samples, factors) for samples in self._sizes()]
        kinds = sorted({row.kind for row in self.seen})
        return tuple(rows), tuple(
            _kind_factor(kind, _average(forward, kind), _average(backward, kind), update.get(kind, 1.0)) for kind in kinds
        )

    def _row(self, layer: Layer, device: Device, tensor: int, samples: float, factors: tuple[float, float, float]) -> LayerTime:
        number = self.graph.layers.index(layer)
        seconds = self._layer(device, samples, 1 / tensor, tensor, 1, number)
        return LayerTime(
            layer=_key(layer),
            kind=device.kind.name,
            samples=samples,
            tensor=tensor,
            forward_seconds=seconds.forward * factors[0],
            backward_seconds=seconds.backward * factors[1],
            update_seconds=seconds.update * factors[2],
        )

    def _sizes(self) -> list[float]:
        """The sizes that were measured, and others between 1 and the whole batch."""
        sizes = {float(stage.samples) for rank in self.ranks for stage in rank.stages if stage.samples}
        size = float(self.plan.batch_size)
        while size >= 1 and len(sizes) < _MOST_SIZES:
            sizes.add(size)
            size /= 2
        return sorted(sizes)

    def _seen(self, rank: RankMeasured, measured: StageMeasured) -> _Seen:
        stage = self.plan.stages[measured.stage]
        replica = stage.replicas[measured.replica]
        device = self.evaluator.devices[rank.device]
        part = self._compute_part(stage, replica, measured) * self._own_part(stage, replica, measured) * device.speed
        fraction = tensor_fraction(replica, stage.tensor, measured.tensor)
        lanes = stage.lanes if stage.expert else 1
        full = self._full_speed(device.kind.name)
        layers: dict[str, LayerSeconds] = {}
        again: dict[str, float] = defaultdict(float)
        for number in range(stage.start, stage.stop):
            key = _key(self.graph.layers[number])
            one = self._layer(full, measured.samples, fraction, stage.tensor, lanes, number)
            layers[key] = LayerSeconds(*map(sum, zip(layers.get(key, (0.0, 0.0, 0.0)), one, strict=True)))
            if stage.recompute and number < len(self.graph.layers) - 1:
                again[key] += one.forward
        return _Seen(device.kind.name, stage.tensor, measured.forward_seconds * part, measured.backward_seconds * part, layers, again)

    def _compute_part(self, stage: Stage, replica: Replica, measured: StageMeasured) -> float:
        """The part of forward and backward that is no exchange, by what exchanges should take; rows of split tensors contain theirs."""
        whole = sum(replica.samples) / max(1, replica.samples[measured.lane]) * measured.samples
        price = self.evaluator.replica_seconds(stage, replica, whole)
        exchanged = price.expert + price.shard + (price.tensor if stage.split else 0.0)
        return max(_LEAST_COMPUTE, 1 - exchanged / (measured.forward_seconds + measured.backward_seconds))

    def _own_part(self, stage: Stage, replica: Replica, measured: StageMeasured) -> float:
        """What a device works of a pass in which the devices of its replica wait for each other: less than 1 beside a slower one."""
        if not (stage.sharded or stage.expert or stage.split or stage.tensor > 1):
            return 1.0
        seconds = []
        for index, name in enumerate(replica.devices):
            lane, position = divmod(index, stage.tensor)
            samples = measured.samples * replica.samples[lane] / max(1, replica.samples[measured.lane])
            table = self.compute.table(
                self.evaluator.devices[name], samples, tensor_fraction(replica, stage.tensor, position), stage.tensor
            )
            seconds.append(sum(column[stage.stop] - column[stage.start] for column in (table.forward, table.backward)))
        return seconds[measured.lane * stage.tensor + measured.tensor] / max(seconds)

    def _layer(self, device: Device, samples: float, fraction: float, tensor: int, lanes: int, number: int) -> LayerSeconds:
        table = self.compute.table(device, samples, fraction, tensor, lanes)
        return LayerSeconds(*(column[number + 1] - column[number] for column in table))

    def _full_speed(self, kind: str) -> Device:
        device = next(device for device in self.cluster.devices if device.kind.name == kind)
        return msgspec.structs.replace(device, speed=1.0)

    @staticmethod
    def _without_recomputation(row: _Seen, forward: _Factors) -> tuple[str, float, dict[str, float]]:
        again = sum(seconds * forward[row.kind, key] for key, seconds in row.again.items())
        return row.kind, max(row.backward - again, _LEAST_COMPUTE * row.backward), {key: one.backward for key, one in row.layers.items()}

    def _update_factors(self) -> dict[str, float]:
        """By kind of device: what the optimizer took over what it was predicted to take."""
        measured: dict[str, float] = defaultdict(float)
        predicted: dict[str, float] = defaultdict(float)
        for rank in self.ranks:
            device = self.evaluator.devices[rank.device]
            measured[device.kind.name] += rank.seconds.get("optimizer", 0.0)
            for place in rank.stages:
                stage = self.plan.stages[place.stage]
                price = self.evaluator.replica_seconds(stage, stage.replicas[place.replica], float(self.plan.micro_batch_size))
                predicted[device.kind.name] += price.update
        return {kind: measured[kind] / predicted[kind] for kind in measured if predicted[kind]}


def _kind_factor(kind: str, forward: float, backward: float, update: float) -> KindFactor:
    least = 1e-6  # a stage without a backward, or an optimizer that did nothing, tells nothing
    return KindFactor(
        kind=kind, forward=max(least, forward), backward=backward if backward > least else 1.0, update=update if update > least else 1.0
    )


def _key(layer: Layer) -> str:
    """What tells layers apart: those of one signature cost the same."""
    return layer.signature or layer.name


def _distinct(layers: Iterable[Layer]) -> list[Layer]:
    return list({_key(layer): layer for layer in reversed(list(layers))}.values())[::-1]


def _average(factors: _Factors, kind: str) -> float:
    own = [factor for (name, _), factor in factors.items() if name == kind]
    return sum(own) / len(own) if own else 1.0


def _explain(rows: Sequence[tuple[str, float, Mapping[str, float]]]) -> _Factors:
    """Factors on the predicted seconds of layers with which their sums come closest to what was measured.

    Rows are (kind, measured, predicted by layer). Each layer is corrected by what its stages lack, in proportion to its part in them:
    factors stay positive, begin alike, and differ only where stages do.
    """
    factors: _Factors = {}
    for kind in {kind for kind, _, _ in rows}:
        own = [row for row in rows if row[0] == kind]
        predicted = sum(sum(layers.values()) for _, _, layers in own)
        ratio = sum(measured for _, measured, _ in own) / predicted if predicted else 1.0
        factors.update({(kind, key): ratio for _, _, layers in own for key in layers})
    for _ in range(_ROUNDS):
        lacking: dict[tuple[str, str], float] = defaultdict(float)
        weight: dict[tuple[str, str], float] = defaultdict(float)
        for kind, measured, layers in rows:
            sums = sum(factors[kind, key] * seconds for key, seconds in layers.items())
            for key, seconds in layers.items():
                lacking[kind, key] += seconds * (measured / sums if sums else 1.0)
                weight[kind, key] += seconds
        for name, total in weight.items():
            if total:
                factors[name] *= lacking[name] / total
    return factors
