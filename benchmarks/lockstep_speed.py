"""A step of Atoll against hand-written PyTorch of the same layout: DDP, FSDP2 and 1F1B pipelining, on two processes.

    python benchmarks/lockstep_speed.py [--json] [--layouts data eager …] [--shapes narrow …] [--rounds 15] [--steps 1]

All contestants live in the same two processes (Gloo, one thread each) and train the same model on the same data with the same optimizer;
their losses must agree. In a round every contestant does some steps, in an order that turns from round to round, so that whatever else the
machine is doing touches all alike. Peers are tried with several settings first and compete with their fastest.
The layouts are data, sharded, pipeline, and eager: data parallelism of the model as it is written, as for what cannot be captured.

A step's time is that of the slower process. The ratio is the median over rounds of Atoll's time by the peer's in the same round; beside it
stands the ratio of processor time, which other programs hardly touch. Limit: 1.05.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep_models import SHAPES, Shape, gpt_job
from lockstep_peers import Atoll, Ddp, Fsdp, Pipeline, Runner
from lockstep_processes import is_rank, joined, start_ranks
from report import print_json, print_table

from atoll import Job
from atoll.cluster.memory import memory_to_try
from atoll.graph.capture import Captured, capture_program
from atoll.graph.eager import Uncaptured, capture_or_run
from atoll.plan import Plan, Replica, Stage

LIMIT = 1.05
LAYOUTS = ("data", "sharded", "pipeline", "eager")
_RANKS = 2
_LOSS_TOLERANCE = 1e-4  # relative, after all rounds: fp32 sums in another order
_TRIAL_ROUNDS = 2
_WARM_UP = 2


def data_plan(captured: Captured | Uncaptured, job: Job) -> Plan:
    """Two replicas."""
    half = job.batch_size // _RANKS
    replicas = tuple(Replica(devices=(name,), samples=(half,)) for name in "ab")
    return _plan(captured, job, half, (Stage(start=0, stop=len(captured.graph.layers), replicas=replicas),))


def sharded_plan(captured: Captured, job: Job) -> Plan:
    """Two lanes that shard everything."""
    replica = Replica(devices=("a", "b"), samples=(job.batch_size // _RANKS,) * _RANKS)
    return _plan(captured, job, job.batch_size, (Stage(start=0, stop=len(captured.graph.layers), replicas=(replica,), sharded=True),))


def pipeline_plan(captured: Captured, job: Job, cut: int, micro_batches: int) -> Plan:
    """Two stages; the second begins with block `cut`."""
    names = [layer.name for layer in captured.graph.layers]
    middle = names.index(f"blocks.{cut}")
    first = Stage(start=0, stop=middle, replicas=(Replica(devices=("a",), samples=(job.batch_size,)),))
    second = Stage(start=middle, stop=len(names), replicas=(Replica(devices=("b",), samples=(job.batch_size,)),))
    return _plan(captured, job, job.batch_size // micro_batches, (first, second))


def _plan(captured: Captured | Uncaptured, job: Job, micro_batch: int, stages: tuple[Stage, ...]) -> Plan:
    return Plan(graph=captured.graph.name, cluster="here", batch_size=job.batch_size, micro_batch_size=micro_batch, stages=stages)


def contestants(layout: str, job: Job, shape: Shape, captured: Captured) -> tuple[list[Callable[[], Runner]], Callable[[], Runner]]:
    """Makers of the peer with each setting worth trying, and of Atoll."""
    if layout in ("data", "eager"):
        sizes = ((5, False), (25, False), (25, True), (1000, True))
        peers: list[Callable[[], Runner]] = [
            lambda size=size, static=static: Ddp(job, bucket_mb=size, static_graph=static) for size, static in sizes
        ]
        code = captured if layout == "data" else capture_or_run(dataclasses.replace(job, capture=False), most_bytes=memory_to_try())
        return peers, lambda: Atoll(job, code, data_plan(code, job))
    if layout == "sharded":
        return [lambda kept=kept: Fsdp(job, root_resharded=not kept) for kept in (True, False)], lambda: Atoll(
            job, captured, sharded_plan(captured, job)
        )
    micro_batches, cut = min(8, job.batch_size), shape.layers // 2
    plan = pipeline_plan(captured, job, cut, micro_batches)
    return [lambda: Pipeline(job, micro_batches=micro_batches, cut=cut)], lambda: Atoll(job, captured, plan)


def timed(runner: Runner, steps: int) -> tuple[float, float]:
    """Seconds a step of the slower process, and processor seconds of both together."""
    numbers = range(runner.done + 1, runner.done + 1 + steps)
    runner.prepare(numbers)
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for number in numbers:
        runner.step(number)
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - processor], dtype=torch.float64)
    runner.done += steps
    slowest, total = spent.clone(), spent.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest[0]) / steps, float(total[1]) / steps


def in_turn(runners: Sequence[Runner], rounds: int, steps: int) -> list[list[tuple[float, float]]]:
    """For every round the times of all runners; who begins changes from round to round."""
    found = []
    for number in range(rounds):
        order = [(number + offset) % len(runners) for offset in range(len(runners))]
        times = {index: timed(runners[index], steps) for index in order}
        found.append([times[index] for index in range(len(runners))])
    return found


def fastest(makers: Sequence[Callable[[], Runner]], steps: int) -> Callable[[], Runner]:
    """The settings of the peer that were fastest in a few rounds."""
    if len(makers) == 1:
        return makers[0]
    runners = [make() for make in makers]
    in_turn(runners, 1, _WARM_UP)
    found = in_turn(runners, _TRIAL_ROUNDS, steps)
    medians = [statistics.median(row[index][0] for row in found) for index in range(len(runners))]
    return makers[medians.index(min(medians))]  # the same on both ranks: times are those of the slower one


def compare(layout: str, name: str, job: Job, captured: Captured, rounds: int, steps: int) -> dict[str, Any]:
    """One layout of one model."""
    makers, make_atoll = contestants(layout, job, SHAPES[name], captured)
    peer, ours = fastest(makers, steps)(), make_atoll()
    in_turn((peer, ours), 1, _WARM_UP)
    found = in_turn((peer, ours), rounds, steps)
    losses = peer.loss(), ours.loss()
    ours.close()
    ratios = [row[1][0] / row[0][0] for row in found]
    return {
        "layout": layout,
        "shape": name,
        "parameters": captured.graph.parameters,
        "peer": peer.name,
        "plan": ours.name,
        "peer_seconds": statistics.median(row[0][0] for row in found),
        "atoll_seconds": statistics.median(row[1][0] for row in found),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "processor_ratio": statistics.median(row[1][1] / row[0][1] for row in found),
        "peer_loss": losses[0],
        "atoll_loss": losses[1],
        "losses_agree": abs(losses[0] - losses[1]) <= _LOSS_TOLERANCE * abs(losses[0]),
        "load": os.getloadavg()[0],
    }


def run_rank(options: argparse.Namespace) -> int:
    """All comparisons; rank 0 prints."""
    lines = []
    with joined():
        for name in options.shapes:
            job = gpt_job(SHAPES[name], name)
            captured = capture_program(job)
            for layout in options.layouts:
                lines.append(compare(layout, name, job, captured, options.rounds, options.steps))
                if dist.get_rank() == 0:
                    print(f"{layout}, {name}: {lines[-1]['ratio']:.3f}, processor {lines[-1]['processor_ratio']:.3f}", file=sys.stderr)
        if dist.get_rank() == 0:
            _show(lines, options.json)
    return 0 if all(line["ratio"] <= LIMIT and line["losses_agree"] for line in lines) else 1


def _show(lines: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"limit": LIMIT, "lines": lines})
        return
    header = ("layout", "shape", "parameters", "peer", "peer ms", "Atoll ms", "ratio", "from", "to", "processor", "peer loss", "Atoll loss")
    rows = [
        (
            line["layout"],
            line["shape"],
            f"{line['parameters'] / 1e6:.1f} M",
            line["peer"],
            1e3 * line["peer_seconds"],
            1e3 * line["atoll_seconds"],
            round(line["ratio"], 3),
            min(line["ratios"]),
            max(line["ratios"]),
            round(line["processor_ratio"], 3),
            f"{line['peer_loss']:.6f}",
            f"{line['atoll_loss']:.6f}",
        )
        for line in lines
    ]
    print_table(f"a step of Atoll against hand-written PyTorch, 2 processes (limit of the ratio: {LIMIT})", header, rows)
    print(f"\nload of the machine, which has {os.cpu_count()} cores: {lines[-1]['load']:.1f}")


def main(arguments: Sequence[str]) -> int:
    """The command, which starts the ranks, and the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args(arguments)
    return run_rank(options) if is_rank() else start_ranks(Path(__file__), arguments, _RANKS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
