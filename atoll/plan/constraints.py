"""What a graph's annotations demand of a plan."""

from collections.abc import Iterator

from atoll.graph import Graph
from atoll.graph.graph import Constraint
from atoll.plan.plan import Plan, Stage
from atoll.plan.table import Mark, Problem

__all__ = ["constraint_problems"]


def constraint_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Every annotation the plan does not honour. The plan's stages must already cover the graph's layers."""
    for number, constraint in enumerate(graph.constraints):
        if constraint.kind == "stage":
            yield from _stage(plan, graph, constraint)
        elif constraint.kind == "split":
            yield from _split(plan, graph, constraint)
        elif constraint.kind == "replica":
            yield from _replica(plan, graph, number, constraint)
        elif constraint.micro_batches and plan.micro_batches != constraint.micro_batches:
            sentence = f"{_named(constraint)} asks for {constraint.micro_batches} micro-batches, the plan makes {plan.micro_batches}"
            yield Problem(sentence, Mark("micro_batch"))


def _stages_of(plan: Plan, constraint: Constraint) -> list[tuple[int, Stage]]:
    """The plan's stages that run a layer the annotation covers."""
    covered = set(constraint.layers)
    return [(i, stage) for i, stage in enumerate(plan.stages) if not covered.isdisjoint(range(stage.start, stage.stop))]


def _stage(plan: Plan, graph: Graph, constraint: Constraint) -> Iterator[Problem]:
    """An annotated stage stays whole and apart from other annotated stages; layers that no annotation covers may join it."""
    homes = _stages_of(plan, constraint)
    if len(homes) > 1:
        index = homes[1][0]
        yield Problem(f"{_named(constraint)} makes one stage of layers that stages {homes[0][0]} and {index} divide", Mark("layers", index))
        return
    for index, stage in homes:
        for other in graph.constraints:
            apart = other.kind == "stage" and other.parent == constraint.parent and other.order > constraint.order
            if apart and not set(other.layers).isdisjoint(range(stage.start, stage.stop)):
                yield Problem(f"{_named(constraint)} and {_named(other)} are both in stage {index}", Mark("layers", index))
        if constraint.devices and len(stage.devices) != constraint.devices:
            sentence = f"{_named(constraint)} asks for {constraint.devices} devices, stage {index} has {len(stage.devices)}"
            yield Problem(sentence, Mark("replicas", index))


def _split(plan: Plan, graph: Graph, constraint: Constraint) -> Iterator[Problem]:
    """Split layers are divided by tensor parallelism or, where they have experts, by expert parallelism."""
    for index, stage in _stages_of(plan, constraint):
        expert = stage.expert and any(graph.layers[layer].experts for layer in constraint.layers)
        degree = stage.tensor * (stage.lanes if expert else 1)
        if constraint.devices and degree != constraint.devices:
            yield Problem(f"{_named(constraint)} asks for {constraint.devices} parts, stage {index} makes {degree}", Mark("inside", index))
        elif degree == 1:
            yield Problem(f"{_named(constraint)} asks for its layers to be divided, stage {index} does not", Mark("inside", index))
        elif not constraint.uneven:
            yield from _even(graph, constraint, index, stage)


def _even(graph: Graph, constraint: Constraint, index: int, stage: Stage) -> Iterator[Problem]:
    for number, replica in enumerate(stage.replicas):
        if len(set(replica.tensor_shares)) > 1:
            yield Problem(f"{_named(constraint)} forbids unequal shares", Mark("shares", index, number))
    for layer in constraint.layers:
        units, name = graph.layers[layer].tensor_units, graph.layers[layer].name
        if stage.start <= layer < stage.stop and stage.tensor > 1 and units % stage.tensor:
            sentence = f"{_named(constraint)} forbids unequal shares, but layer {name!r} has {units} units for tensor={stage.tensor}"
            yield Problem(sentence, Mark("inside", index))


def _replica(plan: Plan, graph: Graph, number: int, constraint: Constraint) -> Iterator[Problem]:
    """Replicated layers are whole on each device, except where a split is nested inside."""
    inner = {layer for other in graph.constraints if other.kind == "split" and other.parent == number for layer in other.layers}
    for index, stage in _stages_of(plan, constraint):
        plain = set(constraint.layers).intersection(range(stage.start, stage.stop)) - inner
        if plain and stage.tensor > 1 and any(graph.layers[layer].tensor_units > 1 for layer in plain):
            yield Problem(f"{_named(constraint)} keeps its layers whole, stage {index} splits them", Mark("inside", index))


def _named(constraint: Constraint) -> str:
    return f"the annotation {constraint.kind}{f' at {constraint.where}' if constraint.where else ''}"
