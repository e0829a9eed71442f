"""Drafts: a plan before its cuts and shares, and the step that works those out.

A draft says which slots serve which stage, what is parallel inside them, the micro-batch and the schedule. `complete` balances cuts and
shares, decides where to recompute, and gives a whole Plan together with a bound that no cuts or shares of this draft can beat.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.plan import CodecName, Plan, Replica, Schedule, Stage
from atoll.plan.division import even_shares, split_units
from atoll.planner.arrange import Slot
from atoll.planner.balance import balanced_cuts, lane_samples
from atoll.planner.rules import Rules
from atoll.planner.timing import Inside, Prefix, SlotTimes

__all__ = ["TOO_FEW", "Draft", "Drafted", "complete", "with_names"]

TOO_FEW = "fewer micro-batches than replicas"  # why nothing comes of a draft


class Draft(NamedTuple):
    """What is decided before cuts and shares."""

    inside: Inside
    stages: tuple[tuple[Slot, ...], ...]
    micro_batch_size: int
    recompute: bool
    schedule: Schedule = "1f1b"


class Drafted(NamedTuple):
    """A draft with its cuts, and an estimate of its step made of the parts that matter most."""

    draft: Draft
    bounds: tuple[int, ...]
    estimate: float


def complete(draft: Draft, timing: SlotTimes, rules: Rules, batch_size: int) -> Drafted | str:
    """Balances the cuts; a sentence saying why where nothing fits."""
    micro_batches = -(-batch_size // draft.micro_batch_size)
    free = rules.any_share(len(draft.stages))
    if (batch_size // draft.inside.lanes if free else micro_batches) < max(len(stage) for stage in draft.stages):
        return TOO_FEW
    kinds = [Counter(slot.kind for slot in stage) for stage in draft.stages]
    bounds = _bounds(draft, timing, rules, kinds, batch_size)
    if isinstance(bounds, str):
        return bounds
    times = [_slot_times(draft, timing, stage, batch_size) for stage in draft.stages]
    return Drafted(draft, tuple(bounds), _estimate(draft, timing, bounds, times, kinds, micro_batches))


def _bounds(draft: Draft, timing: SlotTimes, rules: Rules, kinds: Sequence[Counter[int]], batch_size: int) -> Sequence[int] | str:
    fits = _memory_check(draft, timing, rules, -(-batch_size // draft.micro_batch_size), batch_size)
    if rules.bounds is not None:
        return rules.bounds if all(fits(s, a, b) for s, (a, b) in enumerate(pairwise(rules.bounds))) else "out of memory"
    ends = (*rules.cuts, len(timing.evaluator.graph.layers))
    if len(ends) < len(draft.stages):
        return "more stages than cuts"
    micro = _micro_samples(draft, batch_size)
    firsts = {slot.kind: slot for stage in draft.stages for slot in stage[::-1]}
    prefixes = [timing.together({kind: firsts[kind] for kind in row}, row, draft.inside, micro, draft.recompute) for row in kinds]
    bounds = balanced_cuts(ends, prefixes)
    if bounds is not None and not all(fits(s, a, b) for s, (a, b) in enumerate(pairwise(bounds))):
        bounds = balanced_cuts(ends, prefixes, fits)
    return bounds if bounds is not None else "out of memory"


def _slot_times(draft: Draft, timing: SlotTimes, stage: Sequence[Slot], batch_size: int) -> dict[int, Prefix]:
    micro = _micro_samples(draft, batch_size)
    first = {slot.kind: slot for slot in reversed(stage)}
    return {kind: timing.slot(slot, draft.inside, micro, draft.recompute) for kind, slot in first.items()}


def _micro_samples(draft: Draft, batch_size: int) -> float:
    """Samples of a micro-batch; with one stage a replica's share may be less."""
    if len(draft.stages) > 1:
        return float(draft.micro_batch_size)
    return min(float(draft.micro_batch_size), batch_size / len(draft.stages[0]))


def _memory_check(draft: Draft, timing: SlotTimes, rules: Rules, micro_batches: int, batch_size: int) -> Callable[[int, int, int], bool]:
    inside = draft.inside
    under_way = rules.execution.under_way_per_worker * sum(map(len, draft.stages))
    ahead = 0
    held: list[int] = []
    for stage in reversed(draft.stages):
        ahead += len(stage)
        even = max(ceil(ahead / len(stage)), ceil(under_way / len(stage)) if held else 0)  # the last stage goes back at once
        held.append(min(micro_batches, even) if draft.schedule != "gpipe" else ceil(micro_batches / len(stage)))
    held.reverse()
    samples = draft.micro_batch_size / inside.lanes
    if len(draft.stages) == 1:
        held = [1] if draft.schedule != "gpipe" else held
        samples = min(samples, batch_size / len(draft.stages[0]) / inside.lanes)
    limits = []
    for stage in draft.stages:
        devices = [timing.classes[kind].device for kind in {slot.kind for slot in stage}]
        tightest = min(devices, key=lambda device: device.memory_bytes)
        limits.append((timing.memory(inside, draft.recompute, tightest.kind.cpu), tightest.memory_bytes))

    def fits(s: int, start: int, stop: int) -> bool:
        memory, limit = limits[s]
        return memory.of(start, stop, held[s] * samples, samples) <= limit

    return fits


def _estimate(
    draft: Draft,
    timing: SlotTimes,
    bounds: Sequence[int],
    times: Sequence[dict[int, Prefix]],
    kinds: Sequence[Counter[int]],
    micro_batches: int,
) -> float:
    """The longer of the bottleneck stage and the busiest link between sites; filling and draining the pipeline; synchronisation."""
    busiest, fill, longest = 0.0, 0.0, 0.0
    for s, (start, stop) in enumerate(pairwise(bounds)):
        rate = sum(number / (times[s][kind][stop] - times[s][kind][start]) for kind, number in kinds[s].items())
        alone = min((times[s][kind][stop] - times[s][kind][start]) for kind in kinds[s])
        count = micro_batches if len(draft.stages) > 1 else max(micro_batches, len(draft.stages[0]))
        busiest = max(busiest, count / rate)
        longest = max(longest, alone)
        fill += alone
    crossing, latency = _crossings(draft, timing, bounds, micro_batches)
    sync = 0.0
    for s, (start, stop) in enumerate(pairwise(bounds)):
        for across, nbytes in timing.evaluator.sync_volumes(_bare_stage(draft, start, stop)):
            sync = max(sync, _sync_seconds(timing.evaluator, draft, timing, s, nbytes, across))
    return max(busiest, crossing) + fill - longest + latency + sync


def _crossings(draft: Draft, timing: SlotTimes, bounds: Sequence[int], micro_batches: int) -> tuple[float, float]:
    """Seconds the busiest link between sites carries activations (one way), and the latencies on the way there and back."""
    evaluator = timing.evaluator
    carried: dict[tuple[str, str], float] = {}
    latency = 0.0
    for s, stop in enumerate(bounds[1:-1]):
        here, there = ({timing.classes[slot.kind].device.site: slot for slot in draft.stages[k]} for k in (s, s + 1))
        apart = set(here) - set(there)
        if not apart:
            continue
        a, b = (evaluator.devices[slots[site].devices[0]] for slots, site in ((here, next(iter(apart))), (there, next(iter(there)))))
        link = evaluator.cluster.link_between(a, b)
        share = len(apart) / len(here)
        nbytes = evaluator.graph.layers[stop - 1].output_bytes * draft.micro_batch_size * micro_batches * share * timing.wan_ratio
        carried[link.between] = carried.get(link.between, 0.0) + nbytes / (link.bytes_per_s * evaluator.calibration.network_efficiency)
        latency += 2 * link.latency_s
    return max(carried.values(), default=0.0), latency


def _sync_seconds(evaluator: Evaluator, draft: Draft, timing: SlotTimes, s: int, nbytes: float, across: bool) -> float:
    slots = draft.stages[s]
    members = len(slots) * (draft.inside.lanes if across else 1)
    if members < 2 or not nbytes:
        return 0.0
    devices = [timing.classes[kind].device for kind in {slot.kind for slot in slots}]
    sites = {device.site for device in devices}
    cluster = evaluator.cluster
    if len(sites) > 1:
        crossing = sum(len({timing.classes[slot.kind].device.site for slot in stage}) > 1 for stage in draft.stages)
        rate = min(cluster.link_between(a, b).bytes_per_s for a in devices for b in devices if a.site != b.site)
        carried = nbytes * draft.inside.size * crossing  # a ring sends each byte about once each way
        return carried / (rate * evaluator.calibration.network_efficiency)
    hosts = {evaluator.devices[slot.devices[0]].host for slot in slots[:64]}
    if len(hosts) > 1:
        network = next(site.link for site in cluster.sites if site.name in sites)
        return 2 * nbytes * draft.inside.tensor / (network.bytes_per_s * evaluator.calibration.network_efficiency)
    return 2 * nbytes / (cluster.link_between(devices[0], devices[0]).bytes_per_s * evaluator.calibration.host_link_efficiency)


def _bare_stage(draft: Draft, start: int, stop: int) -> Stage:
    """A stage with one replica, to ask what its devices hold."""
    return draft.inside.stage(start, stop, (draft.inside.replica(draft.stages[0][0].devices),), draft.recompute)


def with_names(drafted: Drafted, timing: SlotTimes, rules: Rules, batch_size: int, codecs: dict[str, CodecName]) -> Plan | None:
    """The whole plan: shares balanced by speed, recomputation only where memory asks for it. None where shares cannot be."""
    draft, bounds = drafted.draft, drafted.bounds
    evaluator = timing.evaluator
    stages = []
    for s, (start, stop) in enumerate(pairwise(bounds)):
        slots = draft.stages[s]
        times = _slot_times(draft, timing, slots, batch_size)
        speeds = [1.0 / (times[slot.kind][stop] - times[slot.kind][start]) for slot in slots]
        divided = even_shares(split_units(evaluator.graph.layers[start:stop]), draft.inside.tensor)
        rows = lane_samples(batch_size, draft.micro_batch_size, draft.inside.lanes, speeds, rules.any_share(len(draft.stages)))
        if rows is None or divided is None:
            return None
        pairs = zip(slots, rows, strict=True)
        replicas = tuple(Replica(devices=slot.devices, samples=samples, tensor_shares=divided) for slot, samples in pairs)
        has_experts = any(layer.experts for layer in evaluator.graph.layers[start:stop])
        inside = draft.inside if has_experts else draft.inside._replace(expert=False)
        stages.append(inside.stage(start, stop, replicas, draft.recompute))
    plan = rules.make_plan(evaluator.cluster, batch_size, draft.micro_batch_size, stages, draft.schedule)
    return replace(plan, codecs=codecs)
