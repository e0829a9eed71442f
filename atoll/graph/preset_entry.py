"""One line of the table of presets."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.graph.graph import Graph, Precision

__all__ = ["PresetEntry"]


@dataclass(frozen=True, kw_only=True)
class PresetEntry:
    """One line of the table. `parameters` is the published count; `build` makes the graph."""

    name: str
    description: str
    parameters: float
    source: str
    batch_size: int
    build: Callable[[str, Precision], Graph]
    precision: Precision = "fp16"
    optimizer: str = "adamw"
