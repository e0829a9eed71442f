"""One line of the table of presets."""

from dataclasses import dataclass
from typing import Protocol

from atoll.graph.graph import Graph, Precision

__all__ = ["GraphBuilder", "PresetEntry"]


class GraphBuilder(Protocol):
    """A generator of graphs with the shape already given."""

    def __call__(self, *, name: str, precision: Precision) -> Graph:
        """The graph under that name, in that precision."""


@dataclass(frozen=True, kw_only=True)
class PresetEntry:
    """One line of the table. `parameters` is the published count; `build` makes the graph."""

    name: str
    description: str
    parameters: float
    source: str
    batch_size: int
    build: GraphBuilder
    precision: Precision = "fp16"
    optimizer: str = "adamw"
