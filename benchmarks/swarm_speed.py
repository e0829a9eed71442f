"""A swarm without faults against the lockstep pipeline of the same layout: two stages, one worker each, the same micro-batches.

    python benchmarks/swarm_speed.py [--json] [--shapes medium wide] [--rounds 5] [--steps 12]

Both are started as users start them (`atoll run`), one after the other in every round, in an order that turns. A step's time is taken from
the run's events, without the first steps, in which processes warm up; the ratio is the median over rounds. Workers of a swarm have malloc
keep what is freed; lockstep's are given the same by the environment. A swarm has a coordinator and
a feeder besides its workers, which share the machine's cores with them; it keeps a journal, and its messages are TLS. Their losses must
agree. Limit: 90% of lockstep's throughput.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep_models import SHAPES
from report import print_json, print_table

ROOT = Path(__file__).parents[1]
BATCH, MICRO_BATCHES, WARM = 16, 8, 4
PLAN = """plan v1 graph=gpt cluster=here mode={mode} schedule=1f1b batch={batch} micro_batch={micro}
stage 0: layers 0-{last}: h/0={batch}
stage 1: layers {first}-{end}: h/1={batch}
"""


MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}  # as runtime/memory.py


def plan(mode: str, layers: int) -> str:
    """Two stages with half of the blocks each; the second has the head too, so it gets fewer where there are many."""
    end = layers + 1  # an embedding before, a head after
    first = (layers + 2 + 1) // 2 + 1 if layers > 4 else (layers + 2) // 2
    return PLAN.format(mode=mode, batch=BATCH, micro=BATCH // MICRO_BATCHES, last=first - 1, first=first, end=end)


def run(mode: str, shape: str, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of a step, and the last loss."""
    out = folder / mode
    (folder / f"{mode}.plan").write_text(plan(mode, SHAPES[shape].layers))
    command = [sys.executable, "-c", "from atoll.cli import main; main()", "run", str(ROOT / "benchmarks" / "swarm_speed_job.py")]
    options = ["--plan", str(folder / f"{mode}.plan"), "--mode", mode, "--out", str(out), "--", shape, str(BATCH), str(steps)]
    environment = {**os.environ, **(MALLOC if mode == "lockstep" else {})}
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{mode} failed:\n{done.stderr[-3000:]}")
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    finished = [event for event in events if event["event"] == "step_finished"]
    seconds = (finished[-1]["at_seconds"] - finished[WARM - 1]["at_seconds"]) / (len(finished) - WARM)
    return seconds, finished[-1]["loss"]


def measure(shape: str, rounds: int, steps: int) -> dict[str, object]:
    """One row of the table."""
    times: dict[str, list[float]] = {"lockstep": [], "swarm": []}
    losses: dict[str, float] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for mode in ("lockstep", "swarm") if number % 2 == 0 else ("swarm", "lockstep"):
                seconds, losses[mode] = run(mode, shape, steps, Path(folder))
                times[mode].append(seconds)
        print(f"{shape}, round {number + 1}: {times['lockstep'][-1] / times['swarm'][-1]:.3f}", file=sys.stderr, flush=True)
    if abs(losses["swarm"] / losses["lockstep"] - 1) > 1e-4:
        sys.exit(f"{shape}: the losses differ: {losses}")
    ratios = [lockstep / swarm for lockstep, swarm in zip(times["lockstep"], times["swarm"], strict=True)]
    return {
        "shape": shape,
        "lockstep_ms": 1e3 * statistics.median(times["lockstep"]),
        "swarm_ms": 1e3 * statistics.median(times["swarm"]),
        "throughput_share": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "loss": losses["swarm"],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=("medium", "wide"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    rows = [measure(shape, options.rounds, options.steps) for shape in options.shapes]
    if options.json:
        print_json({"rows": rows, "limit": 0.9, "load": os.getloadavg()[0]})
        return
    print_table(
        "a swarm's throughput as a share of the lockstep pipeline's (limit: 0.9)", list(rows[0]), [list(row.values()) for row in rows]
    )
    print(f"\nload of the machine, which has {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
