"""Baselines: what anyone would try by hand, so that no search ever does worse.

For every natural group of devices — all, each site, host and kind, one device of a kind: data parallelism, sharded over the group or
inside its hosts; tensors split inside hosts; pipelines of equally many layers, alone and with either. Shares are equal or in proportion to
speed. A plan is priced only if what its busiest replica computes leaves hope that it is faster than the best one known.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cluster import Device
from atoll.cost import Evaluator
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import even_shares, split_units
from atoll.plan.modes import ModeRules, default_rules
from atoll.planner.balance import shares
from atoll.planner.rules import Rules
from atoll.planner.search import Found, Tally

__all__ = ["baselines", "best_baselines"]

_ROUNDS = (1, 2, 3, 4, 6, 8, 16)
_MOST_DIVISORS = 12  # of the batch that are tried as micro-batches of a pipeline
Group = tuple[Device, ...]
Speed = Callable[[Device], float]
_Divide = Callable[[int, Sequence[float]], list[int] | None]


class _Layout(NamedTuple):
    """Everything but shares and micro-batches."""

    bounds: tuple[int, ...]
    tensor: int
    sharded: bool
    stages: tuple[tuple[Group, ...], ...]  # devices by stage and replica


def best_baselines(evaluator: Evaluator, rules: Rules, batch_size: int, known: float, budget: int, tally: Tally) -> list[Found]:
    """Those faster than `known` seconds, recomputing where they would not fit otherwise; at most `budget` are priced.

    Always the one next that promises most: by what it computes, then, once that was the least, by its synchronisation too.
    """
    drawn = (replace(plan, codecs=dict(rules.codecs)) for plan in baselines(evaluator, batch_size, rules.execution))
    plans = [plan for plan in dict.fromkeys(drawn) if rules.allows(plan)]
    queue = [(_least_seconds(evaluator, plan, [0.0] * len(plan.stages)), False, number) for number, plan in enumerate(plans)]
    heapq.heapify(queue)
    found: list[Found] = []
    while queue and queue[0][0] < known and budget:
        _, settled, number = heapq.heappop(queue)
        plan = plans[number]
        if not settled:
            heapq.heappush(queue, (_least_seconds(evaluator, plan, evaluator.sync_seconds(plan)), True, number))
        elif (fitting := _fitting(evaluator, plan)) is None:
            tally.ruled_out["out of memory"] += 1
        else:
            budget -= 1
            tally.priced += 1
            found.append(Found(evaluator.seconds(fitting), fitting))
            known = min(known, found[-1].seconds)
    tally.ruled_out["simple, and slower at best" if budget else "a worse bound than those priced"] += len(queue)
    return sorted(found, key=lambda one: one.seconds)


def baselines(evaluator: Evaluator, batch_size: int, mode: ModeRules | None = None) -> Iterator[Plan]:
    """The plans of a mode (the default one, if none is given), none of which recomputes; some may not fit."""
    mode = mode or default_rules()
    for group in _groups(evaluator.cluster.devices):
        speeds = _speeds(evaluator, group, batch_size)
        for layout in _layouts(evaluator, group):
            if mode.whole_stages and (layout.sharded or layout.tensor > 1):
                continue
            any_share = len(layout.stages) == 1 and not mode.whole_micro_batches
            for micro in _micro_batches(layout, batch_size, any_share):
                for speed in speeds:
                    for stages in _with_shares(evaluator, layout, batch_size, 1 if any_share else micro, speed):
                        yield from _plans(evaluator, batch_size, micro, stages, mode)


def _fitting(evaluator: Evaluator, plan: Plan) -> Plan | None:
    again = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    return next((candidate for candidate in (plan, again) if evaluator.fits(candidate)), None)


def _least_seconds(evaluator: Evaluator, plan: Plan, sync: Sequence[float]) -> float:
    """What the busiest replica computes, behind the stages before it, and what its backward does not hide of the synchronisation."""
    worst, forward, both = 0.0, 0.0, 0.0
    for stage, agreeing in zip(plan.stages, sync, strict=True):
        busy, fastest, backward = 0.0, (float("inf"), float("inf")), 0.0
        for replica in stage.replicas:
            rounds = -(-replica.total_samples // plan.micro_batch_size)
            size = replica.total_samples / rounds if len(plan.stages) == 1 else float(plan.micro_batch_size)
            seconds = evaluator.replica_seconds(stage, replica, size)
            busy = max(busy, rounds * (seconds.forward + seconds.backward))
            fastest = min(fastest, (seconds.forward, seconds.backward))
            backward = max(backward, seconds.backward)
        exposed = max(0.0, agreeing - evaluator.calibration.sync_overlap * backward)
        worst = max(worst, both + busy, forward + busy + exposed)
        forward, both = forward + fastest[0], both + sum(fastest)
    return worst


def _groups(devices: Sequence[Device]) -> list[Group]:
    found: dict[Group, None] = {tuple(devices): None}
    keys: tuple[Callable[[Device], tuple[object, ...]], ...] = (
        lambda device: (device.site,),
        lambda device: (device.host,),
        lambda device: (device.kind.name, device.speed),
        lambda device: (device.host, device.kind.name, device.speed),
    )
    for key in keys:
        groups: dict[object, list[Device]] = {}
        for device in devices:
            groups.setdefault(key(device), []).append(device)
        found.update(dict.fromkeys(tuple(members) for members in groups.values()))
        found.update(dict.fromkeys((members[0],) for members in groups.values()))
    return list(found)


def _speeds(evaluator: Evaluator, group: Group, batch_size: int) -> list[Speed]:
    """Notions of speed: all alike, by peak FLOPS, and samples a second of a device on its own, with few samples and with its share."""
    precision, layers = evaluator.graph.precision, len(evaluator.graph.layers)

    def alone(device: Device, samples: float) -> float:
        replica = Replica(devices=(device.name,), samples=(1,))
        seconds = evaluator.replica_seconds(Stage(start=0, stop=layers, replicas=(replica,)), replica, samples)
        return samples / (seconds.forward + seconds.backward)

    share = max(1.0, batch_size / len(group))
    if len({(device.kind.name, device.speed) for device in group}) == 1:
        return [lambda device: 1.0]
    return [
        lambda device: 1.0,
        lambda device: device.kind.peak(precision) * device.speed,
        lambda device: alone(device, 1.0),
        lambda device: alone(device, share),
    ]


def _layouts(evaluator: Evaluator, group: Group) -> Iterator[_Layout]:
    layers = len(evaluator.graph.layers)
    hosts = tuple(tuple(members) for _, members in groupby(group, lambda device: device.host))
    if len(group) > 1:
        yield _Layout((0, layers), 1, True, ((group,),))
    if len(hosts) > 1 and len(hosts[0]) > 1 and len({len(host) for host in hosts}) == 1:
        yield _Layout((0, layers), 1, True, (hosts,))
    for tensor in range(1, max(map(len, hosts)) + 1):
        slots = [host[i : i + tensor] for host in hosts for i in range(0, len(host) - tensor + 1, tensor)]
        for stages in (n for n in range(1, min(len(slots), layers) + 1) if len(slots) % n == 0):
            bounds = _even_bounds(evaluator, stages)
            if bounds is None or even_shares(split_units(evaluator.graph.layers), tensor) is None:
                continue
            each = len(slots) // stages
            beside = tuple(tuple(slots[s * each : (s + 1) * each]) for s in range(stages))
            across = tuple(tuple(slots[s::stages]) for s in range(stages))
            for way in dict.fromkeys((beside, across)):
                yield _Layout(bounds, tensor, False, way)


def _even_bounds(evaluator: Evaluator, stages: int) -> tuple[int, ...] | None:
    """Boundaries of stages of equally many layers, or the legal cuts next to them; None where there are too few."""
    layers, cuts = len(evaluator.graph.layers), evaluator.graph.cuts
    inner = {min(cuts, key=lambda cut: abs(cut - layers * s // stages), default=0) for s in range(1, stages)}
    return (0, *sorted(inner), layers) if len(inner) == stages - 1 and 0 not in inner else None


def _micro_batches(layout: _Layout, batch_size: int, any_share: bool) -> list[int]:
    if not any_share:
        divisors = [size for size in range(1, min(batch_size, 4096) + 1) if batch_size % size == 0]
        return divisors[:_MOST_DIVISORS]
    share = -(-batch_size // len(layout.stages[0]))
    return sorted({-(-share // rounds) for rounds in _ROUNDS} | {batch_size}, reverse=True)


def _with_shares(evaluator: Evaluator, layout: _Layout, batch_size: int, unit: int, speed: Speed) -> Iterator[tuple[Stage, ...]]:
    """Shares, in whole units, that keep the slowest busy the least, and shares rounded from the proportion, which leave slow lanes idle."""
    for divide in (shares, _rounded):
        stages = []
        for (start, stop), groups in zip(pairwise(layout.bounds), layout.stages, strict=True):
            units = split_units(evaluator.graph.layers[start:stop])
            counts = divide(batch_size // unit, [sum(map(speed, group)) for group in groups])
            pairs = zip(groups, counts or (), strict=False)
            replicas = [_replica(layout, units, group, count * unit, speed, divide) for group, count in pairs]
            if not replicas or None in replicas:
                break
            stages.append(
                Stage(start=start, stop=stop, replicas=tuple(r for r in replicas if r), tensor=layout.tensor, sharded=layout.sharded)
            )
        else:
            yield tuple(stages)


def _replica(layout: _Layout, units: list[int], group: Group, samples: int, speed: Speed, divide: _Divide) -> Replica | None:
    speeds = [speed(device) for device in group]
    lanes = divide(samples, speeds) if layout.sharded else [samples]
    parts = even_shares(units, layout.tensor) if len(set(speeds)) == 1 or not units else divide(gcd(*units), speeds)
    if not samples or lanes is None or (layout.tensor > 1 and (parts is None or 0 in parts)):
        return None
    names = tuple(device.name for device in group)
    return Replica(devices=names, samples=tuple(lanes), tensor_shares=tuple(parts or ()) if layout.tensor > 1 else ())


def _rounded(total: int, speeds: Sequence[float]) -> list[int]:
    """In proportion to speed, rounded down, what is left one by one to the fastest; some may get nothing."""
    found = [int(total * speed / sum(speeds)) for speed in speeds]
    for place in sorted(range(len(speeds)), key=lambda i: -speeds[i])[: total - sum(found)]:
        found[place] += 1
    return found


def _plans(evaluator: Evaluator, batch_size: int, micro: int, stages: tuple[Stage, ...], mode: ModeRules) -> list[Plan]:
    graph, cluster = evaluator.graph.name, evaluator.cluster.name
    plan = Plan(graph=graph, cluster=cluster, batch_size=batch_size, micro_batch_size=micro, stages=stages, mode=mode.name)
    return [replace(plan, schedule=schedule) for schedule in mode.schedules] if len(stages) > 1 else [plan]
