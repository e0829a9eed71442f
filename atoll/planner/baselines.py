"""Baselines: what anyone would try by hand, so that no search ever does worse.

For every natural group of devices — all, each site, host and kind, one device of a kind: data parallelism, sharded data parallelism and
tensor parallelism over the whole group, shares in proportion to speed, in one or a few micro-batches; recomputing where it has to.
"""

from collections.abc import Iterator, Sequence
from math import gcd

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.plan import Plan, Replica, Stage
from atoll.plan.units import even_shares, split_units
from atoll.planner.balance import shares

__all__ = ["baselines"]

_ROUNDS = (1, 2, 3, 4, 6, 8, 16)


def baselines(evaluator: Evaluator, batch_size: int) -> Iterator[Plan]:
    """Plans that fit, whole model on one stage."""
    for group in _groups(evaluator):
        speeds = _speeds(evaluator, group)
        for stage in _stages(evaluator, group, speeds, batch_size):
            most = max(replica.total_samples for replica in stage.replicas)
            for micro in sorted({-(-most // rounds) for rounds in _ROUNDS}, reverse=True):
                plan = Plan(
                    graph=evaluator.graph.name,
                    cluster=evaluator.cluster.name,
                    batch_size=batch_size,
                    micro_batch_size=micro,
                    stages=(stage,),
                )
                again = replace(plan, stages=(replace(stage, recompute=True),))
                for candidate in (plan, again):
                    if evaluator.fits(candidate):
                        yield candidate
                        break


def _groups(evaluator: Evaluator) -> list[tuple[str, ...]]:
    devices = evaluator.cluster.devices
    found: dict[tuple[str, ...], None] = {tuple(device.name for device in devices): None}
    keys = (
        lambda device: device.site,
        lambda device: device.host,
        lambda device: (device.kind.name, device.speed),
        lambda device: (device.host, device.kind.name, device.speed),
    )
    for key in keys:
        groups: dict[object, list[str]] = {}
        for device in devices:
            groups.setdefault(key(device), []).append(device.name)
        found.update(dict.fromkeys(tuple(names) for names in groups.values()))
        found.update(dict.fromkeys((names[0],) for names in groups.values()))
    return list(found)


def _speeds(evaluator: Evaluator, group: Sequence[str]) -> list[float]:
    """Samples a second of each device on its own."""
    layers = len(evaluator.graph.layers)
    speeds = []
    for name in group:
        alone = Replica(devices=(name,), samples=(1,))
        seconds = evaluator.replica_seconds(Stage(start=0, stop=layers, replicas=(alone,)), alone, 1.0)
        speeds.append(1.0 / (seconds.forward + seconds.backward))
    return speeds


def _stages(evaluator: Evaluator, group: tuple[str, ...], speeds: Sequence[float], batch_size: int) -> Iterator[Stage]:
    layers = evaluator.graph.layers
    balanced = [shares(batch_size, speeds), shares(batch_size, [1.0] * len(group))]  # none where there are fewer samples than devices
    for parts in dict.fromkeys(tuple(counts) for counts in balanced if counts):
        apart = tuple(Replica(devices=(name,), samples=(count,)) for name, count in zip(group, parts, strict=True))
        yield Stage(start=0, stop=len(layers), replicas=apart)
        if len(group) > 1:
            yield Stage(start=0, stop=len(layers), replicas=(Replica(devices=group, samples=parts),), sharded=True)
    units = split_units(layers)
    if len(group) > 1 and units and (even := even_shares(units, len(group))) is not None:
        by_speed = tuple(shares(gcd(*units), speeds) or ()) if len(set(speeds)) > 1 else even
        for parts in dict.fromkeys((by_speed, even)):
            divided = Replica(devices=group, samples=(batch_size,), tensor_shares=parts)
            yield Stage(start=0, stop=len(layers), replicas=(divided,), tensor=len(group))
