"""Is the planner's plan the best there is? Against exhaustive search on random small problems.

The exhaustive search shares nothing with the planner but the cost model. It writes down every plan of the space in docs/planner.md — each
device unused or in some stage, every cut, every grouping of a stage's devices into replicas, tensor or sharded groups, every micro-batch,
every whole-number division of the batch, both schedules, every codec on every link — and prices each one that could beat the planner's: a
plan in which one replica's own work already takes longer is only counted.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator

from report import print_json, print_table
from small_instances import random_instance

from atoll.cost import Evaluator
from atoll.errors import NoPlanError
from atoll.plan import Plan, Replica, Stage
from atoll.planner import plan as make_plans

CODECS = ("none", "bf16", "int8")
INFINITE = float("inf")


def stage_assignments(names: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to give each device to a stage or to none, all stages in use."""
    for stages in range(1, len(names) + 1):
        for choice in itertools.product(range(stages + 1), repeat=len(names)):
            groups = [tuple(name for name, c in zip(names, choice, strict=True) if c == s) for s in range(stages)]
            if all(groups):
                yield groups


def equal_groups(names: tuple[str, ...], size: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every division of names into groups of one size, each division once."""
    seen = set()
    for order in itertools.permutations(names):
        groups = tuple(sorted(tuple(sorted(order[i : i + size])) for i in range(0, len(order), size)))
        if groups not in seen:
            seen.add(groups)
            yield groups


def stage_forms(
    start: int, stop: int, names: tuple[str, ...], units: int, micro: int
) -> Iterator[tuple[int, bool, tuple[tuple[str, ...], ...]]]:
    """(tensor, sharded, groups) of every way to run a stage on these devices."""
    for size in range(1, len(names) + 1):
        if len(names) % size:
            continue
        for groups in equal_groups(names, size):
            if size == 1 or (units > 1 and units % size == 0):
                yield size, False, groups
            if size > 1 and micro % size == 0:
                yield 1, True, groups


def divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered sum of positive whole numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in divisions(total - first, parts - 1):
            yield (first, *rest)


def shared_stages(
    start: int, stop: int, form: tuple[int, bool, tuple[tuple[str, ...], ...]], batch: int, micro: int, single: bool
) -> list[Stage]:
    """The stage with every division of the batch among its replicas."""
    tensor, sharded, groups = form
    lanes = len(groups[0]) // tensor
    unit = lanes if single else micro
    if batch % unit or batch // unit < len(groups):
        return []
    per_lane = 1 if single else micro // lanes
    stages = []
    for counts in divisions(batch // unit, len(groups)):
        replicas = tuple(Replica(devices=g, samples=(n * per_lane,) * lanes) for g, n in zip(groups, counts, strict=True))
        stages.append(Stage(start=start, stop=stop, replicas=replicas, tensor=tensor, sharded=sharded))
    return stages


def all_plans(evaluator: Evaluator, batch: int) -> Iterator[Plan]:
    """Every plan of the space, not recomputing."""
    graph, cluster = evaluator.graph, evaluator.cluster
    layers = len(graph.layers)
    for groups in stage_assignments([device.name for device in cluster.devices]):
        single = len(groups) == 1
        for cuts in itertools.combinations(graph.cuts, len(groups) - 1):
            bounds = (0, *cuts, layers)
            units = [max(layer.tensor_units for layer in graph.layers[a:b]) for a, b in itertools.pairwise(bounds)]
            for micro in (b for b in range(1, batch + 1) if batch % b == 0):
                forms = [list(stage_forms(bounds[s], bounds[s + 1], g, units[s], micro)) for s, g in enumerate(groups)]
                for form in itertools.product(*forms):
                    rows = [shared_stages(bounds[s], bounds[s + 1], f, batch, micro, single) for s, f in enumerate(form)]
                    for stages in itertools.product(*rows):
                        for schedule in ("1f1b",) if single else ("1f1b", "gpipe"):
                            yield Plan(
                                graph=graph.name,
                                cluster=cluster.name,
                                batch_size=batch,
                                micro_batch_size=micro,
                                stages=stages,
                                schedule=schedule,
                            )


def fitting(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """The plan if it fits; else every set of stages that recompute with which it does."""
    if evaluator.fits(plan):
        yield plan
        return
    for flags in itertools.product((False, True), repeat=len(plan.stages)):
        stages = tuple(
            Stage(start=s.start, stop=s.stop, replicas=s.replicas, tensor=s.tensor, sharded=s.sharded, recompute=flag)
            for s, flag in zip(plan.stages, flags, strict=True)
        )
        candidate = Plan(
            graph=plan.graph,
            cluster=plan.cluster,
            batch_size=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
            stages=stages,
            schedule=plan.schedule,
        )
        if evaluator.fits(candidate):
            yield candidate


def with_codecs(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """Every codec on every link between two sites the plan uses."""
    sites = {evaluator.devices[name].site for stage in plan.stages for name in stage.devices}
    links = [link.name for link in evaluator.cluster.links if set(link.between) <= sites]
    for names in itertools.product(CODECS, repeat=len(links)):
        codecs = {link: name for link, name in zip(links, names, strict=True) if name != "none"}
        yield Plan(
            graph=plan.graph, cluster=plan.cluster, batch_size=plan.batch_size, micro_batch_size=plan.micro_batch_size,
            stages=plan.stages, schedule=plan.schedule, codecs=codecs,  # type: ignore[arg-type]
        )  # fmt: skip


def least_seconds(evaluator: Evaluator, plan: Plan) -> float:
    """What the busiest replica computes and the busiest link carries, were all else free: no plan takes less."""
    single = len(plan.stages) == 1
    worst = 0.0
    for stage in plan.stages:
        for replica in stage.replicas:
            rounds = -(-replica.total_samples // plan.micro_batch_size)
            size = replica.total_samples / rounds if single else float(plan.micro_batch_size)
            seconds = evaluator.replica_seconds(stage, replica, size)
            worst = max(worst, rounds * (seconds.forward + seconds.backward))
    crossing = max(least_crossing(evaluator, plan, s) for s in range(len(plan.stages)))
    return max(worst, crossing, *(least_sync(evaluator, plan, stage) for stage in plan.stages))


def least_sync(evaluator: Evaluator, plan: Plan, stage: Stage) -> float:
    """What the gradients of a stage with replicas in several sites take over the widest link, at one byte an element, behind a backward."""
    sites = {evaluator.devices[replica.devices[0]].site for replica in stage.replicas}
    if len(sites) == 1 or stage.sharded:
        return 0.0
    parameters = sum(
        layer.parameters - layer.split_parameters * (1 - 1 / stage.tensor) for layer in evaluator.graph.layers[stage.start : stage.stop]
    )
    rate = max(link.bytes_per_s for link in evaluator.cluster.links)
    return parameters / rate - max(evaluator.replica_seconds(stage, r, float(plan.micro_batch_size)).backward for r in stage.replicas)


def least_crossing(evaluator: Evaluator, plan: Plan, s: int) -> float:
    """What a step's activations take from stage s to the next over all links between their sites at once, at one byte an element."""
    if s + 1 == len(plan.stages):
        return 0.0
    ours, theirs = ({evaluator.devices[name].site for name in plan.stages[k].devices} for k in (s, s + 1))
    if ours & theirs:
        return 0.0
    rate = sum(link.bytes_per_s for link in evaluator.cluster.links if set(link.between) <= ours | theirs)
    return evaluator.graph.layers[plan.stages[s].stop - 1].output_bytes / 4 * plan.batch_size / rate


def exhaustive(evaluator: Evaluator, batch: int, known: float) -> tuple[float, int, int]:
    """The least step time where any is below `known`, how many plans there are, and how many had to be priced."""
    best, count, priced = known, 0, 0
    for plan in all_plans(evaluator, batch):
        count += 1
        if least_seconds(evaluator, plan) >= best:
            continue
        for fitted in fitting(evaluator, plan):
            for candidate in with_codecs(evaluator, fitted):
                priced += 1
                best = min(best, evaluator.seconds(candidate))
    return best, count, priced


def compare(seed: int) -> dict[str, object]:
    """One problem, solved both ways."""
    graph, cluster, batch = random_instance(seed)
    evaluator = Evaluator(graph, cluster)
    started = time.perf_counter()
    try:
        planned = make_plans(graph, cluster, batch_size=batch, codecs=CODECS)
        ours, exact = planned.candidates[0].cost.step_seconds, planned.exact
    except NoPlanError:
        ours, exact = INFINITE, True
    middle = time.perf_counter()
    best, count, priced = exhaustive(evaluator, batch, ours)
    gap = 0.0 if ours == best == INFINITE else ours / best - 1
    return {
        "seed": seed,
        "devices": len(cluster.devices),
        "sites": len(cluster.sites),
        "layers": len(graph.layers),
        "plans": count,
        "priced": priced,
        "gap": gap,
        "fits": best < INFINITE,
        "exact": exact,
        "planner_seconds": middle - started,
        "exhaustive_seconds": time.perf_counter() - middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="seed of the first instance")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for number, row in enumerate(pool.imap_unordered(compare, range(options.start, options.start + options.instances)), 1):
            rows.append(row)
            done = f"{number}/{options.instances} problems, {sum(int(str(r['plans'])) for r in rows):,} plans"
            print(f"\r{done}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows.sort(key=lambda row: int(str(row["seed"])))
    gaps = [float(str(row["gap"])) for row in rows]
    result = {
        "instances": len(rows),
        "same_cost_share": sum(abs(gap) <= 1e-6 for gap in gaps) / len(gaps),
        "worst_gap": max(gaps),
        "nothing_fits": sum(not row["fits"] for row in rows),
        "proved_exact_share": sum(bool(row["exact"]) for row in rows) / len(rows),
        "plans": sum(int(str(row["plans"])) for row in rows),
        "plans_priced": sum(int(str(row["priced"])) for row in rows),
        "planner_seconds_worst": max(float(str(row["planner_seconds"])) for row in rows),
    }
    if options.json:
        print_json({**result, "rows": rows})
        return
    worst = sorted(rows, key=lambda row: -abs(float(str(row["gap"]))))[:10]
    print_table("largest gaps", list(worst[0]), [list(row.values()) for row in worst])
    print_table("planner against exhaustive search", ["", "value"], list(result.items()))


if __name__ == "__main__":
    main()
