"""What a graph's annotations demand of a plan.

- A `stage` is whole and apart from other annotated stages; layers that no stage covers may join it.
- `split` layers are divided in as many parts as it says: by tensor parallelism or by the lanes (`Stage.split`, which leaves the rest of
  the stage data parallel). Where a layer has experts it is these that must be divided. Layers that cannot be divided are repeated.
- `replica(n)` makes n copies, each taking its share of the batch; nested ones multiply. With nothing nested inside, a copy is one device.
- `pipeline` fixes the micro-batches: of the global batch, or of each copy when replicas enclose it.
"""

from collections.abc import Iterator
from math import lcm, prod

from atoll.graph import Graph
from atoll.graph.graph import Constraint
from atoll.plan.plan import Mark, Plan, Problem, Stage

__all__ = ["constraint_problems", "copies_asked", "micro_batches_asked", "stage_problems"]


def constraint_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Every annotation the plan does not honour. The plan's stages must already cover the graph's layers."""
    for number, constraint in enumerate(graph.constraints):
        if constraint.kind == "stage":
            yield from _stage(plan, graph, number, constraint)
    for index, stage in enumerate(plan.stages):
        yield from stage_problems(stage, graph, index)
    for number, constraint in enumerate(graph.constraints):
        if constraint.kind == "pipeline":
            yield from _pipeline(plan, graph, number, constraint)


def stage_problems(stage: Stage, graph: Graph, index: int = 0) -> Iterator[Problem]:
    """Every replica and split that a stage does not honour, whatever the other stages of its plan; `index` is its number there."""
    for number, constraint in enumerate(graph.constraints):
        if constraint.kind == "replica":
            yield from _replica(graph, number, constraint, stage, index)
        elif constraint.kind == "split":
            yield from _split(graph, constraint, stage, index)


def copies_asked(graph: Graph, start: int, stop: int) -> tuple[int, bool] | None:
    """What replicas ask of a stage of these layers: so many copies (replicas × lanes), or where not exact a multiple of them.

    None where they ask for different numbers, so that these layers cannot be one stage.
    """
    multiples: set[int] = {1}
    exactly: set[int] = set()
    for index, constraint in enumerate(graph.constraints):
        if constraint.kind == "replica":
            plain = _plain(graph, index)
            if not (plain or set(constraint.layers)).isdisjoint(range(start, stop)):
                copies, counted = _copies(graph, index)
                (exactly if counted and plain else multiples).add(copies)
    if not exactly:
        return lcm(*multiples), False
    number = min(exactly)
    return None if len(exactly) > 1 or number % lcm(*multiples) else (number, True)


def micro_batches_asked(graph: Graph) -> tuple[int, ...]:
    """Numbers of micro-batches any of which honours the pipelines; () where they leave it free."""
    choices = [
        {constraint.micro_batches, constraint.micro_batches * _copies(graph, index)[0]}
        for index, constraint in enumerate(graph.constraints)
        if constraint.kind == "pipeline" and constraint.micro_batches
    ]
    return tuple(sorted(set.intersection(*choices))) if choices else ()


def _plain(graph: Graph, number: int) -> set[int]:
    """Layers of a constraint that no other lies inside of."""
    inner = {layer for other in graph.constraints if other.parent == number for layer in other.layers}
    return set(graph.constraints[number].layers) - inner


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


def _split(graph: Graph, constraint: Constraint, stage: Stage, index: int) -> Iterator[Problem]:
    layers = [n for n in constraint.layers if stage.start <= n < stage.stop]
    for number in layers:
        layer = graph.layers[number]
        if layer.tensor_units < 2 and not layer.experts:
            continue  # there is nothing in it to divide
        parts = _parts_made(graph, stage, number)
        if constraint.devices and constraint.devices not in parts:
            sentence = f"{_named(constraint)} asks for {constraint.devices} parts, stage {index} makes {max(parts)} of layer {layer.name!r}"
            yield Problem(sentence, Mark("inside", index))
        elif not constraint.devices and max(parts) == 1:
            yield Problem(
                f"{_named(constraint)} asks for layer {layer.name!r} to be divided, stage {index} does not", Mark("inside", index)
            )
        elif not constraint.uneven:
            yield from _even(graph, constraint, number, stage, index)


def _parts_made(graph: Graph, stage: Stage, number: int) -> set[int]:
    """In how many parts a stage divides a layer; experts count, where there are any, with or without what divides the tensors beside."""
    layer = graph.layers[number]
    tensor = stage.lanes if number in stage.split else stage.tensor if layer.tensor_units > 1 else 1
    if not layer.experts:
        return {tensor}
    return {stage.lanes, tensor * stage.lanes} if stage.expert else {1}


def _even(graph: Graph, constraint: Constraint, number: int, stage: Stage, index: int) -> Iterator[Problem]:
    layer = graph.layers[number]
    for position, replica in enumerate(stage.replicas):
        if len(set(replica.tensor_shares)) > 1:
            yield Problem(f"{_named(constraint)} forbids unequal shares", Mark("shares", index, position))
    ways = [
        (stage.tensor if layer.tensor_units > 1 else 1, layer.tensor_units, "units", f"tensor={stage.tensor}"),
        (stage.lanes if number in stage.split else 1, layer.tensor_units, "units", f"{stage.lanes} lanes"),
        (stage.lanes if stage.expert and layer.experts else 1, layer.experts, "experts", f"{stage.lanes} lanes"),
    ]
    for parts, units, what, by in ways:
        if parts > 1 and units % parts:
            sentence = f"{_named(constraint)} forbids unequal shares, but layer {layer.name!r} has {units} {what} for {by}"
            yield Problem(sentence, Mark("inside", index))


def _replica(graph: Graph, number: int, constraint: Constraint, stage: Stage, index: int) -> Iterator[Problem]:
    here = range(stage.start, stage.stop)
    plain = _plain(graph, number)
    divided = [n for n in plain.intersection(here) if graph.layers[n].tensor_units > 1 and (stage.tensor > 1 or n in stage.split)]
    if divided:
        name = graph.layers[min(divided)].name
        yield Problem(f"{_named(constraint)} keeps layer {name!r} whole, stage {index} splits it", Mark("inside", index))
    if (plain or set(constraint.layers)).isdisjoint(here):
        return
    copies, exact = _copies(graph, number)
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
