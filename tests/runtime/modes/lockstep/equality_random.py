"""Plans drawn by a seed: any that the rules allow, of up to four devices."""

import random

from atoll.errors import PlanError
from atoll.graph.graph import Graph
from atoll.plan import Plan, Replica, Stage, validate

DEVICES = "abcd"
_TRIES = 2000


def random_plan(graph: Graph, batch_size: int, seed: int) -> Plan:
    """The first valid plan of those that the seed draws."""
    draw = random.Random(seed)
    for _ in range(_TRIES):
        plan = _draw_plan(graph, batch_size, draw)
        try:
            validate(plan, graph)
        except PlanError:
            continue
        return plan
    raise AssertionError(f"seed {seed} found no valid plan of {graph.name}")


def _draw_plan(graph: Graph, batch_size: int, draw: random.Random) -> Plan:
    world = draw.choice([2, 3, 4, 4])
    micro_batch = draw.choice([1, 2, 2, 3, 4, batch_size])
    groups = _parts(world, draw.randint(1, world), draw)
    devices = iter(DEVICES)
    named = [[next(devices) for _ in range(size)] for size in groups]
    schedule = draw.choice(["1f1b", "gpipe"])
    rounds = 1
    if len(named) > 1 and draw.random() < 0.25:
        schedule, rounds = "interleaved", 2
    cuts = sorted(graph.cuts)
    count = len(named) * rounds
    if count - 1 > len(cuts):
        count, rounds, named = 1, 1, [list(DEVICES[:world])]
    bounds = [0, *sorted(draw.sample(cuts, count - 1)), len(graph.layers)]
    shapes = [_draw_shape(names, batch_size, micro_batch, draw, whole=count > 1) for names in named]
    stages = []
    for index in range(count):
        tensor, replicas = shapes[index % len(named)]
        stages.append(_draw_stage(graph, bounds[index], bounds[index + 1], tensor, replicas, draw))
    return Plan(
        graph=graph.name,
        cluster="c",
        batch_size=batch_size,
        micro_batch_size=micro_batch,
        schedule=schedule,  # type: ignore[arg-type]
        stages=tuple(stages),
    )


def _parts(total: int, count: int, draw: random.Random) -> list[int]:
    cuts = sorted(draw.sample(range(1, total), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _draw_shape(names: list[str], batch: int, micro: int, draw: random.Random, *, whole: bool) -> tuple[int, tuple[Replica, ...]]:
    """How a stage's devices are grouped: replicas × lanes × tensor, with shares of the batch."""
    replicas = draw.choice([n for n in range(1, len(names) + 1) if len(names) % n == 0])
    each = len(names) // replicas
    tensor = draw.choice([n for n in range(1, each + 1) if each % n == 0])
    lanes = each // tensor
    units = -(-batch // micro) if whole else batch
    if units < replicas:
        replicas, each, tensor, lanes, names = 1, 1, 1, 1, names[:1]
    shares = _parts(units, replicas, draw)
    totals = [share * micro for share in shares] if whole else shares
    if whole:
        totals[draw.randrange(replicas)] -= sum(totals) - batch
    made = []
    for index, total in enumerate(totals):
        samples = _parts(total, lanes, draw) if total >= lanes else [total] + [0] * (lanes - 1)
        if draw.random() < 0.5 and total >= lanes:
            samples = [total // lanes + (i < total % lanes) for i in range(lanes)]
        given = draw.choice([(), tuple(draw.choice([1, 1, 2, 3]) for _ in range(tensor))]) if tensor > 1 else ()
        made.append(Replica(devices=tuple(names[index * each : (index + 1) * each]), samples=tuple(samples), tensor_shares=given))
    return tensor, tuple(made)


def _draw_stage(graph: Graph, start: int, stop: int, tensor: int, replicas: tuple[Replica, ...], draw: random.Random) -> Stage:
    lanes = len(replicas[0].devices) // tensor
    experts = any(graph.layers[i].experts for i in range(start, stop))
    divisible = [i for i in range(start, stop) if graph.layers[i].tensor_units >= lanes and graph.layers[i].tensor_units > 1]
    return Stage(
        start=start,
        stop=stop,
        replicas=replicas,
        tensor=tensor,
        sharded=lanes > 1 and draw.random() < 0.4,
        expert=lanes > 1 and experts and draw.random() < 0.6,
        recompute=draw.random() < 0.3,
        split=tuple(sorted(draw.sample(divisible, draw.randint(1, len(divisible)))))
        if lanes > 1 and tensor == 1 and divisible and draw.random() < 0.25
        else (),
    )
