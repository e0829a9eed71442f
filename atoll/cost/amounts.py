"""Amounts: sums over a run of layers, and what of them one device holds."""

from itertools import accumulate
from typing import NamedTuple

from atoll.graph import Graph
from atoll.plan import Replica

__all__ = ["Amounts", "Held", "held_parameters", "tensor_fraction"]


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


def tensor_fraction(replica: Replica, tensor: int, position: int) -> float:
    """The part of every split tensor that a position of a lane holds."""
    if tensor == 1:
        return 1.0
    shares = replica.tensor_shares
    return shares[position] / sum(shares) if shares else 1.0 / tensor
