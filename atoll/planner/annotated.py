"""Plans for annotated graphs, in which every stage has the parallelism its own annotations ask for.

The broad search gives all stages of a plan the same parallelism inside and all the devices there are; `replica(2)` around one part and
`split(4)` around another need neither. Here boundaries are tried first (annotated stages, and where parts with different annotations meet),
then for each stage the shapes its replicas may have, then how many replicas, then which devices.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from math import gcd
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.graph import Graph
from atoll.plan import Plan
from atoll.plan.constraints import copies_asked
from atoll.plan.division import even_shares, split_units
from atoll.planner.balance import lane_samples
from atoll.planner.rules import Rules
from atoll.planner.timing import Inside

__all__ = ["annotated_plans", "shapes_of"]

_DEGREES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_STAGES = (2, 3, 4, 6, 8)  # that a model without annotated stages is cut into
_COMBINATIONS = 24  # of shapes for one row of boundaries
_FEW_EDGES = 4  # up to so many places where annotations meet, every subset of them is tried as boundaries


class Shape(NamedTuple):
    """Parallelism inside the replicas of a stage, and how many replicas there may be."""

    inside: Inside
    least: int
    step: int  # by which their number may grow; 0: not at all


class _Layout(NamedTuple):
    """Everything but shares of the batch."""

    bounds: tuple[int, ...]
    shapes: tuple[Shape, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]  # devices by stage and replica
    micro_batch_size: int


def annotated_plans(evaluator: Evaluator, rules: Rules, batch_size: int, sizes: Sequence[int]) -> Iterator[Plan]:
    """Plans that honour the annotations, unlike ones first; `sizes` are the micro-batches to try. Memory is for the caller to check."""
    layouts = list(_layouts(evaluator, rules, batch_size, sizes))
    seen: set[Plan] = set()
    for layout in _unlike_first(layouts):
        made = _plan(evaluator, rules, layout, batch_size)
        if made is not None and made not in seen and rules.allows(made):
            seen.add(made)
            yield made


def _unlike_first(layouts: list[_Layout]) -> Iterator[_Layout]:
    """Far apart ones before their neighbours, so that a caller who stops early has seen some of everything."""
    stride = 1
    while stride * 8 < len(layouts):
        stride *= 8
    done: set[int] = set()
    while stride:
        fresh = [i for i in range(0, len(layouts), stride) if i not in done]
        done.update(fresh)
        yield from (layouts[i] for i in fresh)
        stride //= 8


def _layouts(evaluator: Evaluator, rules: Rules, batch_size: int, sizes: Sequence[int]) -> Iterator[_Layout]:
    graph, names = evaluator.graph, [device.name for device in evaluator.cluster.devices]
    work = _work(graph)
    for bounds in _boundaries(graph, rules, len(names)):
        rows = [shapes_of(graph, rules, start, stop, len(names)) for start, stop in pairwise(bounds)]
        rows = [_cheapest(evaluator, start, stop, row, len(rows)) for (start, stop), row in zip(pairwise(bounds), rows, strict=True)]
        of_stage = [work[stop] - work[start] for start, stop in pairwise(bounds)]
        for shapes, micro in product(_combined(rows), sizes):
            most = [batch_size if rules.any_share(len(rows)) else batch_size // micro for _ in rows]
            for counts in _counts(shapes, of_stage, most, len(names)):
                for groups in _assignments(evaluator, shapes, counts):
                    yield _Layout(bounds, shapes, groups, micro)


def _boundaries(graph: Graph, rules: Rules, most: int) -> list[tuple[int, ...]]:
    """Rows of stage boundaries worth trying: those annotated, those where annotations meet, those of equal work."""
    last = len(graph.layers)
    bases: list[tuple[int, ...]] = [()]
    if rules.bounds is not None:
        bases = [rules.bounds[1:-1], _early_bounds(graph)]
    edges = _edges(graph, rules)
    some = [edges] if len(edges) > _FEW_EDGES else [part for n in range(len(edges) + 1) for part in combinations(edges, n)]
    even = [(), *(_even_cuts(graph, rules, stages) for stages in _STAGES)]
    found: dict[tuple[int, ...], None] = {}
    for base in bases:
        for more in [*some, *even]:
            row = (0, *sorted({*base, *more}), last)
            if len(row) - 1 <= most and all(_possible(graph, rules, a, b) for a, b in pairwise(row)):
                found.setdefault(row)
    return list(found)


def _possible(graph: Graph, rules: Rules, start: int, stop: int) -> bool:
    return rules.may_hold(start, stop) and copies_asked(graph, start, stop) is not None


def _early_bounds(graph: Graph) -> tuple[int, ...]:
    """Boundaries of annotated stages right after each, so that layers between two stages join the later one."""
    stages = sorted((c for c in graph.constraints if c.kind == "stage"), key=lambda c: min(c.layers))
    return tuple(min(cut for cut in graph.cuts if cut > max(here.layers)) for here in stages[:-1])


def _edges(graph: Graph, rules: Rules) -> tuple[int, ...]:
    """Legal cuts next to where a replica or a split begins or ends."""
    places = {edge for c in graph.constraints if c.kind in ("replica", "split") for edge in (min(c.layers), max(c.layers) + 1)}
    return tuple(sorted(cut for cut in rules.cuts if cut in places))


def _work(graph: Graph) -> list[float]:
    """Prefix sum over layers of what takes time; a layer without any counts a little, so that sums differ."""
    return list(accumulate((1.0 + sum(w.flops * w.count * (1 + w.backward) for w in layer.work) for layer in graph.layers), initial=0.0))


def _even_cuts(graph: Graph, rules: Rules, stages: int) -> tuple[int, ...]:
    done = _work(graph)
    nearest = (min(rules.cuts, key=lambda cut: abs(done[cut] - done[-1] * s / stages), default=0) for s in range(1, stages))
    return tuple(sorted({cut for cut in nearest if cut}))


def shapes_of(graph: Graph, rules: Rules, start: int, stop: int, devices: int) -> list[Shape]:
    """What the replicas of a stage of these layers may look like on so many devices."""
    asked = copies_asked(graph, start, stop)
    if asked is None:
        return []
    copies, exact = asked
    found = []
    for whole in _insides(graph, rules, start, stop, devices):
        inside = whole._replace(tensor_shares=even_shares(split_units(graph.layers[start:stop]), whole.tensor) or ())
        if exact and copies % inside.lanes:
            continue
        least = copies // inside.lanes if exact else copies // gcd(copies, inside.lanes)
        if least * inside.size <= devices and _honours(rules, inside, start, stop, least):
            found.append(Shape(inside, least, 0 if exact else least))
    return found


def _honours(rules: Rules, inside: Inside, start: int, stop: int, replicas: int) -> bool:
    stage = inside.stage(start, stop, (inside.replica(("",) * inside.size),) * replicas, False)
    return rules.allows_stage(stage) and rules.divides(stage)


def _insides(graph: Graph, rules: Rules, start: int, stop: int, devices: int) -> Iterator[Inside]:
    """Every parallelism inside a replica that the degrees allow."""
    degrees = [n for n in sorted({*_DEGREES, *rules.counts}) if n <= devices]
    experts = any(layer.experts for layer in graph.layers[start:stop])
    split = tuple(layer for layer in rules.split if start <= layer < stop)
    for tensor in degrees:
        yield Inside(tensor)
        for lanes in (n for n in degrees if 1 < n <= devices // tensor):
            for sharded in (False, True):
                if sharded:
                    yield Inside(tensor, lanes, sharded=True)
                if experts:
                    yield Inside(tensor, lanes, sharded=sharded, expert=True)
                if split and tensor == 1:
                    yield Inside(1, lanes, sharded=sharded, split=split)
                if split and experts and tensor == 1:
                    yield Inside(1, lanes, sharded=sharded, expert=True, split=split)


def _cheapest(evaluator: Evaluator, start: int, stop: int, row: list[Shape], stages: int) -> list[Shape]:
    """The shapes that cost the fewest device-seconds a sample (the more stages, the fewer of them), and the one with fewest devices."""
    devices = evaluator.cluster.devices
    roomiest = max(devices, key=lambda device: device.memory_bytes)

    def price(shape: Shape) -> tuple[bool, float]:
        inside = shape.inside
        replica = inside.replica(tuple(device.name for device in devices[: inside.size]))
        stage = inside.stage(start, stop, (replica,), True)
        seconds = evaluator.replica_seconds(replace(stage, recompute=False), replica, float(inside.lanes))
        held = evaluator.device_memory(stage, inside.fraction, 1.0, 1, inside.lanes, roomiest.kind.cpu)
        over = held.total_bytes > roomiest.memory_bytes
        return over, (seconds.forward + seconds.backward) * inside.size / inside.lanes

    best = sorted(row, key=price)
    return list(dict.fromkeys([*best[: {1: 12, 2: 6}.get(stages, 4)], *sorted(best, key=_devices)[:1]]))


def _devices(shape: Shape) -> int:
    return shape.least * shape.inside.size


def _combined(rows: Sequence[list[Shape]]) -> list[tuple[Shape, ...]]:
    """One shape a stage: all combinations where they are few, else those of one place in the order, and the smallest with one other."""
    total = 1
    for row in rows:
        total *= len(row)
    if total <= _COMBINATIONS:
        return list(product(*rows))
    alike = [tuple(row[min(place, len(row) - 1)] for row in rows) for place in range(max(map(len, rows)))]
    smallest = [min(row, key=_devices) for row in rows]
    single = [(*smallest[:s], shape, *smallest[s + 1 :]) for s, row in enumerate(rows) for shape in row]
    return list(dict.fromkeys([tuple(smallest), *alike, *single]))[: 2 * _COMBINATIONS]


def _counts(shapes: Sequence[Shape], work: Sequence[float], most: Sequence[int], devices: int) -> Iterator[tuple[int, ...]]:
    """Replicas of each stage: as few as there may be, and as many as devices allow, where the work is."""
    counts = [shape.least for shape in shapes]
    free = devices - sum(count * shape.inside.size for count, shape in zip(counts, shapes, strict=True))
    if free < 0 or any(count > limit for count, limit in zip(counts, most, strict=True)):
        return
    yield tuple(counts)
    grown = list(counts)
    while True:
        can = [s for s, x in enumerate(shapes) if x.step and x.step * x.inside.size <= free and grown[s] + x.step <= most[s]]
        if not can:
            break
        s = max(can, key=lambda s: work[s] / (grown[s] * shapes[s].inside.size))
        grown[s] += shapes[s].step
        free -= shapes[s].step * shapes[s].inside.size
    if grown != counts:
        yield tuple(grown)


def _assignments(evaluator: Evaluator, shapes: Sequence[Shape], counts: Sequence[int]) -> Iterator[tuple[tuple[tuple[str, ...], ...], ...]]:
    """Devices in their order, or the fastest first; stage after stage, or where stages have as many replicas, column after column."""
    devices = evaluator.cluster.devices
    precision = evaluator.graph.precision
    fastest = sorted(devices, key=lambda device: -device.kind.peak(precision) * device.speed)
    seen = set()
    for order in (devices, fastest):
        names = [device.name for device in order]
        ways = [[(s, i) for s, count in enumerate(counts) for i in range(count)]]
        if len(set(counts)) == 1 and len(counts) > 1:
            ways.append([(s, i) for i in range(counts[0]) for s in range(len(counts))])
        for way in ways:
            groups: list[list[tuple[str, ...]]] = [[] for _ in counts]
            taken = 0
            for s, _ in way:
                size = shapes[s].inside.size
                groups[s].append(tuple(names[taken : taken + size]))
                taken += size
            found = tuple(tuple(row) for row in groups)
            if found not in seen:
                seen.add(found)
                yield found


def _plan(evaluator: Evaluator, rules: Rules, layout: _Layout, batch_size: int) -> Plan | None:
    """The layout with shares by speed, recomputing only where it would not fit otherwise; None where shares cannot be."""
    stages = []
    for (start, stop), shape, groups in zip(pairwise(layout.bounds), layout.shapes, layout.groups, strict=True):
        inside, micro = shape.inside, layout.micro_batch_size
        bare = inside.stage(start, stop, tuple(inside.replica(group) for group in groups), False)
        seconds = [evaluator.replica_seconds(bare, replica, float(micro)) for replica in bare.replicas]
        speeds = [1.0 / (each.forward + each.backward) for each in seconds]
        rows = lane_samples(batch_size, micro, inside.lanes, speeds, rules.any_share(len(layout.shapes)))
        if rows is None:
            return None
        shared = (replace(replica, samples=samples) for replica, samples in zip(bare.replicas, rows, strict=True))
        stages.append(replace(bare, replicas=tuple(shared)))
    plan = rules.make_plan(evaluator.cluster, batch_size, layout.micro_batch_size, stages)
    if evaluator.fits(plan):
        return plan
    return replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
