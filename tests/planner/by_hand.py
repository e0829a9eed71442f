"""What an engineer would try by hand, and random small problems to try it on. Shares nothing with the planner but the nouns."""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import gcd

from atoll.cluster import Cluster, Device, make_cluster, make_site
from atoll.graph import Graph, dense_transformer
from atoll.plan import Plan, Replica, Stage

__all__ = ["hand_plans", "random_problem"]

Group = tuple[Device, ...]
KINDS = ("A100-40GB", "V100-32GB", "V100-16GB", "P100-16GB", "RTX-3090", "T4")


def random_problem(seed: int) -> tuple[Graph, Cluster, int]:
    """Graph, cluster and batch of problem number `seed`: up to a dozen devices, one or two sites, some tight in memory."""
    rng = random.Random(seed)
    heads = rng.choice((4, 6, 8, 12, 16, 25))
    graph = dense_transformer(
        name="random",
        layers=rng.choice((2, 3, 6, 10, 16)),
        hidden=64 * heads,
        heads=heads,
        sequence=rng.choice((128, 512, 1024)),
        vocabulary=rng.choice((1000, 8192, 50257)),
        tied=rng.random() < 0.5,
    )
    state = 16 * graph.parameters / 1e9
    sites = []
    for number in range(rng.choice((1, 1, 1, 2))):
        kinds: list[tuple[str, int]] = [(rng.choice(KINDS), rng.choice((1, 2, 3, 4)))]
        if rng.random() < 0.25:
            kinds.append((rng.choice([kind for kind in KINDS if kind != kinds[0][0]]), rng.choice((1, 2))))
        memory = f"{1.5 + state * rng.choice((0.3, 0.6, 1.2)) + rng.choice((0.3, 1.0)):.2f} GB" if rng.random() < 0.5 else None
        network = rng.choice(("1 Gbit/s", "10 Gbit/s", "100 Gbit/s"))
        link = rng.choice((None, None, ("10 GB/s", "10 us")))
        sites.append(make_site(f"s{number}", kind=kinds, hosts=rng.choice((1, 1, 2, 3)), network=network, memory=memory, link=link))
    wan = (rng.choice(("100 Mbit/s", "1 Gbit/s", "20 Gbit/s")), rng.choice(("1 ms", "30 ms")))
    return graph, make_cluster("c", sites, default_link=wan), rng.choice((1, 4, 7, 8, 12, 16, 24, 32, 37, 64, 96))


def hand_plans(graph: Graph, cluster: Cluster, batch: int) -> Iterator[Plan]:
    """Data parallelism, even pipelines, both at once, tensors split inside hosts with and without a pipeline; shares even or by FLOPS.

    On all devices, on each site, on each host and on one device. Some may be invalid or not fit: that is for the caller to see.
    """
    for group in _groups(cluster):
        for stages in _layouts(graph, group, batch):
            for micro in _micro_batches(stages, batch):
                rows = _with_shares(stages, batch, micro, cluster, graph)
                for row in dict.fromkeys(rows):
                    yield from _variants(graph, cluster, batch, micro, row)


def _groups(cluster: Cluster) -> list[Group]:
    found: dict[Group, None] = {tuple(cluster.devices): None, tuple(cluster.devices[:1]): None}
    fastest = max(cluster.devices, key=lambda device: device.kind.peak("fp16"))
    found[(fastest,)] = None
    for key in (lambda d: d.site, lambda d: d.host, lambda d: d.kind.name):
        for _, members in groupby(sorted(cluster.devices, key=key), key):
            found[tuple(members)] = None
    return list(found)


Layout = tuple[tuple[int, int, int, bool, tuple[Group, ...]], ...]  # of every stage: start, stop, tensor, sharded, replicas


def _layouts(graph: Graph, group: Group, batch: int) -> Iterator[Layout]:
    layers = len(graph.layers)
    yield ((0, layers, 1, False, tuple((device,) for device in group)),)
    if len(group) > 1:
        yield ((0, layers, 1, True, (group,)),)
    hosts = [tuple(members) for _, members in groupby(group, lambda device: device.host)]
    if len(hosts) > 1 and len({len(host) for host in hosts}) == 1 and len(hosts[0]) > 1:
        yield ((0, layers, 1, True, tuple(hosts)),)
    for size in range(1, len(group) + 1):
        units = [host[i : i + size] for host in hosts for i in range(0, len(host) - size + 1, size)]
        for stages in range(1, min(len(units), layers) + 1):
            each = len(units) // stages
            if len(units) % stages or (size == 1 and stages == 1):
                continue
            bounds = [layers * s // stages for s in range(stages + 1)]
            ways = [[units[s * each : (s + 1) * each] for s in range(stages)], [units[s::stages] for s in range(stages)]]
            for way in ways if each > 1 and stages > 1 else ways[:1]:
                yield tuple((a, b, size, False, tuple(row)) for (a, b), row in zip(pairwise(bounds), way, strict=True))


def _micro_batches(layout: Layout, batch: int) -> list[int]:
    if len(layout) > 1:
        return [size for size in range(1, batch + 1) if batch % size == 0]
    share = -(-batch // len(layout[0][4]))
    return sorted({-(-share // parts) for parts in (1, 2, 4, 8)} | {batch})


def _with_shares(layout: Layout, batch: int, micro: int, cluster: Cluster, graph: Graph) -> Iterator[tuple[Stage, ...]]:
    unit = 1 if len(layout) == 1 else micro
    for by_flops in (False, True):
        stages = []
        for start, stop, tensor, sharded, replicas in layout:
            speeds = [sum(_speed(device) if by_flops else 1.0 for device in replica) for replica in replicas]
            made = []
            for devices, count in zip(replicas, _apportioned(batch // unit, speeds), strict=True):
                weights = [_speed(device) if by_flops else 1.0 for device in devices]
                lanes = tuple(_apportioned(count * unit, weights)) if sharded else (count * unit,)
                names = tuple(device.name for device in devices)
                made.append(Replica(devices=names, samples=lanes, tensor_shares=_tensor_shares(graph, start, stop, tensor, weights)))
            stages.append(Stage(start=start, stop=stop, replicas=tuple(made), tensor=tensor, sharded=sharded))
        yield tuple(stages)


def _speed(device: Device) -> float:
    return device.kind.peak("fp16") * device.speed


def _tensor_shares(graph: Graph, start: int, stop: int, tensor: int, weights: Sequence[float]) -> tuple[int, ...]:
    units = gcd(*(layer.tensor_units for layer in graph.layers[start:stop] if layer.tensor_units > 1))
    if tensor == 1 or units < tensor or (units % tensor == 0 and len(set(weights)) == 1):
        return ()
    return tuple(_apportioned(units, weights))


def _apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in proportion to the weights, rounded down, what is left one by one to the heaviest."""
    found = [int(total * weight / sum(weights)) for weight in weights]
    for place in sorted(range(len(weights)), key=lambda i: -weights[i])[: total - sum(found)]:
        found[place] += 1
    return found


def _variants(graph: Graph, cluster: Cluster, batch: int, micro: int, stages: tuple[Stage, ...]) -> Iterator[Plan]:
    for again in (False, True):
        rows = tuple(Stage(**{name: getattr(s, name) for name in s.__struct_fields__} | {"recompute": again}) for s in stages)
        for schedule in ("1f1b", "gpipe") if len(stages) > 1 else ("1f1b",):
            yield Plan(graph=graph.name, cluster=cluster.name, batch_size=batch, micro_batch_size=micro, stages=rows, schedule=schedule)
