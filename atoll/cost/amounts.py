"""Amounts: sums over a run of layers, and what of them one device holds."""

from itertools import accumulate
from typing import NamedTuple

from atoll.graph import Graph, Layer, SharedParameter
from atoll.plan import Replica

__all__ = ["Amounts", "Held", "held_parameters", "lane_part", "tensor_fraction"]


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
    shared: tuple[SharedParameter, ...] = ()
    units: tuple[int, ...] = ()  # by layer, not summed

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
        sums = (tuple(accumulate(column, initial=0.0)) for column in zip(*rows, strict=True))
        return Amounts(*sums)._replace(shared=graph.shared, units=tuple(layer.tensor_units for layer in graph.layers))

    def is_split(self, shared: SharedParameter) -> bool:
        """Whether tensor parallelism divides a shared parameter: as its first user does."""
        first = shared.layers[0]
        return self.split_parameters[first + 1] - self.split_parameters[first] >= shared.parameters


class Held(NamedTuple):
    """Parameters of a stage as one device holds them."""

    dense: float  # beside the experts
    expert: float
    frozen: float
    divided: float = 0.0  # its part of the tensors that lanes divide, which are not in `dense`


def lane_part(layer: Layer, lanes: int) -> float:
    """The part of a layer's tensors that the busiest of `lanes` holds when they divide it, unit by unit."""
    return _part(layer.tensor_units, lanes)


def _part(units: int, lanes: int) -> float:
    return -(-units // lanes) / units


def held_parameters(
    amounts: Amounts, start: int, stop: int, fraction: float, expert_lanes: int, split: tuple[int, ...] = (), lanes: int = 1
) -> Held:
    """Parameters of a stage on a device with `fraction` of each split tensor, when `expert_lanes` devices divide the experts and `lanes`
    the layers `split`."""
    total = amounts.parameters[stop] - amounts.parameters[start]
    tensors = amounts.split_parameters[stop] - amounts.split_parameters[start]
    experts = amounts.expert_parameters[stop] - amounts.expert_parameters[start]
    frozen = amounts.frozen_parameters[stop] - amounts.frozen_parameters[start]
    dense = total - experts - tensors * (1 - fraction)  # experts are never among what tensor parallelism divides
    for shared in amounts.shared:  # counted where it is first used; every other stage that uses it holds a copy
        if not start <= shared.layers[0] < stop and any(start <= layer < stop for layer in shared.layers):
            dense += shared.parameters * (fraction if amounts.is_split(shared) else 1.0)
    divided = 0.0
    for layer in split:
        parameters = amounts.split_parameters[layer + 1] - amounts.split_parameters[layer]
        dense -= parameters
        divided += parameters * _part(amounts.units[layer], lanes)
    return Held(dense, experts / expert_lanes, frozen, divided)


def tensor_fraction(replica: Replica, tensor: int, position: int) -> float:
    """The part of every split tensor that a position of a lane holds."""
    if tensor == 1:
        return 1.0
    shares = replica.tensor_shares
    return shares[position] / sum(shares) if shares else 1.0 / tensor
