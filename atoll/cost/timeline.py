"""The order of events in a step: a plan's replicas, routes and links are handed to the pipeline engines, and what they played comes back.

Where all columns of replicas are alike one column is walked; any other plan is played event by event, and more micro-batches than it is
worth playing are extrapolated from two shorter steps.
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from atoll.cost.in_flight import device_limits
from atoll.cost.pipeline import Hop, Worker, column_seconds, route, simulate
from atoll.cost.replica import ReplicaSeconds
from atoll.cost.setting import Setting
from atoll.cost.transfer import Flow, flow_between
from atoll.plan import Plan

__all__ = ["Played", "play"]

_SIMULATED_MICRO_BATCHES = 96  # more than this are extrapolated from two shorter steps
_NO_HOP = Hop(0.0, 0.0, -1)

Replicas = list[list[ReplicaSeconds]]  # by stage
Counts = list[list[int]]  # micro-batches of each replica, by stage


class Played(NamedTuple):
    """What each replica of each stage did in a step."""

    finish: list[list[float]]  # when it ended its last backward
    busy: list[list[float]]
    in_flight: list[list[int]]  # most micro-batches held at once


def play(setting: Setting, plan: Plan, replicas: Replicas, counts: Counts, with_hops: bool = True) -> Played:
    """Plays one step; without hops, as if tensors crossed between stages in no time."""
    if len(plan.stages) == 1:
        busy = [n * (r.forward + r.backward) for r, n in zip(replicas[0], counts[0], strict=True)]
        return Played([busy], [busy], [[max(counts[0]) if plan.schedule == "gpipe" else 1] * len(busy)])
    if _columns_alike(setting, plan, replicas, counts):
        return _play_column(setting, plan, replicas, counts, with_hops)
    return _play_events(setting, plan, replicas, counts, with_hops)


def _columns_alike(setting: Setting, plan: Plan, replicas: Replicas, counts: Counts) -> bool:
    width = len(counts[0])
    if plan.schedule == "interleaved" or any(len(row) != width for row in counts):
        return False
    if any(len(set(row)) > 1 for row in counts) or any(len(set(row)) > 1 for row in replicas):
        return False
    for here, there in zip(plan.stages, plan.stages[1:], strict=False):
        pairs = zip(here.replicas, there.replicas, strict=True)
        flows = [flow_between(setting, plan, here, a, there, b, True) for a, b in pairs]
        if len({(flow.bytes_per_s, flow.latency) for flow in flows}) > 1:
            return False
    return True


def _play_column(setting: Setting, plan: Plan, replicas: Replicas, counts: Counts, with_hops: bool) -> Played:
    stages, width, count = len(plan.stages), len(counts[0]), counts[0][0]
    forward = [row[0].forward for row in replicas]
    backward = [row[0].backward for row in replicas]
    onward = back = [_NO_HOP] * (stages - 1)
    if with_hops:
        onward, back = _column_hops(setting, plan, forward, backward)
    _, finish = column_seconds(forward, backward, onward, back, count, plan.schedule)
    busy = [count * (f + b) for f, b in zip(forward, backward, strict=True)]
    held = [count if plan.schedule == "gpipe" else min(count, stages - s) for s in range(stages)]
    return Played([[f] * width for f in finish], [[b] * width for b in busy], [[h] * width for h in held])


def _column_hops(setting: Setting, plan: Plan, forward: list[float], backward: list[float]) -> tuple[list[Hop], list[Hop]]:
    """Hops of the first column, each slowed by the flows that share its link; codec time is added to the sender's."""
    users: dict[tuple[str, ...], int] = {}
    firsts: list[tuple[int, bool, Flow]] = []
    for s, (here, there) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        for i, (a, b) in enumerate(zip(here.replicas, there.replicas, strict=True)):
            both = (flow_between(setting, plan, here, a, there, b, True), flow_between(setting, plan, there, b, here, a, False))
            for forth, flow in zip((True, False), both, strict=True):
                if flow.resource:
                    users[flow.resource] = users.get(flow.resource, 0) + 1
                if i == 0:
                    firsts.append((s, forth, flow))
    onward: list[Hop] = []
    back: list[Hop] = []
    for s, forth, flow in firsts:
        hop = Hop(flow.wire_bytes * users.get(flow.resource, 1) / flow.bytes_per_s, flow.latency, 0)
        if forth:
            onward.append(hop)
            forward[s] += flow.codec
        else:
            back.append(hop)
            backward[s + 1] += flow.codec
    return onward, back


def _play_events(setting: Setting, plan: Plan, replicas: Replicas, counts: Counts, with_hops: bool) -> Played:
    total = sum(counts[0])
    common = gcd(*(count for row in counts for count in row))
    unit = total // common
    pieces = max(1, -(-_SIMULATED_MICRO_BATCHES // unit))
    if common <= 2 * pieces:
        return _simulate(setting, plan, replicas, counts, with_hops)
    short = _simulate(setting, plan, replicas, [[count // common * pieces for count in row] for row in counts], with_hops)
    longer = _simulate(setting, plan, replicas, [[count // common * 2 * pieces for count in row] for row in counts], with_hops)
    steps = (common - 2 * pieces) / pieces

    def extended(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
        return [[y + (y - x) * steps for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

    return Played(extended(short.finish, longer.finish), extended(short.busy, longer.busy), longer.in_flight)


def _simulate(setting: Setting, plan: Plan, replicas: Replicas, counts: Counts, with_hops: bool) -> Played:
    groups: dict[tuple[str, ...], int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            groups.setdefault(replica.devices, len(groups))
    codec = [[[0.0, 0.0] for _ in row] for row in counts]
    hops = _event_hops(setting, plan, codec, with_hops)
    workers = [
        [
            Worker(r.forward + extra[0], r.backward + extra[1], groups[replica.devices])
            for r, extra, replica in zip(row, codec[s], plan.stages[s].replicas, strict=True)
        ]
        for s, row in enumerate(replicas)
    ]
    timeline = simulate(workers, [route(row) for row in counts], hops, plan.schedule, device_limits(plan, counts, groups))
    return Played(timeline.finish, timeline.busy, timeline.in_flight)


_Place = tuple[int, int, int, int]  # from stage and replica, to stage and replica


def _event_hops(setting: Setting, plan: Plan, codec: list[list[list[float]]], with_hops: bool) -> dict[_Place, Hop]:
    """Every hop a micro-batch may take; `codec` gets the most each replica spends on encoding, forward and backward."""
    hops: dict[_Place, Hop] = {}
    links: dict[tuple[str, ...], int] = {}
    for place, flow in _flows(setting, plan):
        link = links.setdefault(flow.resource, len(links)) if flow.resource else -1
        hops[place] = Hop(flow.wire_bytes / flow.bytes_per_s, flow.latency, link) if with_hops else _NO_HOP
        sender, is_gradient = codec[place[0]][place[1]], place[2] < place[0]
        sender[is_gradient] = max(sender[is_gradient], flow.codec)
    return hops


def _flows(setting: Setting, plan: Plan) -> Iterator[tuple[_Place, Flow]]:
    for s, (here, there) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        for i, a in enumerate(here.replicas):
            for j, b in enumerate(there.replicas):
                yield (s, i, s + 1, j), flow_between(setting, plan, here, a, there, b, True)
                yield (s + 1, j, s, i), flow_between(setting, plan, there, b, here, a, False)
