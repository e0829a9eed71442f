"""How long any run of layers takes a slot of any class: prefix sums, so that a stage's time is a few subtractions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from atoll.cost import Evaluator
from atoll.cost.communication import Span, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, span_of
from atoll.cost.compute import ComputeTimes
from atoll.cost.context import Memo
from atoll.plan import Replica, Stage
from atoll.planner.arrange import DeviceClass, Slot

__all__ = ["Inside", "Prefix", "SlotTimes"]


class Inside(NamedTuple):
    """Parallelism inside a replica."""

    tensor: int = 1
    lanes: int = 1
    sharded: bool = False
    expert: bool = False
    split: tuple[int, ...] = ()  # layers that lanes divide
    tensor_shares: tuple[int, ...] = ()  # where tensors do not divide into equal parts

    @property
    def fraction(self) -> float:
        """The part of every split tensor that the device with most of it holds."""
        return max(self.tensor_shares) / sum(self.tensor_shares) if self.tensor_shares else 1 / self.tensor

    @property
    def size(self) -> int:
        """Devices of a replica."""
        return self.tensor * self.lanes

    def replica(self, devices: tuple[str, ...]) -> Replica:
        """A replica of these devices, each lane of which takes one sample."""
        return Replica(devices=devices, samples=(1,) * self.lanes, tensor_shares=self.tensor_shares)

    def stage(self, start: int, stop: int, replicas: tuple[Replica, ...], recompute: bool) -> Stage:
        """A stage that is parallel inside in this way."""
        return Stage(
            start=start,
            stop=stop,
            replicas=replicas,
            tensor=self.tensor,
            sharded=self.sharded,
            expert=self.expert,
            recompute=recompute,
            split=tuple(layer for layer in self.split if start <= layer < stop),
        )


Prefix = tuple[float, ...]  # sums over the layers before each: layers a…b-1 take `prefix[b] - prefix[a]`


class SlotMemory(NamedTuple):
    """What a device of a slot holds, as prefix sums over layers: a straight line in the samples in flight."""

    fixed: float
    state: Prefix
    kept: Prefix  # activations of one sample in flight
    once: float  # activations of one sample that exist once, while a layer is recomputed

    def of(self, start: int, stop: int, held_samples: float, micro_samples: float) -> float:
        """Bytes of layers `start` to `stop`."""
        kept = (self.kept[stop] - self.kept[start]) * held_samples
        return self.fixed + self.state[stop] - self.state[start] + kept + self.once * micro_samples


class SlotTimes:
    """Slot times for one evaluator; what was computed once is remembered."""

    def __init__(self, evaluator: Evaluator, classes: tuple[DeviceClass, ...], wan_ratio: float = 1.0) -> None:
        """`wan_ratio` is how small the best codec allowed makes activations between sites."""
        self.evaluator = evaluator
        self.wan_ratio = wan_ratio
        self.classes = classes
        self._compute = ComputeTimes(evaluator.graph, evaluator.calibration, evaluator.optimizer.update_bytes)
        self._found: dict[tuple[int, Inside, float, bool], Prefix] = {}
        self._together: dict[tuple[object, ...], Sequence[float]] = {}
        self._memory = Memo(self._read_memory)

    def slot(self, slot: Slot, inside: Inside, micro_samples: float, recompute: bool) -> Prefix:
        """Forward and backward of one micro-batch, with what they do not hide of gathering shards; all slots of a class are alike."""
        key = (slot.kind, inside, micro_samples, recompute)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._build(slot, inside, micro_samples, recompute)
        return found

    def together(
        self, slots: Mapping[int, Slot], numbers: Mapping[int, int], inside: Inside, micro: float, recompute: bool
    ) -> Sequence[float]:
        """Time of a micro-batch by the number of layers when `numbers` of slots of each class share the work of a stage."""
        key = (frozenset(numbers.items()), inside, micro, recompute)
        found = self._together.get(key)
        if found is None:
            totals = [self.slot(slot, inside, micro, recompute) for slot in slots.values()]
            rows = [[numbers[kind] / max(value, 1e-12) for value in total] for kind, total in zip(slots, totals, strict=True)]
            found = self._together[key] = [0.0, *(1.0 / sum(rates) for rates in list(zip(*rows, strict=True))[1:])]
        return found

    def memory(self, inside: Inside, recompute: bool, is_cpu: bool) -> SlotMemory:
        """Memory of a device, read off the cost model at a few points of what is a sum over layers."""
        return self._memory[inside, recompute, is_cpu]

    def _read_memory(self, key: tuple[Inside, bool, bool]) -> SlotMemory:
        inside, recompute, is_cpu = key
        layers = len(self.evaluator.graph.layers)

        def total(start: int, stop: int, held: int, again: bool) -> float:
            stage = inside.stage(start, stop, (), again)
            return self.evaluator.device_memory(stage, inside.fraction, 1.0, held, inside.lanes, is_cpu).total_bytes

        whole = [total(0, i, 0, False) for i in range(1, layers + 1)]
        fixed = whole[0] + total(1, 2, 0, False) - whole[1] if layers > 1 else 0.0
        once = total(0, layers, 0, True) - whole[-1] if recompute else 0.0
        # a stage's own `once` is that of its largest layer: the largest of all is a bound that plans are checked against later
        kept = [total(0, i, 1, recompute) - total(0, i, 0, recompute) for i in range(1, layers + 1)]
        return SlotMemory(fixed, (0.0, *(value - fixed for value in whole)), (0.0, *kept), once)

    def _build(self, slot: Slot, inside: Inside, micro_samples: float, recompute: bool) -> Prefix:
        evaluator, amounts = self.evaluator, self.evaluator.amounts
        device = self.classes[slot.kind].device
        samples = micro_samples / inside.lanes
        expert_lanes = inside.lanes if inside.expert else 1
        if inside.split:
            table = self._compute.table_with_split(device, samples, micro_samples, inside.split, inside.lanes, expert_lanes)
        else:
            table = self._compute.table(device, samples, inside.fraction, inside.tensor, expert_lanes)
        again = 2.0 if recompute else 1.0
        comm = self._collectives(slot, inside, samples)
        forward = [f + c for f, c in zip(table.forward, comm, strict=True)]
        backward = [b + (f if recompute else 0.0) + c * again for f, b, c in zip(table.forward, table.backward, comm, strict=True)]
        gather, scatter, packing = [0.0] * len(forward), [0.0] * len(forward), 0.0
        element = 4.0 if evaluator.graph.precision == "fp32" else 2.0
        if inside.sharded and inside.lanes > 1:
            held = [p - s * (1 - inside.fraction) for p, s in zip(amounts.parameters, amounts.split_parameters, strict=True)]
            if inside.expert:
                held = [h - e for h, e in zip(held, amounts.expert_parameters, strict=True)]
            if inside.split:
                divided = self._of_split(inside, [float(layer.split_parameters) for layer in evaluator.graph.layers])
                held = [h - d for h, d in zip(held, divided, strict=True)]
            base, slope = _affine(lambda x: all_gather_seconds(self._lanes(slot, inside), x, evaluator.calibration), 1e9)
            layers = len(forward) - 1
            trained = [h * element * slope + base * i / layers for i, h in enumerate(held)]
            gather = [t + f * slope for t, f in zip(trained, self._frozen(inside), strict=True)]
            scatter = [t * evaluator.calibration.gradient_bytes / element for t in trained]
            packing = 3 * evaluator.calibration.shard_seconds(is_cpu=device.kind.cpu)
        hidden = 0.0 if device.kind.cpu else evaluator.calibration.sync_overlap
        rows = zip(range(len(forward)), forward, backward, gather, scatter, strict=True)
        total = [f + max(0.0, g - hidden * f) + b + max(0.0, g + s - hidden * b) + i * packing for i, f, b, g, s in rows]
        return tuple(total)

    def _frozen(self, inside: Inside) -> list[float]:
        """Bytes of frozen parameters that lanes shard, as a prefix sum."""
        amounts = self.evaluator.amounts
        held = [f - s * (1 - inside.fraction) for f, s in zip(amounts.frozen, amounts.split_frozen, strict=True)]
        if inside.expert:
            held = [h - e for h, e in zip(held, amounts.expert_frozen, strict=True)]
        if inside.split:
            bounds = pairwise(amounts.split_frozen)
            divided = self._of_split(inside, [after - before for before, after in bounds])
            held = [h - d for h, d in zip(held, divided, strict=True)]
        return held

    def _collectives(self, slot: Slot, inside: Inside, samples: float) -> list[float]:
        """Tensor and expert exchanges of the forward pass, as a prefix sum."""
        evaluator, amounts = self.evaluator, self.evaluator.amounts
        calibration = evaluator.calibration
        total = [0.0] * len(amounts.parameters)
        if inside.tensor > 1:
            span = self._span(slot.devices[: inside.tensor])
            base, slope = _affine(lambda x: all_reduce_seconds(span, x, calibration), _typical(amounts.tensor_bytes, samples))
            rows = zip(amounts.tensor_reductions, amounts.tensor_bytes, strict=True)
            total = [t + n * base + x * samples * slope for t, (n, x) in zip(total, rows, strict=True)]
        if inside.expert and inside.lanes > 1:
            span = self._lanes(slot, inside)
            base, slope = _affine(lambda x: all_to_all_seconds(span, x, calibration), _typical(amounts.expert_bytes, samples))
            exchanges = zip(amounts.expert_layers, amounts.expert_bytes, strict=True)
            total = [t + 2 * (n * base + x * samples / inside.tensor * slope) for t, (n, x) in zip(total, exchanges, strict=True)]
        if inside.split:
            span, together = self._lanes(slot, inside), samples * inside.lanes
            rows_of_layers = [
                layer.tensor_reductions * all_reduce_seconds(span, layer.tensor_bytes * together / layer.tensor_reductions, calibration)
                if layer.tensor_reductions
                else 0.0
                for layer in evaluator.graph.layers
            ]
            total = [t + x for t, x in zip(total, self._of_split(inside, rows_of_layers), strict=True)]
        return total

    @staticmethod
    def _of_split(inside: Inside, by_layer: Sequence[float]) -> list[float]:
        """A prefix sum over the layers that lanes divide."""
        return list(accumulate((value if i in inside.split else 0.0 for i, value in enumerate(by_layer)), initial=0.0))

    def _span(self, names: tuple[str, ...]) -> Span:
        evaluator = self.evaluator
        return span_of(evaluator.cluster, [[evaluator.devices[name] for name in names]], evaluator.calibration)

    def _lanes(self, slot: Slot, inside: Inside) -> Span:
        evaluator = self.evaluator
        members = [evaluator.devices[name] for name in slot.devices]
        groups = [members[position :: inside.tensor] for position in range(inside.tensor)]
        return span_of(evaluator.cluster, groups, evaluator.calibration)


def _typical(prefix: tuple[float, ...], samples: float) -> float:
    """The average amount of the layers that have any."""
    steps = [b - a for a, b in pairwise(prefix) if b > a]
    return samples * sum(steps) / len(steps) if steps else 1.0


def _affine(function: Callable[[float], float], size: float) -> tuple[float, float]:
    """Base and slope of a cost that is affine near `size`."""
    low, high = function(size), function(2 * size)
    slope = (high - low) / size
    return max(0.0, low - slope * size), slope
