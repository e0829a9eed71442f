"""What a device must hold: parameters, gradients, optimizer state, activations in flight, buffers."""

from itertools import accumulate
from typing import NamedTuple

from atoll.cost.calibration import Calibration
from atoll.cost.cost import MemoryUse
from atoll.errors import PlanError
from atoll.graph import Graph

__all__ = ["OPTIMIZERS", "Amounts", "OptimizerCost", "memory_use", "optimizer_cost"]


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


def optimizer_cost(name: str) -> OptimizerCost:
    """What an optimizer costs, by its class's name in any case."""
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise PlanError(f"optimizer {name!r}: unknown to the cost model; it knows {', '.join(OPTIMIZERS)}") from None


class Amounts(NamedTuple):
    """Prefix sums over the layers of what communication and memory need."""

    parameters: tuple[float, ...]
    split_parameters: tuple[float, ...]
    expert_parameters: tuple[float, ...]
    frozen_parameters: tuple[float, ...]
    saved: tuple[float, ...]
    split_saved: tuple[float, ...]
    inputs: tuple[float, ...]
    tensor_bytes: tuple[float, ...]
    tensor_reductions: tuple[float, ...]
    expert_bytes: tuple[float, ...]
    expert_layers: tuple[float, ...]

    @staticmethod
    def of(graph: Graph) -> "Amounts":
        """Summed once a graph."""
        rows = [
            (
                float(layer.parameters),
                float(layer.split_parameters),
                float(layer.expert_parameters),
                float(layer.frozen_parameters),
                layer.saved_bytes,
                layer.split_saved_bytes,
                layer.input_bytes,
                layer.tensor_bytes,
                float(layer.tensor_reductions),
                layer.expert_bytes,
                float(layer.experts > 0),
            )
            for layer in graph.layers
        ]
        return Amounts(*(tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True)))


class Held(NamedTuple):
    """Parameters of a stage as one device holds them."""

    dense: float  # beside the experts
    expert: float
    frozen: float


def held_parameters(amounts: Amounts, start: int, stop: int, fraction: float, expert_lanes: int) -> Held:
    """Parameters of a stage on a device with `fraction` of each split tensor, when `expert_lanes` devices divide the experts."""
    total = amounts.parameters[stop] - amounts.parameters[start]
    split = amounts.split_parameters[stop] - amounts.split_parameters[start]
    experts = amounts.expert_parameters[stop] - amounts.expert_parameters[start]
    frozen = amounts.frozen_parameters[stop] - amounts.frozen_parameters[start]
    split_experts = min(experts, split)
    own_experts = (split_experts * fraction + experts - split_experts) / expert_lanes
    dense_split = split - split_experts
    dense = (total - experts) - dense_split * (1 - fraction)
    return Held(dense, own_experts, frozen)


def memory_use(
    held: Held,
    shards: int,
    activations: float,
    working_parameters: float,
    half_precision: bool,
    optimizer: OptimizerCost,
    calibration: Calibration,
    is_cpu: bool,
) -> MemoryUse:
    """`shards` devices divide the state of the parameters that are not experts'; `working_parameters` are gathered at one time."""
    trained = held.dense / shards + held.expert
    weights = 4.0 * (trained + held.frozen / shards) + (2.0 * (trained + held.frozen / shards) if half_precision else 0.0)
    overhead = calibration.memory_overhead
    return MemoryUse(
        parameters=weights,
        gradients=4.0 * trained,
        optimizer=optimizer.state_bytes * trained,
        activations=activations * overhead,
        buffers=(0.0 if is_cpu else calibration.context_bytes) + working_parameters * (2.0 if half_precision else 4.0),
    )
