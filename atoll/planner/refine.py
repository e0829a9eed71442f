"""Local moves on whole plans, priced in full: what balance by rule leaves on the table."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.plan import CodecName, Plan, Replica, Stage
from atoll.plan.modes import mode_rules
from atoll.planner.balance import lane_samples
from atoll.planner.rules import Rules
from atoll.planner.search import Found, Tally

__all__ = ["climb", "reshared"]

_FEW_REPLICAS = 48  # above this many, moving a single replica is too small a step to be worth pricing


def climb(start: Found, evaluator: Evaluator, rules: Rules, codecs: Mapping[str, Sequence[CodecName]], prices: int, tally: Tally) -> Found:
    """Takes the first move that helps until none does, or so many were priced. The plan returned fits and is never slower."""
    best: Found | None = start
    while best is not None:
        start = best
        best = None
        for candidate in _moves(start.plan, evaluator, rules, codecs):
            if not rules.allows(candidate):
                continue
            if prices == 0:
                break
            prices -= 1
            seconds = evaluator.seconds(candidate)
            if seconds < start.seconds * (1 - 1e-6):
                if evaluator.fits(candidate):
                    tally.priced += 1
                    best = Found(seconds, candidate)
                    break
                tally.ruled_out["out of memory"] += 1
            else:
                tally.priced += 1
    return start


def _moves(plan: Plan, evaluator: Evaluator, rules: Rules, codecs: Mapping[str, Sequence[CodecName]]) -> Iterator[Plan]:
    yield from _shifted_cuts(plan, rules)
    yield from _moved_shares(plan, evaluator)
    yield from _less_recomputation(plan)
    if len(rules.micro_batches) != 1:
        yield from _other_micro_batches(plan, evaluator)
    yield from _other_schedules(plan)
    yield from _other_codecs(plan, codecs)
    if sum(len(stage.replicas) for stage in plan.stages) <= _FEW_REPLICAS:
        yield from _moved_replicas(plan, evaluator)
        yield from _added_replicas(plan, evaluator)
        yield from _regrouped(plan)


def _any_share(plan: Plan) -> bool:
    """Whether replicas may take any number of samples; others take whole micro-batches."""
    return len(plan.stages) == 1 and not mode_rules(plan.mode).whole_micro_batches


def _with_stages(plan: Plan, changed: Mapping[int, Stage]) -> Plan:
    return replace(plan, stages=tuple(changed.get(s, stage) for s, stage in enumerate(plan.stages)))


def _shifted_cuts(plan: Plan, rules: Rules) -> Iterator[Plan]:
    cuts = rules.cuts
    for s, (here, there) in enumerate(pairwise(plan.stages)):
        place = cuts.index(here.stop)
        for other in (place - 1, place + 1):
            if 0 <= other < len(cuts) and here.start < cuts[other] < there.stop:
                yield _with_stages(plan, {s: replace(here, stop=cuts[other]), s + 1: replace(there, start=cuts[other])})


def _moved_shares(plan: Plan, evaluator: Evaluator) -> Iterator[Plan]:
    """From the busiest replica of a stage to each of the others that is not as busy."""
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) < 2:
            continue
        busy = [_busy(plan, evaluator, stage, replica) for replica in stage.replicas]
        order = sorted(range(len(busy)), key=busy.__getitem__)
        worst = order[-1]
        for unit in _units(plan, stage, stage.replicas[worst]):
            for other in order[: min(3, len(order) - 1)]:
                yield _with_stages(plan, {s: _give(stage, worst, other, unit)})


def _units(plan: Plan, stage: Stage, giver: Replica) -> list[int]:
    """Samples worth moving: one micro-batch; where shares are free, a sample a lane or an eighth of the share."""
    least = stage.lanes if _any_share(plan) else plan.micro_batch_size
    sizes = {least, giver.total_samples // 8 // least * least} if _any_share(plan) else {least}
    return sorted((size for size in sizes if 0 < size < giver.total_samples), reverse=True)


def _give(stage: Stage, giver: int, taker: int, samples: int) -> Stage:
    def changed(replica: Replica, more: int) -> Replica:
        return replace(replica, samples=_in_proportion(replica.samples, replica.total_samples + more))

    rows = list(stage.replicas)
    rows[giver], rows[taker] = changed(rows[giver], -samples), changed(rows[taker], samples)
    return replace(stage, replicas=tuple(rows))


def _in_proportion(samples: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Whole numbers that sum to `total`, as nearly in the same proportion as can be."""
    before, edges = sum(samples), [0]
    for value in samples:
        edges.append(edges[-1] + value)
    return tuple(b * total // before - a * total // before for a, b in pairwise(edges))


def _busy(plan: Plan, evaluator: Evaluator, stage: Stage, replica: Replica) -> float:
    rounds = -(-replica.total_samples // plan.micro_batch_size)
    size = replica.total_samples / rounds if len(plan.stages) == 1 else float(plan.micro_batch_size)
    seconds = evaluator.replica_seconds(stage, replica, size)
    return rounds * (seconds.forward + seconds.backward)


def _less_recomputation(plan: Plan) -> Iterator[Plan]:
    for s, stage in enumerate(plan.stages):
        if stage.recompute:
            yield _with_stages(plan, {s: replace(stage, recompute=False)})


def reshared(plan: Plan, evaluator: Evaluator, micro_batch_size: int) -> Iterator[Plan]:
    """The same layout with another micro-batch, shares balanced anew, if they can be."""
    free = _any_share(plan)
    stages = []
    for stage in plan.stages:
        lanes = stage.lanes
        if micro_batch_size % lanes and not free:
            return
        even = [replace(replica, samples=(1,) * lanes) for replica in stage.replicas]
        seconds = [evaluator.replica_seconds(stage, replica, float(micro_batch_size)) for replica in even]
        speeds = [1.0 / (each.forward + each.backward) for each in seconds]
        rows = lane_samples(plan.batch_size, micro_batch_size, lanes, speeds, free)
        if rows is None:
            return
        replicas = (replace(replica, samples=samples) for replica, samples in zip(even, rows, strict=True))
        stages.append(replace(stage, replicas=tuple(replicas)))
    yield replace(plan, micro_batch_size=micro_batch_size, stages=tuple(stages))


def _other_micro_batches(plan: Plan, evaluator: Evaluator) -> Iterator[Plan]:
    divisors = [b for b in range(1, min(plan.batch_size, 4096) + 1) if plan.batch_size % b == 0]
    if _any_share(plan):  # a share in one micro-batch more or less
        share = max(replica.total_samples for replica in plan.stages[0].replicas)
        rounds = -(-share // plan.micro_batch_size)
        divisors = sorted({-(-share // parts) for parts in (rounds - 1, rounds + 1, rounds + 2) if parts > 0})
    smaller = [b for b in divisors if b < plan.micro_batch_size][-2:]
    larger = [b for b in divisors if b > plan.micro_batch_size][:2]
    for size in (*reversed(smaller), *larger):
        yield from reshared(plan, evaluator, size)


def _other_schedules(plan: Plan) -> Iterator[Plan]:
    if len(plan.stages) > 1 and plan.schedule != "interleaved":
        yield from (replace(plan, schedule=other) for other in mode_rules(plan.mode).schedules if other != plan.schedule)


def _other_codecs(plan: Plan, codecs: Mapping[str, Sequence[CodecName]]) -> Iterator[Plan]:
    for link, names in codecs.items():
        for name in names:
            if plan.codecs.get(link, "none") != name:
                changed = {**plan.codecs, link: name}
                yield replace(plan, codecs={key: value for key, value in changed.items() if value != "none"})


def _moved_replicas(plan: Plan, evaluator: Evaluator) -> Iterator[Plan]:
    """A replica given to a neighbouring stage, or left out."""
    for s, stage in enumerate(plan.stages):
        if len(stage.replicas) < 2:
            continue
        for index in _distinct(stage, evaluator):
            rest = replace(stage, replicas=stage.replicas[:index] + stage.replicas[index + 1 :])
            for t in (s - 1, s + 1, s):
                if not 0 <= t < len(plan.stages):
                    continue
                other = plan.stages[t]
                changed = {s: rest}
                if t != s and (other.tensor, other.lanes) == (stage.tensor, stage.lanes):
                    changed[t] = replace(other, replicas=(*other.replicas, stage.replicas[index]))
                elif t != s:
                    continue
                yield from reshared(_with_stages(plan, changed), evaluator, plan.micro_batch_size)


def _added_replicas(plan: Plan, evaluator: Evaluator) -> Iterator[Plan]:
    """Idle devices of one host, as another replica of some stage."""
    used = {name for stage in plan.stages for name in stage.devices}
    for host in evaluator.cluster.hosts:
        kinds: dict[tuple[str, float], list[str]] = {}
        for device in host.devices:
            if device.name not in used:
                kinds.setdefault((device.kind.name, device.speed), []).append(device.name)
        for names in kinds.values():
            for s, stage in enumerate(plan.stages):
                size = stage.tensor * stage.lanes
                if len(names) < size:
                    continue
                more = replace(stage.replicas[0], devices=tuple(names[:size]), samples=(1,) * stage.lanes)
                changed = _with_stages(plan, {s: replace(stage, replicas=(*stage.replicas, more))})
                yield from reshared(changed, evaluator, plan.micro_batch_size)


def _regrouped(plan: Plan) -> Iterator[Plan]:
    """Replicas of a single stage that shard its parameters between them instead of repeating them, or the other way round."""
    stage = plan.stages[0]
    if not _any_share(plan) or stage.tensor > 1 or stage.expert or stage.split:
        return
    if stage.lanes == 1 and len(stage.replicas) > 1:
        samples = tuple(replica.total_samples for replica in stage.replicas)
        rounds = max(-(-total // plan.micro_batch_size) for total in samples)
        if all(total % rounds == 0 for total in samples):
            whole = Replica(devices=stage.devices, samples=samples)
            yield replace(plan, micro_batch_size=plan.batch_size // rounds, stages=(replace(stage, sharded=True, replicas=(whole,)),))
    elif stage.sharded:
        apart = tuple(
            Replica(devices=(name,), samples=(count,)) for r in stage.replicas for name, count in zip(r.devices, r.samples, strict=True)
        )
        size = max(1, plan.micro_batch_size // stage.lanes)
        yield replace(plan, micro_batch_size=size, stages=(replace(stage, sharded=False, replicas=apart),))


def _distinct(stage: Stage, evaluator: Evaluator) -> list[int]:
    """One replica of each kind and host."""
    seen: dict[tuple[str, str], int] = {}
    for index, replica in enumerate(stage.replicas):
        device = evaluator.devices[replica.devices[0]]
        seen.setdefault((device.kind.name, device.host), index)
    return list(seen.values())
