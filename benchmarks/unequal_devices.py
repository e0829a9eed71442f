"""Unequal devices: plans that know the devices' speeds against equal shares, data parallel and pipeline, with imposed speeds.

    python benchmarks/unequal_devices.py [--json] [--rounds 5] [--speeds 3:1 3:3:1:1] [--layouts data pipeline]

Every device is a process; it computes a small model in earnest and sleeps until the time has passed that the cost model says its device
would need (`atoll.runtime.imposed_speed`). Shares and cuts are the planner's. Both plans live in the same processes and take
turns.

The ideal gain is that of work which can be divided at will: 2 for speeds of 3:1 as for 3:3:1:1. What is lost of it is real: samples and
layers that come whole, the pipeline's filling, exchanges, and what the runtime adds. Limit: 90% of the ideal gain.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from lockstep_imposed import Pair, ideal_gain, imposed_cluster, pair_of, plain_job
from lockstep_peers import Atoll
from lockstep_processes import is_rank, joined, start_ranks
from report import print_json, print_table

from atoll import Job, capture
from atoll.cost import Evaluator
from atoll.graph.capture import Captured, capture_program
from atoll.plan import Plan
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.lockstep.layout import Layout

LIMIT = 0.90
LAYOUTS = ("data", "pipeline")
_WARM_UP = 1
_CPU = torch.device("cpu")


def runner(job: Job, captured: Captured, plan: Plan, evaluator: Evaluator) -> Atoll:
    """A plan under imposed speeds."""
    layout = Layout(plan)
    places = layout.places(dist.get_rank())
    homes = {place.stage: (plan.stages[place.stage], plan.stages[place.stage].replicas[place.replica]) for place in places}
    pace = Pace(evaluator, homes, [stop - start for start, stop in layout.micro_batches], _CPU)
    return Atoll(job, captured, plan, pace)


def step_seconds(runners: Sequence[Atoll], rounds: int) -> list[float]:
    """Each runner's median step, of the slowest rank; they take turns."""
    taken: list[list[float]] = [[] for _ in runners]
    for number in range(_WARM_UP + rounds):
        for index in (range(len(runners)), reversed(range(len(runners))))[number % 2]:
            dist.barrier()
            began = time.perf_counter()
            runners[index].step(number + 1)
            spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            taken[index].append(float(spent))
    return [statistics.median(seconds[_WARM_UP:]) for seconds in taken]


def measure(layout: str, speeds: Sequence[int], pair: Pair, rounds: int) -> dict[str, Any]:
    """One pair of plans; every rank takes part."""
    job = plain_job()
    captured = capture_program(job)
    evaluator = Evaluator(captured.graph, imposed_cluster(speeds))
    runners = [runner(job, captured, plan, evaluator) for plan in (pair.equal, pair.aware)]
    equal, aware = step_seconds(runners, rounds)
    losses = [each.loss() for each in runners]
    for each in runners:
        each.close()
    predicted = [evaluator.seconds(plan) for plan in (pair.equal, pair.aware)]
    ideal = ideal_gain(speeds)
    return {
        "layout": layout,
        "speeds": ":".join(map(str, speeds)),
        "equal_plan": str(pair.equal),
        "aware_plan": str(pair.aware),
        "equal_seconds": equal,
        "aware_seconds": aware,
        "gain": equal / aware,
        "ideal_gain": ideal,
        "share_of_ideal": equal / aware / ideal,
        "predicted_equal_seconds": predicted[0],
        "predicted_aware_seconds": predicted[1],
        "predicted_gain": predicted[0] / predicted[1],
        "losses": losses,
        "load": os.getloadavg()[0],
    }


def run_rank(options: argparse.Namespace) -> int:
    """One pair of plans, which are given as files; rank 0 prints a line of JSON."""
    speeds = _speeds(options.speeds[0])
    pair = Pair(*(Plan.from_json(Path(file).read_text("utf-8"), file) for file in options.plans))
    with joined():
        line = measure(options.layouts[0], speeds, pair, options.rounds)
        if dist.get_rank() == 0:
            Path(options.out).write_bytes(msgspec.json.encode(line))
    return 0


def compare(layout: str, speeds: str, rounds: int) -> dict[str, Any]:
    """Plan, start a process for every device, and read what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        pair = pair_of(layout, _speeds(speeds), capture)
        files = []
        for name, plan in (("equal", pair.equal), ("aware", pair.aware)):
            files.append(Path(folder) / f"{name}.json")
            files[-1].write_text(plan.to_json(), "utf-8")
        out = Path(folder) / "line.json"
        arguments = ["--layouts", layout, "--speeds", speeds, "--rounds", str(rounds), "--plans", *map(str, files), "--out", str(out)]
        code = start_ranks(Path(__file__), arguments, len(_speeds(speeds)))
        if code:
            raise SystemExit(code)
        return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])


def _speeds(text: str) -> list[int]:
    return [int(part) for part in text.split(":")]


def _show(lines: Sequence[dict[str, Any]]) -> None:
    header = (
        "layout",
        "speeds",
        "equal s",
        "aware s",
        "gain",
        "ideal",
        "share %",
        "predicted equal s",
        "predicted aware s",
        "predicted gain",
    )
    names = ("layout", "speeds", "equal_seconds", "aware_seconds", "gain", "ideal_gain", "share_of_ideal")
    rows = [
        (
            *(line[name] for name in names[:-1]),
            round(100 * line["share_of_ideal"], 1),
            line["predicted_equal_seconds"],
            line["predicted_aware_seconds"],
            line["predicted_gain"],
        )
        for line in lines
    ]
    print_table(f"plans that know the devices' speeds against equal shares (limit: {LIMIT:.0%} of the ideal gain)", header, rows)
    for line in lines:
        print(f"\n{line['layout']}, {line['speeds']}\n{line['aware_plan'].rstrip()}")
    print(f"\nload of the machine, which has {os.cpu_count()} cores: {lines[-1]['load']:.1f}")


def main(arguments: Sequence[str]) -> int:
    """The command, which plans and starts the ranks, and the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speeds", nargs="+", default=("3:1", "3:3:1:1"))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--plans", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if is_rank():
        return run_rank(options)
    lines = []
    for speeds in options.speeds:
        for layout in options.layouts:
            print(f"{layout}, {speeds}", file=sys.stderr)
            lines.append(compare(layout, speeds, options.rounds))
    if options.json:
        print_json({"limit": LIMIT, "lines": lines})
    else:
        _show(lines)
    return 0 if all(line["share_of_ideal"] >= LIMIT for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
