"""What pricing a plan reads and no plan changes: a graph and sums over its layers, a cluster, the constants of the model. Prepared once."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec

from atoll.cluster import Cluster, DeviceKind
from atoll.cluster.cluster import device_index
from atoll.cost.calibration import Calibration
from atoll.errors import PlanError
from atoll.graph import Graph, Layer, SharedParameter
from atoll.plan import Plan, Replica, Stage

__all__ = ["OPTIMIZERS", "Amounts", "DevicePlace", "Held", "Memo", "OptimizerCost", "PricingContext", "lane_part", "tensor_fraction"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Amounts(NamedTuple):
    """Prefix sums over the layers of what communication and memory need."""

    parameters: tuple[float, ...]
    split_parameters: tuple[float, ...]
    expert_parameters: tuple[float, ...]
    frozen: tuple[float, ...]  # bytes, as of the next three
    split_frozen: tuple[float, ...]
    expert_frozen: tuple[float, ...]
    resting: tuple[float, ...]  # of layers that no gradient flows through
    casts: tuple[float, ...]  # copies in the precision of the products that autocast makes for every micro-batch and backward reads
    saved: tuple[float, ...]
    split_saved: tuple[float, ...]
    inputs: tuple[float, ...]
    tensor_bytes: tuple[float, ...]
    tensor_reductions: tuple[float, ...]
    tensor_back_bytes: tuple[float, ...]
    expert_bytes: tuple[float, ...]
    expert_layers: tuple[float, ...]
    shared: tuple[SharedParameter, ...] = ()
    units: tuple[int, ...] = ()  # by layer, not summed

    @staticmethod
    def of(graph: Graph, element_bytes: float) -> "Amounts":
        """Summed once a graph. Frozen parameters have so many bytes each where the graph does not say it."""
        frozen = [layer.frozen_bytes or layer.frozen_parameters * element_bytes for layer in graph.layers]
        rows = [
            (
                float(layer.parameters),
                float(layer.split_parameters),
                float(layer.expert_parameters),
                nbytes,
                nbytes * layer.frozen_split_parameters / max(1, layer.frozen_parameters),
                nbytes * layer.frozen_expert_parameters / max(1, layer.frozen_parameters),
                0.0 if layer.has_backward else nbytes,
                _casts(layer) if graph.master_weights and graph.precision != "fp32" else 0.0,
                layer.saved_bytes,
                layer.split_saved_bytes,
                layer.input_bytes,
                layer.tensor_bytes,
                float(layer.tensor_reductions),
                layer.tensor_bytes * layer.tensor_backward,
                layer.expert_bytes,
                float(layer.experts > 0),
            )
            for layer, nbytes in zip(graph.layers, frozen, strict=True)
        ]
        sums = (tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True))
        return Amounts(*sums)._replace(shared=graph.shared, units=tuple(layer.tensor_units for layer in graph.layers))

    def is_split(self, shared: SharedParameter) -> bool:
        """Whether tensor parallelism divides a shared parameter: as its first user does."""
        first = shared.layers[0]
        if not shared.trained:
            return self.split_frozen[first + 1] > self.split_frozen[first]
        return self.split_parameters[first + 1] - self.split_parameters[first] >= shared.parameters


def _casts(layer: Layer) -> float:
    """Autocast keeps one copy of a trained weight, which is among its parameters' memory, and makes one of a frozen one at every use."""
    if not layer.has_backward or layer.frozen_bytes < 4 * max(1, layer.frozen_parameters):
        return 0.0
    weights = sum(work.weight_bytes * work.count for work in layer.work if work.kind in ("matmul", "conv"))
    return weights * layer.frozen_parameters / (layer.frozen_parameters + layer.parameters)


class Held(NamedTuple):
    """Parameters of a stage as one device holds them."""

    dense: float  # beside the experts
    expert: float
    frozen: float  # bytes, as of the next two; beside experts and what lanes divide
    frozen_apart: float = 0.0  # of experts, and of tensors that lanes divide
    resting: float = 0.0  # of `frozen`, in layers that no gradient flows through: nothing of them is needed in backward
    divided: float = 0.0  # its part of the tensors that lanes divide, which are not in `dense`


def lane_part(units: int, lanes: int) -> float:
    """The part of a layer's tensors that the busiest of `lanes` holds when they divide its units."""
    return -(-units // lanes) / units


def _held(
    amounts: Amounts,
    element_bytes: float,
    start: int,
    stop: int,
    fraction: float,
    expert_lanes: int,
    split: tuple[int, ...],
    lanes: int,
) -> Held:
    """Parameters of a stage on a device with `fraction` of each split tensor, when `expert_lanes` devices divide the experts and `lanes`
    the layers `split`."""
    total = amounts.parameters[stop] - amounts.parameters[start]
    tensors = amounts.split_parameters[stop] - amounts.split_parameters[start]
    experts = amounts.expert_parameters[stop] - amounts.expert_parameters[start]
    frozen_split = amounts.split_frozen[stop] - amounts.split_frozen[start]
    frozen_experts = amounts.expert_frozen[stop] - amounts.expert_frozen[start] if expert_lanes > 1 else 0.0
    frozen = amounts.frozen[stop] - amounts.frozen[start] - frozen_experts - frozen_split * (1 - fraction)
    resting = amounts.resting[stop] - amounts.resting[start]
    dense = total - experts - tensors * (1 - fraction)  # experts are never among what tensor parallelism divides
    for shared in amounts.shared:  # counted where it is first used; every other stage that uses it holds a copy
        if not start <= shared.layers[0] < stop and any(start <= layer < stop for layer in shared.layers):
            copy = shared.parameters * (fraction if amounts.is_split(shared) else 1.0)
            dense += copy if shared.trained else 0.0
            frozen += 0.0 if shared.trained else copy * element_bytes
    divided, frozen_apart = 0.0, frozen_experts / expert_lanes
    for layer in split:
        parameters = amounts.split_parameters[layer + 1] - amounts.split_parameters[layer]
        dense -= parameters
        divided += parameters * lane_part(amounts.units[layer], lanes)
        nbytes = amounts.split_frozen[layer + 1] - amounts.split_frozen[layer]
        frozen -= nbytes
        frozen_apart += nbytes * lane_part(amounts.units[layer], lanes)
    return Held(dense, experts / expert_lanes, frozen, frozen_apart, min(resting, frozen), divided)


def tensor_fraction(replica: Replica, tensor: int, position: int) -> float:
    """The part of every split tensor that a position of a lane holds."""
    if tensor == 1:
        return 1.0
    shares = replica.tensor_shares
    return shares[position] / sum(shares) if shares else 1.0 / tensor


class OptimizerCost(NamedTuple):
    """Bytes of state an optimizer keeps for a parameter, and bytes it reads and writes to update it."""

    state_bytes: float
    update_bytes: float


OPTIMIZERS = {
    "sgd": OptimizerCost(0, 12),
    "momentum": OptimizerCost(4, 20),
    "adam": OptimizerCost(8, 28),
    "adamw": OptimizerCost(8, 28),
    "adagrad": OptimizerCost(4, 20),
    "rmsprop": OptimizerCost(4, 20),
    "adafactor": OptimizerCost(0.1, 20),
    "lion": OptimizerCost(4, 20),
}


def _optimizer_cost(name: str) -> OptimizerCost:
    """What an optimizer costs, by its class's name in any case."""
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise PlanError(f"optimizer {name!r}: unknown to the cost model; it knows {', '.join(OPTIMIZERS)}") from None


class Memo(dict[_K, _V]):
    """A dictionary that makes what it lacks and remembers it."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _K) -> _V:
        found = self[key] = self._make(key)
        return found


class DevicePlace:
    """Where a stage's replicas live. Equal places of one setting are one object, so that caches know them by identity."""

    __slots__ = ("groups", "has_accelerators", "has_cpus", "names", "tensor")

    def __init__(self, tensor: int, groups: tuple[tuple[str, ...], ...], kinds: Iterable[DeviceKind]) -> None:
        self.tensor = tensor
        self.groups = groups  # the devices of each replica
        self.names = tuple([name for group in groups for name in group])
        cpus = {kind.cpu for kind in kinds}
        self.has_cpus, self.has_accelerators = True in cpus, False in cpus


class PricingContext:
    """A graph on a cluster, with an optimizer and a calibration."""

    def __init__(self, graph: Graph, cluster: Cluster, optimizer: str, calibration: Calibration) -> None:
        self.graph = graph
        self.cluster = cluster
        if not graph.master_weights:
            calibration = msgspec.structs.replace(calibration, gradient_bytes=2.0)
        self.calibration = calibration
        self.optimizer = _optimizer_cost(optimizer)
        self.devices = device_index(cluster)
        self.half_precision = graph.precision != "fp32"
        self.element_bytes = 2.0 if self.half_precision else 4.0
        self.amounts = Amounts.of(graph, self.element_bytes)
        self._held: Memo[tuple[int, int, float, int, tuple[int, ...], int], Held] = Memo(
            lambda key: _held(self.amounts, self.element_bytes, *key)
        )
        self._places = Memo(self._place)

    def place(self, stage: Stage) -> DevicePlace:
        """Where a stage's replicas live."""
        return self._places[stage.tensor, tuple([replica.devices for replica in stage.replicas])]

    def _place(self, key: tuple[int, tuple[tuple[str, ...], ...]]) -> DevicePlace:
        return DevicePlace(*key, [self.devices[name].kind for group in key[1] for name in group])

    def places(self, plan: Plan) -> list[DevicePlace]:
        """Where the replicas of each stage live."""
        return [self.place(stage) for stage in plan.stages]

    def held(self, stage: Stage, replica: Replica, position: int) -> Held:
        """Parameters the device at a position of a lane holds, before lanes shard them."""
        fraction = tensor_fraction(replica, stage.tensor, position)
        return self.held_with(stage, fraction, stage.lanes)

    def held_with(self, stage: Stage, fraction: float, lanes: int) -> Held:
        """Parameters of a device of a stage of so many lanes that has `fraction` of each split tensor, before lanes shard them."""
        return self._held[stage.start, stage.stop, fraction, lanes if stage.expert else 1, stage.split, lanes]

    def recomputed_stop(self, stage: Stage) -> int:
        """Where the layers that a stage runs again in backward end.

        The model's last layer is never among them: its backward follows its forward at once, so recomputing it would save nothing.
        """
        return min(stage.stop, max(stage.start, len(self.graph.layers) - 1)) if stage.recompute else stage.start

    def most_held(self, stage: Stage) -> Held:
        """Parameters of the device that holds most of a stage: the one with the largest part of each tensor."""
        shares = [replica.tensor_shares for replica in stage.replicas if replica.tensor_shares]
        fraction = max((max(row) / sum(row) for row in shares), default=1 / stage.tensor)
        return self.held_with(stage, fraction, stage.lanes)
