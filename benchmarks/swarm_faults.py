"""A swarm of real processes in a lab, with everything going wrong: is every sample counted once, and how fast is it all the same?

Eight workers on hosts of their own at two sites (200 Mbit/s, 30 ms each way), started by `atoll run --mode swarm`. After a time without
faults a worker is killed (SIGKILL) every 30 s and another joins with `atoll join`; once a worker is stopped for 10 s (SIGSTOP, SIGCONT),
once the sites are cut from each other for 10 s, once the coordinator is killed. Training ends by itself. Compute is real and small; its
time is imposed (eight devices on few cores), so what is measured is the protocol, the network and the recovery.

    python benchmarks/swarm_faults.py [--minutes 10] [--workers 8] [--json]          # needs root or user namespaces
    python benchmarks/swarm_faults.py --minutes 0                                    # joins only

Compared: weights with a plain single-process PyTorch loop; every committed step's weight with the sum of its samples' (each sample has one
of its own); throughput per live worker with faults against that of the same run before the first. A worker is live from when it has
joined until it is killed, without the time it stands still or is cut off.

How long a join takes is measured in a swarm of its own, with larger stages: two workers at one site, and machines that join at the
other, so that all they need comes over the slow link. Counted from being connected to the first micro-batch, against copying the stage's
bytes over that link; the time until it is connected (imports, enrolment, the capture of the model) stands beside it.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
from report import print_json, print_table
from swarm_faults_run import Measurements, SwarmRun, join_row, judge
from swarm_faults_setup import BETWEEN_BYTES_PER_S, prepare

FAULT_FREE_SECONDS = 30.0
KILL_EVERY_SECONDS = 30.0
STOP_SECONDS = CUT_SECONDS = 10.0
JOINS, JOIN_WIDTH, JOIN_TIMES_COPY, JOIN_LIMIT_SECONDS = 2, 640, 2.0, 120.0


def schedule(minutes: float) -> list[tuple[float, str]]:
    """What goes wrong when, in seconds after the time without faults."""
    whole = 60.0 * minutes
    kills = [(at, "kill") for at in _every(0.0, whole, KILL_EVERY_SECONDS)]
    return sorted([*kills, (0.25 * whole, "stop"), (0.5 * whole + 5.0, "cut"), (0.75 * whole, "kill coordinator")])


def _every(start: float, stop: float, step: float) -> list[float]:
    return [start + index * step for index in range(int((stop - start) / step))]


def play(run: SwarmRun, minutes: float) -> None:
    """The whole run."""
    draw = random.Random(0)
    print("waiting for the first step", file=sys.stderr, flush=True)
    run.wait_for_steps(1)
    print(f"{FAULT_FREE_SECONDS:g} s without faults", file=sys.stderr, flush=True)
    run.follow(FAULT_FREE_SECONDS)
    began = run.now()
    run.faults_from = began
    for at, what in schedule(minutes):
        run.follow(began + at - run.now())
        if run.over:
            return
        if what == "kill":
            run.replace(draw.choice(run.live_workers()))
        elif what == "stop":
            run.stop(draw.choice(run.live_workers()), STOP_SECONDS)
        elif what == "cut":
            run.cut(CUT_SECONDS)
        else:
            run.kill_coordinator()
    run.follow(began + 60.0 * minutes - run.now())
    run.wait_for_end()


def measure(minutes: float, workers: int, folder: Path) -> Measurements:
    """In a lab of its own."""
    setup = prepare(folder, workers, FAULT_FREE_SECONDS + 60.0 * minutes)
    with SwarmRun(setup) as run:
        play(run, minutes)
        return judge(run)


def measure_joins(folder: Path) -> list[dict[str, object]]:
    """Two machines join, one after the other."""
    setup = prepare(folder, 2, 600.0, width=JOIN_WIDTH, rome=0)
    rows = []
    with SwarmRun(setup) as run:
        print("joins: waiting for the first step", file=sys.stderr, flush=True)
        run.wait_for_steps(1)
        for number in range(JOINS):
            print(f"joins: {number + 1} of {JOINS}", file=sys.stderr, flush=True)
            worker, row = run.join("rome-0"), None
            until = run.now() + JOIN_LIMIT_SECONDS
            while row is None and run.now() < until:
                run.follow(1.0)
                row = join_row(run, worker, BETWEEN_BYTES_PER_S)
            rows.append(row or {"worker": worker.name, "failed": f"not of use within {JOIN_LIMIT_SECONDS:g} s"})
            run.leave(worker)
    return rows


def show(found: Measurements) -> None:
    """The table."""
    rows = [[name, value, target] for name, value, target in found.rows()]
    print_table("A swarm with faults, 2 sites, 200 Mbit/s, 30 ms", ("", "measured", "asked"), rows)
    print_table("What went wrong, and how long until the next step was committed", ("at s", "what", "next commit after s"), found.faults)
    if found.joins:
        show_joins("Joins meanwhile; copying over 1 Gbit/s (where a step is about to end, its work begins with the next)", found.joins)


def show_joins(title: str, rows: list[dict[str, object]]) -> None:
    """As a table."""
    print_table(title, [name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def main() -> int:
    """Exit code 1 where something asked for was not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="leave the run's directory and the logs here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        joins = measure_joins(folder / "joins")
        found = measure(options.minutes, options.workers, folder / "faults") if options.minutes > 0 else None
    met = all(float(str(row.get("times_copy", "inf"))) <= JOIN_TIMES_COPY for row in joins) and (found is None or found.met)
    if options.json:
        faults = found.as_dict() if found is not None else None
        print_json({"joins": joins, "faults": faults, "met": met, "load_before": load, "load_after": os.getloadavg()[0]})
    else:
        show_joins(f"Joins over 200 Mbit/s; asked: at most {JOIN_TIMES_COPY:g} times the copy", joins)
        if found is not None:
            show(found)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
