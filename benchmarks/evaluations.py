"""How many plans a second the cost model prices: a 48-layer model on 64 mixed devices in two sites, one core.

    python benchmarks/evaluations.py [--json] [--plans 2000] [--seed 0] [--repeat 3]

Every plan is priced once and no two are equal. They are random and valid: 1–8 stages cut anywhere, tensor degree 1–8, replicas of one or
several lanes (some sharded), recomputation, micro-batches of 1–8 samples, batches of 128–512. Three in four have equal shares (`plain`). Of
the others, half divide every stage alike but unequally (`unequal`); half divide each stage in its own way among its own number of replicas,
so that the whole step is played task by task (`irregular`). `all` is the mix. The evaluator starts cold and its caches warm as they do in a
search. Rates are per second of this process's processor time.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator
from atoll.graph import Graph, dense_transformer
from atoll.plan import Plan, Replica, Stage, validate
from atoll.plan.division import pair_counts, route

TARGET = 2000.0  # evaluations a second


def mixed_cluster() -> Cluster:
    """Four hosts of eight A100 and four of eight V100, 1 Gbit/s apart."""
    oslo = make_site("oslo", kind="A100-80GB", hosts=4, devices=8, network="100 Gbit/s", latency="10 us")
    rome = make_site("rome", kind="V100-32GB", hosts=4, devices=8, network="25 Gbit/s", latency="20 us")
    return make_cluster("sixty-four", [oslo, rome], default_link=("1 Gbit/s", "10 ms"))


def model() -> Graph:
    """GPT-shaped, 48 blocks, 15 billion parameters."""
    return dense_transformer(name="gpt-48", layers=48, hidden=5120, heads=40, sequence=2048, vocabulary=51200)


def random_plan(draw: random.Random, graph: Graph, cluster: Cluster, kind: str) -> Plan:
    """A valid plan on all or nearly all devices."""
    plain, irregular = kind == "plain", kind == "irregular"
    stages = draw.randint(1 if plain else 2, 8)
    per_stage = len(cluster.devices) // stages
    tensor = draw.choice([t for t in (1, 2, 4, 8) if t <= per_stage])
    micro_batch = draw.choice([1, 2, 4, 8])
    micro_batches = draw.choice([m for m in (32, 64, 128) if 128 <= m * micro_batch <= 512] or [64])
    lanes = draw.choice([n for n in (1, 1, 2, 4) if n <= micro_batch and n * tensor <= per_stage])
    width = per_stage // (tensor * lanes)
    while micro_batches % width and plain:
        width -= 1
    width = min(width, micro_batches)
    cuts = [0, *sorted(draw.sample(graph.cuts, stages - 1)), len(graph.layers)]
    names = [device.name for device in cluster.devices]
    recompute, sharded = draw.random() < 0.5, lanes > 1 and draw.random() < 0.5
    shares = _shares(draw, micro_batches, width, plain)
    rows = []
    for s in range(stages):
        own = names[s * per_stage : (s + 1) * per_stage]
        if irregular:
            shares = _shares(draw, micro_batches, draw.randint(1, width), plain)
        rows.append(
            Stage(
                start=cuts[s],
                stop=cuts[s + 1],
                tensor=tensor,
                sharded=sharded,
                recompute=recompute,
                replicas=tuple(
                    Replica(
                        devices=tuple(own[i * tensor * lanes : (i + 1) * tensor * lanes]), samples=(share * micro_batch // lanes,) * lanes
                    )
                    for i, share in enumerate(shares)
                ),
            )
        )
    schedule = "gpipe" if draw.random() < 0.1 else "1f1b"
    return Plan(
        graph=graph.name,
        cluster=cluster.name,
        batch_size=micro_batches * micro_batch,
        micro_batch_size=micro_batch,
        stages=tuple(rows),
        schedule=schedule,
        codecs={"oslo–rome": "int8"} if draw.random() < 0.3 else {},
    )


def _shares(draw: random.Random, total: int, parts: int, equal: bool) -> list[int]:
    if equal:
        return [total // parts] * parts
    edges = [0, *sorted(draw.sample(range(1, total), parts - 1)), total]
    return [b - a for a, b in pairwise(edges)]


def distinct_plans(count: int, seed: int, graph: Graph, cluster: Cluster, kind: str) -> list[Plan]:
    """`count` different plans; the same seed gives the same ones."""
    draw = random.Random(seed)
    found: dict[Plan, None] = {}
    while len(found) < count:
        found.setdefault(random_plan(draw, graph, cluster, kind))
    for plan in found:
        validate(plan, graph, cluster)
    return list(found)


def rate(evaluator: Callable[[], Evaluator], question: str, plans: list[Plan], repeat: int) -> float:
    """Plans priced a second: the best of several runs, each with a cold evaluator, since others may use the machine meanwhile."""
    best = 0.0
    for _ in range(repeat):
        route.cache_clear()  # routes are remembered beside the evaluator
        pair_counts.cache_clear()
        price = getattr(evaluator(), question)
        began = time.process_time()
        for plan in plans:
            price(plan)
        best = max(best, len(plans) / (time.process_time() - began))
    return best


def measure(count: int, seed: int, repeat: int) -> dict[str, dict[str, float]]:
    """Evaluations a second by kind of plan and by question."""
    graph, cluster = model(), mixed_cluster()
    sizes = {"plain": count - 2 * (count // 8), "unequal": count // 8, "irregular": count // 8}
    plans = {kind: distinct_plans(size, seed, graph, cluster, kind) for kind, size in sizes.items()}
    mix = [plan for row in plans.values() for plan in row]
    random.Random(seed).shuffle(mix)
    rates: dict[str, dict[str, float]] = {}
    for name, row in {"all": mix, **plans}.items():
        rates[name] = {question: rate(lambda: Evaluator(graph, cluster), question, row, repeat) for question in ("seconds", "cost", "fits")}
    return rates


def main() -> int:
    """Prints a table or JSON; exit code 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    rates = measure(options.plans, options.seed, options.repeat)
    machine = f"{platform.processor() or platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    met = min(rates["all"]["seconds"], rates["all"]["cost"]) >= TARGET
    if options.json:
        found = {"machine": machine, "plans": options.plans, "target": TARGET, "met": met, "evaluations_per_second": rates}
        print(json.dumps(found, indent=1))
    else:
        print(f"{'plans':<10}{'seconds/s':>12}{'cost/s':>12}{'fits/s':>12}")
        for name, row in rates.items():
            print(f"{name:<10}{row['seconds']:>12,.0f}{row['cost']:>12,.0f}{row['fits']:>12,.0f}")
        print(f"target {TARGET:,.0f} evaluations/s of both kinds: {'met' if met else 'missed'} ({machine})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
