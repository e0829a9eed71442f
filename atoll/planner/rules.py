"""Rules: what the annotations leave open to the planner."""

from itertools import pairwise
from typing import NamedTuple

from atoll.errors import AnnotationError
from atoll.graph import Constraint, Graph

__all__ = ["Rules", "rules_of"]


class Rules(NamedTuple):
    """Constraints in the planner's own terms; 0 and None leave a choice free."""

    cuts: tuple[int, ...]  # where a stage may end
    bounds: tuple[int, ...] | None = None  # all boundaries, where stages were annotated
    micro_batches: int = 0
    tensor: int = 0
    replicas: int = 0
    even_split: bool = False
    said: tuple[str, ...] = ()  # what was asked, for the reasons


def rules_of(graph: Graph) -> Rules:
    """Reads the annotations of a graph."""
    rules = Rules(cuts=graph.cuts)
    for constraint in graph.constraints:
        if constraint.kind == "pipeline" and constraint.micro_batches:
            rules = rules._replace(micro_batches=constraint.micro_batches, said=(*rules.said, _said(constraint, "micro_batches")))
        if constraint.kind == "replica" and constraint.devices:
            rules = rules._replace(replicas=constraint.devices, said=(*rules.said, _said(constraint, "devices")))
        if constraint.kind == "split" and constraint.devices:
            said = (*rules.said, _said(constraint, "devices"))
            rules = rules._replace(tensor=constraint.devices, even_split=not constraint.uneven, said=said)
    stages = [constraint for constraint in graph.constraints if constraint.kind == "stage"]
    if stages:
        said = tuple(f"stage at {stage.where}" for stage in stages)
        rules = rules._replace(bounds=_stage_bounds(graph, stages), said=(*rules.said, *said))
    return rules


def _said(constraint: Constraint, field: str) -> str:
    return f"{constraint.kind}({getattr(constraint, field)}) at {constraint.where}"


def _stage_bounds(graph: Graph, stages: list[Constraint]) -> tuple[int, ...]:
    """Boundaries of annotated stages: each ends at the legal cut closest before the next one's first layer."""
    ordered = sorted(stages, key=lambda stage: min(stage.layers))
    bounds = [0]
    for here, there in pairwise(ordered):
        last, first = max(here.layers), min(there.layers)
        cuts = [cut for cut in graph.cuts if last < cut <= first]
        if not cuts:
            raise AnnotationError(
                f"{there.where}: this stage begins at layer '{graph.layers[first].name}', but the model cannot be cut between it "
                f"and the stage at {here.where}; annotate whole blocks"
            )
        bounds.append(cuts[-1])
    return (*bounds, len(graph.layers))
