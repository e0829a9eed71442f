"""What a graph's annotations demand of a plan.

- A `stage` is whole and apart from other annotated stages; layers that no stage covers may join it.
- `split` layers are divided, by tensor parallelism or (where they have experts) by expert parallelism, in as many parts as it says.
- `replica(n)` makes n copies, each taking its share of the batch; nested ones multiply. With nothing nested inside, a copy is one device.
- `pipeline` fixes the micro-batches: of the global batch, or of each copy when replicas enclose it.
"""

from collections.abc import Iterator
from math import prod

from atoll.graph import Graph
from atoll.graph.graph import Constraint
from atoll.plan.plan import Plan, Stage
from atoll.plan.table import Mark, Problem

__all__ = ["constraint_problems"]


def constraint_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Every annotation the plan does not honour. The plan's stages must already cover the graph's layers."""
    rules = {"stage": _stage, "split": _split, "replica": _replica, "pipeline": _pipeline}
    for number, constraint in enumerate(graph.constraints):
        yield from rules[constraint.kind](plan, graph, number, constraint)


def _stages_of(plan: Plan, layers: "set[int] | tuple[int, ...]") -> list[tuple[int, Stage]]:
    """The plan's stages that run any of these layers."""
    covered = set(layers)
    return [(i, stage) for i, stage in enumerate(plan.stages) if not covered.isdisjoint(range(stage.start, stage.stop))]


def _around(graph: Graph, number: int) -> list[int]:
    """The constraint and those that enclose it, innermost first."""
    chain = []
    while number >= 0:
        chain.append(number)
        number = graph.constraints[number].parent
    return chain


def _copies(graph: Graph, number: int) -> tuple[int, bool]:
    """How many copies the replicas from this constraint outwards make, and whether that is all (none of them is free)."""
    counts = [graph.constraints[n].devices for n in _around(graph, number) if graph.constraints[n].kind == "replica"]
    return prod(count for count in counts if count), all(counts)


def _stage(plan: Plan, graph: Graph, number: int, constraint: Constraint) -> Iterator[Problem]:
    homes = _stages_of(plan, constraint.layers)
    if len(homes) > 1:
        index = homes[1][0]
        yield Problem(f"{_named(constraint)} makes one stage of layers that stages {homes[0][0]} and {index} divide", Mark("layers", index))
        return
    mine = set(constraint.layers)
    for index, stage in homes:
        for other in graph.constraints[number + 1 :]:
            apart = other.kind == "stage" and mine.isdisjoint(other.layers)
            if apart and not set(other.layers).isdisjoint(range(stage.start, stage.stop)):
                yield Problem(f"{_named(constraint)} and {_named(other)} are both in stage {index}", Mark("layers", index))


def _split(plan: Plan, graph: Graph, number: int, constraint: Constraint) -> Iterator[Problem]:
    for index, stage in _stages_of(plan, constraint.layers):
        expert = stage.expert and any(graph.layers[layer].experts for layer in constraint.layers)
        degrees = {stage.tensor, stage.lanes, stage.tensor * stage.lanes} if expert else {stage.tensor}
        if constraint.devices and constraint.devices not in degrees:
            sentence = f"{_named(constraint)} asks for {constraint.devices} parts, stage {index} makes {max(degrees)}"
            yield Problem(sentence, Mark("inside", index))
        elif max(degrees) == 1:
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
    inner = {layer for other in graph.constraints if other.parent == number for layer in other.layers}
    plain = set(constraint.layers) - inner  # where this is the innermost annotation
    for index, stage in _stages_of(plan, plain):
        split = [layer for layer in plain.intersection(range(stage.start, stage.stop)) if graph.layers[layer].tensor_units > 1]
        if stage.tensor > 1 and split:
            yield Problem(f"{_named(constraint)} keeps its layers whole, stage {index} splits them", Mark("inside", index))
    copies, exact = _copies(graph, number)
    for index, stage in _stages_of(plan, plain if plain else constraint.layers):
        made = len(stage.replicas) * stage.lanes
        if made != copies if exact and plain else made % copies:
            sentence = f"{_named(constraint)} asks for {copies} copies, stage {index} makes {made} (replicas × lanes)"
            yield Problem(sentence, Mark("inside", index))


def _pipeline(plan: Plan, graph: Graph, number: int, constraint: Constraint) -> Iterator[Problem]:
    wanted, copies = constraint.micro_batches, _copies(graph, number)[0]
    if wanted and plan.micro_batches not in (wanted, wanted * copies):
        each = f" (or {wanted} for each of {copies} copies)" if copies > 1 else ""
        yield Problem(
            f"{_named(constraint)} asks for {wanted} micro-batches{each}, the plan makes {plan.micro_batches}", Mark("micro_batch")
        )


def _named(constraint: Constraint) -> str:
    return f"the annotation {constraint.kind}{f' at {constraint.where}' if constraint.where else ''}"
