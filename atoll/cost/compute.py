"""How long a layer takes on a device, by a roofline of the work in it.

A kernel takes the longer of its arithmetic and its memory traffic, plus a constant. A matmul is computed in tiles of its output, each
running along the inner dimension: a short inner dimension leaves a tile filling and draining, few outputs leave units of the device
without a tile. Tables of prefix sums over the layers make a stage's time two subtractions.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

from atoll.cluster import Device
from atoll.cost.calibration import Calibration, KindFactor, LayerTime
from atoll.cost.context import lane_part
from atoll.cost.measured import MeasuredTimes
from atoll.graph import Graph, Layer, Work

__all__ = ["ComputeTimes", "LayerSeconds", "StageTable"]


class LayerSeconds(NamedTuple):
    """One micro-batch through one layer on one device."""

    forward: float
    backward: float
    update: float  # the optimizer, once a step, unsharded


class StageTable(NamedTuple):
    """Prefix sums over layers: a stage of layers a…b-1 takes `forward[b] - forward[a]`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]


class ComputeTimes:
    """Times of a graph's layers on any device; what was computed once is remembered."""

    def __init__(self, graph: Graph, calibration: Calibration, update_bytes: float) -> None:
        """`update_bytes` is the optimizer's memory traffic for one parameter."""
        self._graph = graph
        self._update_bytes = update_bytes
        self._calibration = calibration
        self._tables: dict[tuple[str, float, float, float, int, int], StageTable] = {}
        self._split_tables: dict[tuple[object, ...], StageTable] = {}
        self._measured = _index(calibration.layer_times)
        self._factors = {factor.kind: factor for factor in calibration.kind_factors}
        self._probed: dict[str, MeasuredTimes] = {}
        self._measured_splits = {(time.kind, time.tensor) for time in calibration.layer_times}

    def measured_split(self, device: Device, tensor: int) -> bool:
        """Whether layers split `tensor` ways were measured on such a device, so that their times contain the all-reduces."""
        return (device.kind.name, tensor) in self._measured_splits

    def table(self, device: Device, samples: float, fraction: float = 1.0, tensor: int = 1, expert_lanes: int = 1) -> StageTable:
        """Times of all layers for a micro-batch of `samples` where the device holds `fraction` of every split tensor.

        `tensor` is the number of devices the tensors are split over; `expert_lanes` the number that divide the experts.
        """
        key = (device.kind.name, device.speed, samples, fraction if tensor > 1 else 1.0, tensor, expert_lanes)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._build(device, samples, fraction, tensor, expert_lanes)
        return found

    def table_with_split(
        self, device: Device, samples: float, together: float, split: tuple[int, ...], lanes: int, expert_lanes: int = 1
    ) -> StageTable:
        """As `table`, but `lanes` divide the tensors of the layers `split`, each working there on the samples of all lanes, `together`."""
        key = (device.kind.name, device.speed, samples, together, split, lanes, expert_lanes)
        found = self._split_tables.get(key)
        if found is None:
            whole = self.table(device, samples, expert_lanes=expert_lanes)
            steps = zip(*(pairwise(column) for column in whole), strict=True)
            rows = [LayerSeconds(*(after - before for before, after in step)) for step in steps]
            for number in split:
                layer = self._graph.layers[number]
                rows[number] = self._layer(layer, device, samples, lane_part(layer.tensor_units, lanes), lanes, expert_lanes, together)
            found = self._split_tables[key] = _summed(rows)
        return found

    def _build(self, device: Device, samples: float, fraction: float, tensor: int, expert_lanes: int) -> StageTable:
        by_signature: dict[str, LayerSeconds] = {}
        rows = []
        for layer in self._graph.layers:
            seconds = by_signature.get(layer.signature) if layer.signature else None
            if seconds is None:
                seconds = self._layer(layer, device, samples, fraction, tensor, expert_lanes)
                by_signature[layer.signature] = seconds
            rows.append(seconds)
        return _summed(rows)

    def _layer(
        self, layer: Layer, device: Device, samples: float, fraction: float, tensor: int, expert_lanes: int, together: float | None = None
    ) -> LayerSeconds:
        """`together` are the samples of what is divided, where those differ from the samples of the rest."""
        divided = samples if together is None else together
        measured = _look_up(self._measured, layer, device, divided, tensor)
        if measured is not None:
            return measured
        return _scaled(self._predicted_layer(layer, device, samples, divided, fraction, expert_lanes), self._factors.get(device.kind.name))

    def _predicted_layer(
        self, layer: Layer, device: Device, samples: float, divided: float, fraction: float, expert_lanes: int
    ) -> LayerSeconds:
        """By the probe's tables where there are some, else by the roofline; `divided` are the samples of split work."""
        if device.kind.measured is not None:
            return self._layer_of_probed(layer, device, samples, divided, fraction, expert_lanes)
        forward = backward = 0.0
        for work in layer.work:
            seconds = self._work(work, device, divided if work.split else samples, fraction, expert_lanes)
            forward += seconds
            backward += seconds * work.backward
        held = _held(layer, fraction, expert_lanes)
        bandwidth = device.kind.memory_bytes_per_s * self._calibration.memory_efficiency * device.speed
        return LayerSeconds(forward, backward, held * self._update_bytes / bandwidth)

    def _layer_of_probed(
        self, layer: Layer, device: Device, samples: float, divided: float, fraction: float, expert_lanes: int
    ) -> LayerSeconds:
        """By what the probe measured of the device; `divided` are the samples of split work."""
        measured = device.kind.measured
        assert measured is not None, "asked only of devices that were probed"
        times = self._probed.get(device.kind.name)
        if times is None:
            times = self._probed[device.kind.name] = MeasuredTimes(device.kind, measured, self._graph.precision)
        tokens = samples * expert_lanes  # experts take those of all lanes
        sizes = [tokens if work.expert else divided if work.split else samples for work in layer.work]
        passes = [times.work(work, size, fraction, expert_lanes) for work, size in zip(layer.work, sizes, strict=True)]
        held = _held(layer, fraction, expert_lanes)
        tensors = [elements * held / layer.parameters for elements in layer.tensors] or [held]
        update = times.update(tensors, self._update_bytes) if held else 0.0
        forward, backward = sum(one.forward for one in passes), sum(one.backward for one in passes)
        return LayerSeconds(forward / device.speed, backward / device.speed, update / device.speed)

    def _work(self, work: Work, device: Device, samples: float, fraction: float, expert_lanes: int) -> float:
        """Forward seconds of one work item; lanes that divide the experts have fewer each, with the tokens of all lanes."""
        calibration = self._calibration
        part = fraction if work.split else 1.0
        count = float(work.count)
        if work.expert:
            count, samples = count / expert_lanes, samples * expert_lanes
        traffic = (work.bytes * samples + work.weight_bytes) * part / (device.kind.memory_bytes_per_s * calibration.memory_efficiency)
        arithmetic = 0.0
        if work.flops:
            peak = device.kind.peak(self._graph.precision) * calibration.matmul_efficiency
            arithmetic = work.flops * samples * part / (peak * self._fill(work, device, samples, fraction))
        return count * (max(traffic, arithmetic) / device.speed + calibration.kernel_seconds)

    def _fill(self, work: Work, device: Device, samples: float, fraction: float) -> float:
        """The share of a large matmul's rate that one of this size reaches."""
        calibration = self._calibration
        depth = work.depth * (fraction if work.split == "depth" else 1.0)
        outputs = work.rows * samples * work.columns * (fraction if work.split in ("rows", "columns") else 1.0)
        enough = calibration.wave_outputs * device.kind.flops["fp32"]
        along = depth / (depth + calibration.matmul_half_depth) if depth else 1.0
        across = outputs / (outputs + enough) if outputs else 1.0
        return along * across


def _scaled(seconds: LayerSeconds, factor: KindFactor | None) -> LayerSeconds:
    if factor is None:
        return seconds
    return LayerSeconds(seconds.forward * factor.forward, seconds.backward * factor.backward, seconds.update * factor.update)


def _summed(rows: list[LayerSeconds]) -> StageTable:
    return StageTable(*(tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True)))


def _held(layer: Layer, fraction: float, expert_lanes: int) -> float:
    """Trainable parameters of a layer that a device holds."""
    held = layer.parameters - layer.split_parameters * (1 - fraction)
    return held - layer.expert_parameters * (1 - 1 / expert_lanes) * (fraction if layer.split_parameters else 1.0)


_Measured = dict[tuple[str, str, int], list[LayerTime]]


def _index(times: tuple[LayerTime, ...]) -> _Measured:
    index: _Measured = {}
    for time in sorted(times, key=lambda time: time.samples):
        index.setdefault((time.layer, time.kind, time.tensor), []).append(time)
    return index


def _look_up(measured: _Measured, layer: Layer, device: Device, samples: float, tensor: int) -> LayerSeconds | None:
    """The measured times of a layer, by name and then by signature, interpolated between the sizes measured."""
    if not measured:
        return None
    points = measured.get((layer.name, device.kind.name, tensor)) or measured.get((layer.signature, device.kind.name, tensor))
    if not points:
        return None
    below = max((point for point in points if point.samples <= samples), key=lambda point: point.samples, default=points[0])
    above = min((point for point in points if point.samples >= samples), key=lambda point: point.samples, default=points[-1])
    if above.samples == below.samples:  # at a point, or outside the table: in proportion to the samples
        share, scale = 0.0, samples / below.samples
    else:
        share, scale = (samples - below.samples) / (above.samples - below.samples), 1.0

    def between(a: float, b: float) -> float:
        return (a + (b - a) * share) * scale / device.speed

    return LayerSeconds(
        between(below.forward_seconds, above.forward_seconds),
        between(below.backward_seconds, above.backward_seconds),
        (below.update_seconds + (above.update_seconds - below.update_seconds) * share) / device.speed,
    )
