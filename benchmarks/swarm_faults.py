"""A swarm of real processes in a lab, with everything going wrong: is every sample counted once, and how fast is it all the same?

Eight workers on hosts of their own at two sites (200 Mbit/s, 30 ms each way), started by `atoll run --mode swarm`. After a time without
faults a worker is killed (SIGKILL) every 30 s and another joins with `atoll join`; once a worker is stopped for 10 s (SIGSTOP, SIGCONT),
once the sites are cut from each other for 10 s, once the coordinator is killed. Training ends by itself. Compute is real and small; its
time is imposed (eight devices on few cores), so what is measured is the protocol, the network and the recovery.

    python benchmarks/swarm_faults.py [--minutes 10] [--workers 8] [--json]          # needs root or user namespaces

Compared: weights with a plain single-process PyTorch loop; every committed step's weight with the sum of its samples' (each sample has one
of its own); throughput per live worker with faults against that of the same run before the first. A worker is live from when it has
joined until it is killed, without the time it stands still or is cut off. A join's time counts from its connection (imports and the
capture of the model are given beside it) to its first micro-batch, against copying the stage's bytes over the joiner's links.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
from report import print_json, print_table
from swarm_faults_run import Measurements, SwarmRun, judge
from swarm_faults_setup import prepare

FAULT_FREE_SECONDS = 30.0
KILL_EVERY_SECONDS = 30.0
STOP_SECONDS = CUT_SECONDS = 10.0


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
    run.wait_for_steps(1)
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


def show(found: Measurements) -> None:
    """The table."""
    rows = [[name, value, target] for name, value, target in found.rows()]
    print_table("A swarm with faults, 2 sites, 200 Mbit/s, 30 ms", ("", "measured", "asked"), rows)
    print_table("What went wrong, and how long until the next step was committed", ("at s", "what", "next commit after s"), found.faults)
    if found.joins:
        header = ("worker", "until joined s", "state MB", "copy alone s", "state s", "first work s", "times the copy")
        print_table("Joins", header, [list(row.values()) for row in found.joins])


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
        found = measure(options.minutes, options.workers, options.keep or Path(temporary))
    if options.json:
        print_json({**found.as_dict(), "load_before": load, "load_after": os.getloadavg()[0]})
    else:
        show(found)
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
