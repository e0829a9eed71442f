"""What a device must hold: parameters, gradients, optimizer state, activations in flight, buffers."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from atoll.cost.context import DevicePlace, PricingContext, tensor_fraction
from atoll.cost.synchronisation import is_overlapped
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import lane_bounds

__all__ = ["Memory", "MemoryUse"]


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes one device holds at its peak."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0  # what communication and the allocator need, the runtime's own context

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


class Memory:
    """Memory of any plan's devices; what was computed once is remembered."""

    def __init__(self, setting: PricingContext) -> None:
        self._setting = setting
        self._known: dict[tuple[object, ...], MemoryUse] = {}
        self._largest: dict[tuple[int, int, int], float] = {}

    def plan(self, plan: Plan, places: Sequence[DevicePlace], in_flight: Sequence[Sequence[int]]) -> dict[str, MemoryUse]:
        """What every device holds at its peak, where replicas have at most so many micro-batches in flight."""
        uses: dict[str, MemoryUse] = {}
        for stage, place, row in zip(plan.stages, places, in_flight, strict=True):
            use = self._of_all(plan, stage, place, row)
            if use is not None and uses.keys().isdisjoint(place.names):
                uses.update(dict.fromkeys(place.names, use))
                continue
            for replica, count in zip(stage.replicas, row, strict=True):
                self._replica(plan, stage, replica, count, uses)
        return uses

    def _of_all(self, plan: Plan, stage: Stage, place: DevicePlace, held: Sequence[int]) -> MemoryUse | None:
        """What each device of a stage holds; None where they may differ."""
        first = stage.replicas[0]
        samples = first.samples
        if held.count(held[0]) < len(held) or samples.count(samples[0]) < len(samples) or (place.has_cpus and place.has_accelerators):
            return None
        if any(replica.samples != samples or replica.tensor_shares for replica in stage.replicas):
            return None
        return self._remembered(
            plan, stage, 1 / stage.tensor, _most_pieces(plan.micro_batch_size, len(plan.stages) == 1, samples)[0], held[0], place.has_cpus
        )

    def _replica(self, plan: Plan, stage: Stage, replica: Replica, held: int, uses: dict[str, MemoryUse]) -> None:
        pieces = _most_pieces(plan.micro_batch_size, len(plan.stages) == 1, replica.samples)
        alike = not replica.tensor_shares and len(set(replica.samples)) == 1
        use: MemoryUse | None = None
        was_cpu = False
        for index, name in enumerate(replica.devices):
            is_cpu = self._setting.devices[name].kind.cpu
            if use is None or not alike or is_cpu != was_cpu:
                was_cpu = is_cpu
                lane, position = divmod(index, stage.tensor)
                use = self._remembered(plan, stage, tensor_fraction(replica, stage.tensor, position), pieces[lane], held, is_cpu)
            before = uses.get(name)
            uses[name] = use if before is None else _sum(before, use)

    def _remembered(self, plan: Plan, stage: Stage, fraction: float, piece: "_Piece", held: int, is_cpu: bool) -> MemoryUse:
        overlapped, lanes = is_overlapped(plan), stage.lanes
        inside = (stage.start, stage.stop, stage.sharded, stage.expert, stage.recompute, stage.split)
        key = (*inside, fraction, piece, held, lanes, is_cpu, overlapped)
        found = self._known.get(key)
        if found is None:
            use = self.device(stage, fraction, piece[0], held, lanes, is_cpu, piece[1])
            found = self._known[key] = _sum(use, self._of_two_steps(stage, fraction, lanes, is_cpu)) if overlapped else use
        return found

    def _of_two_steps(self, stage: Stage, fraction: float, lanes: int, is_cpu: bool) -> MemoryUse:
        """What a swarm's worker holds besides where a step is computed while the one before it is summed.

        The weights before the last step, of what is trained; this worker's own sums of the step before; and those of all workers, which a
        device that is a processor keeps in the same memory.
        """
        held = self._setting.held_with(stage, fraction, lanes)
        shards = lanes if stage.sharded else 1
        trained = held.dense / shards + held.expert + held.divided
        size = 4.0 if self._setting.graph.master_weights else 2.0
        return MemoryUse(parameters=size * trained, gradients=(8.0 if is_cpu else 4.0) * trained)

    def device(
        self, stage: Stage, fraction: float, samples: float, held: int, lanes: int, is_cpu: bool, others: float | None = None
    ) -> MemoryUse:
        """What a device with `fraction` of the tensors holds when `held` micro-batches of `samples` each are in flight, and as many of
        each other lane, or `others` of all of them."""
        setting = self._setting
        parameters = setting.held_with(stage, fraction, lanes)
        shards = lanes if stage.sharded else 1
        whole = parameters.dense * setting.element_bytes + parameters.frozen
        working = 2 * whole / max(1, stage.stop - stage.start) if stage.sharded and lanes > 1 else 0.0  # gathered at one time
        activations = self._activation_bytes(stage, fraction) * samples + self._casts(stage) * fraction
        once = self._largest_saved(stage.start, stage.stop, fraction) * samples if stage.recompute else 0.0
        gathered = self._gathered(stage) * (samples * (lanes - 1) if others is None else others)
        kept = (activations + gathered) * held + once
        trained = parameters.dense / shards + parameters.expert + parameters.divided
        frozen_bytes = parameters.frozen / shards + parameters.frozen_apart
        calibration, half, master = setting.calibration, setting.half_precision, setting.graph.master_weights
        size = 4.0 if master else 2.0  # bytes of a trained number
        return MemoryUse(
            # half precision trains an fp32 copy, unless all is in half; what is not trained needs none
            parameters=(6.0 if half and master else size) * trained + frozen_bytes,
            gradients=size * trained,
            optimizer=setting.optimizer.state_bytes * size / 4.0 * trained,
            activations=kept * calibration.memory_overhead,
            buffers=(0.0 if is_cpu else calibration.context_bytes) + working,
        )

    def _casts(self, stage: Stage) -> float:
        """Bytes of copies of frozen weights that a micro-batch in flight keeps."""
        casts = self._setting.amounts.casts
        return casts[stage.stop] - casts[self._setting.recomputed_stop(stage)]

    def _gathered(self, stage: Stage) -> float:
        """Bytes of another lane's sample in front of layers that lanes divide: about what these exchange in one pass."""
        return sum([self._setting.graph.layers[number].tensor_bytes for number in stage.split])

    def _activation_bytes(self, stage: Stage, fraction: float) -> float:
        """Bytes one sample in flight keeps in a stage."""
        amounts = self._setting.amounts
        first = self._setting.recomputed_stop(stage)
        inputs = amounts.inputs[first] - amounts.inputs[stage.start]
        split = amounts.split_saved[stage.stop] - amounts.split_saved[first]
        return inputs + (amounts.saved[stage.stop] - amounts.saved[first]) - split * (1 - fraction)

    def _largest_saved(self, start: int, stop: int, fraction: float) -> float:
        """The most any one layer keeps while it is recomputed, beyond its input, which is kept anyway."""
        key = (start, stop, round(fraction * 1e6))
        if key not in self._largest:
            layers = self._setting.graph.layers[start : min(stop, len(self._setting.graph.layers) - 1)]
            kept = (layer.saved_bytes - layer.split_saved_bytes * (1 - fraction) - layer.input_bytes for layer in layers)
            self._largest[key] = max([0.0, *kept])
        return self._largest[key]


_Piece = tuple[int, int]  # the most samples of a micro-batch that a lane has, and that the other lanes have


@lru_cache(maxsize=8192)
def _most_pieces(size: int, one_stage: bool, samples: tuple[int, ...]) -> tuple[_Piece, ...]:
    """Of each lane of a replica that takes these samples, divided as lockstep does it or always in the same proportion, as a swarm's worker
    does; lanes alike have the same."""
    total = sum(samples)
    size = min(size, total)
    if len(samples) == 1 or not total:
        return ((size, 0),) * len(samples)
    found = []
    for own, (fewest, most) in zip(samples, lane_bounds(size, one_stage, samples), strict=True):
        found.append((max(most, -(-size * own // total)), size - min(fewest, size * own // total)))
    return (max(found),) * len(found) if len(set(samples)) == 1 else tuple(found)


def _sum(a: MemoryUse, b: MemoryUse) -> MemoryUse:
    return MemoryUse(
        parameters=a.parameters + b.parameters,
        gradients=a.gradients + b.gradients,
        optimizer=a.optimizer + b.optimizer,
        activations=a.activations + b.activations,
        buffers=max(a.buffers, b.buffers),
    )
