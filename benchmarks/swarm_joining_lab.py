"""Machines that join one stage at once, for real: how soon they are of use, and what they cost those who train. Processes in a lab.

    python benchmarks/swarm_joining_lab.py [--json] [--workers 8] [--joiners 16]      # needs root or user namespaces, and 0.4 GB a process

A stage of eight workers on hosts of their own, 100 Mbit/s each; all joiners run `atoll join`, each on its own host, which is cut off
when they have enrolled, until all have captured the model. Compute is real and small, its time imposed. All processes share
this machine's cores, so joiners have the lowest priority (`nice`): what they compute to join would be taken from those who train, which
machines of their own would not do. Of use is a joiner that has finished its first micro-batch; counted from being connected, against
copying the stage's bytes over its link or, where that is more, all joiners' bytes over the links of the eight. `slowed` compares the
stage's throughput in the steps from the one in which joiners are let go to the one in which all were of use with that of the step before;
beside it stands how much of the time the eight were computing.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from imposed_devices import imposed, speed_for
from report import print_json, print_table
from swarm_faults_run import ATOLL, JOIN, THREADS, SwarmRun
from swarm_faults_setup import Setup

from atoll.cluster import dump_cluster
from atoll.graph.capture import capture_program
from atoll.lab.lab import LabProcess
from atoll.plan import Plan, Replica, Stage, to_text
from atoll.runtime.modes.swarm.report import Measured, read_members
from atoll.runtime.run_directory import RunDirectory
from atoll.script import load_job

SCRIPT = Path(__file__).with_name("latency_lab_job.py")
WIDTH, MICRO_BATCH, MICRO_BATCH_SECONDS = 192, 2, 1.0
BYTES_PER_S = 12.5e6
CLUSTER = """
name = "one-stage"
[[site]]
name = "here"
network = {{ bandwidth = "100 Mbit/s", latency = "50 us" }}
  [[site.host]]
  count = {hosts}
  devices = [{{ kind = "imposed" }}]
"""
ENROLLED, READY = re.compile(r"^Working for", re.MULTILINE), re.compile(r"the model is captured \(")
STEPS_BEFORE = 1
LIMIT_SECONDS = 600.0
AT_ONCE = 2  # joiners that load PyTorch and capture the model at a time
MOST_SLOWED, MOST_COPIES = 0.2, 2.0


def prepare(folder: Path, workers: int, joiners: int, step_seconds: float) -> Setup:
    """Cluster and plan of a swarm that goes on for longer than is needed."""
    micro_batches = round(workers * step_seconds / MICRO_BATCH_SECONDS)
    arguments = ("1000", str(MICRO_BATCH * micro_batches), str(MICRO_BATCH), str(WIDTH))
    job = load_job(SCRIPT, arguments)
    graph = capture_program(job).graph
    file, whole = folder / "cluster.toml", (0, len(graph.layers))
    described = partial(imposed, CLUSTER.format(hosts=1 + workers + joiners))
    cluster = described(speed_for(MICRO_BATCH_SECONDS, graph, whole, MICRO_BATCH, "here-0/0", described, file))
    file.write_text(dump_cluster(cluster))
    hosts = tuple(f"here-{number}" for number in range(1, 1 + workers))
    replicas = tuple(Replica(devices=(f"{host}/0",), samples=(job.batch_size // workers,)) for host in hosts)
    stage = Stage(start=0, stop=len(graph.layers), replicas=replicas)
    plan = Plan(
        graph=job.name, cluster=cluster.name, batch_size=job.batch_size, micro_batch_size=MICRO_BATCH, stages=(stage,), mode="swarm"
    )
    (folder / "swarm.plan").write_text(to_text(plan))
    return Setup(
        folder=folder,
        cluster=cluster,
        plan=folder / "swarm.plan",
        script=SCRIPT,
        arguments=arguments,
        steps=1000,
        micro_batches=micro_batches,
        stages=1,
        head="here-0",
        hosts=hosts,
    )


class Joining:
    """The run and those who join it."""

    def __init__(self, run: SwarmRun, workers: int, joiners: int) -> None:
        self.run = run
        self.mates = [f"worker-{number}" for number in range(workers)]
        self.names = [f"joiner-{number}" for number in range(joiners)]
        self.hosts = [f"here-{1 + workers + number}" for number in range(joiners)]
        self._processes: dict[str, LabProcess] = {}

    def accounts(self) -> dict[str, Measured]:
        """What members say of themselves, every two seconds."""
        return read_members(RunDirectory(self.run.directory))

    def done(self) -> tuple[float, float]:
        """Micro-batches that those of the beginning have computed, and worker-seconds they were there: one moment for each."""
        own = [account for name, account in self.accounts().items() if name in self.mates]
        return sum(kernels.turns for account in own for kernels in account.kernels.values()), sum(account.seconds for account in own)

    def hold(self) -> None:
        """Starts all joiners and pulls the cable of each as soon as it has enrolled, until all have captured the model."""
        found = JOIN.search(self.run.log.read_text())
        assert found is not None
        to_start, starting = list(zip(self.names, self.hosts, strict=True)), {}
        cut: set[str] = set()
        until = time.monotonic() + LIMIT_SECONDS
        while to_start or starting:
            if time.monotonic() > until:
                raise SystemExit(f"{len(to_start) + len(starting)} joiners did not enrol and capture the model within {LIMIT_SECONDS:g} s")
            while to_start and len(starting) < AT_ONCE:
                name, host = to_start.pop(0)
                starting[name] = host
                command = ["nice", "-n", "19", *ATOLL, "join", found[1], "--token", found[2], "--name", name, "--timeout", "600"]
                with self._log(name).open("wb") as out:
                    self._processes[name] = self.run.lab.start(host, command, environ=THREADS, stdout=out, stderr=out)
            for name in [name for name in starting if name not in cut and ENROLLED.search(self._log(name).read_text())]:
                self.run.lab.cut(starting[name])
                cut.add(name)
            for name in [name for name in starting if READY.search(self._log(name).read_text())]:
                del starting[name]
            self.run.follow(0.1)

    def let_go(self) -> None:
        """All at once."""
        self.run.lab.restore()

    def wait(self) -> dict[str, Measured]:
        """Until all are of use, or too long."""
        until = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until:
            useful = {name: account for name, account in self.accounts().items() if name in self.names and account.work_seconds is not None}
            if len(useful) == len(self.names):
                break
            self.run.follow(0.5)
        return useful

    def _log(self, name: str) -> Path:
        return self.run.setup.folder / f"{name}.log"


def measure(workers: int, joiners: int, step_seconds: float, folder: Path) -> dict[str, object]:
    """One row."""
    with SwarmRun(prepare(folder, workers, joiners, step_seconds)) as run:
        joining = Joining(run, workers, joiners)
        print("waiting for the first step", file=sys.stderr, flush=True)
        run.wait_for_steps(1)
        print(f"starting {joiners} joiners, {AT_ONCE} at a time", file=sys.stderr, flush=True)
        joining.hold()  # loading PyTorch sixteen times is over before anything is measured
        steps = len(run.commits)
        run.wait_for_steps(steps + 1)
        first = joining.done()
        run.wait_for_steps(steps + 1 + STEPS_BEFORE)
        before = joining.done()
        print("letting them go", file=sys.stderr, flush=True)
        joining.let_go()
        come = len(run.commits)
        useful = joining.wait()
        run.wait_for_steps(len(run.commits) + 1)
        during = joining.done()
        times = [at for at, _ in run.commits]
    rates = [(later[0] - sooner[0]) / (later[1] - sooner[1]) for sooner, later in ((first, before), (before, during))]
    before_seconds = (times[come - 1] - times[come - 1 - STEPS_BEFORE]) / STEPS_BEFORE
    during_seconds = (times[-1] - times[come - 1]) / (len(times) - come)
    state = max((account.state_bytes for account in useful.values()), default=0)
    copying = state / BYTES_PER_S * max(1.0, joiners / workers)
    work = sorted(account.work_seconds or 0.0 for account in useful.values())
    return {
        "joiners": joiners,
        "of_use": len(useful),
        "state_mb": state / 1e6,
        "copying_s": copying,
        "state_after_s": max((account.state_seconds or 0.0 for account in useful.values()), default=float("inf")),
        "of_use_after_s": work[-1] if work else float("inf"),
        "median_of_use_after_s": statistics.median(work) if work else float("inf"),
        "of_use_in_copies": work[-1] / copying if work else float("inf"),
        "step_before_s": before_seconds,
        "step_during_s": during_seconds,
        "slowed": 1 - before_seconds / during_seconds,
        "share_of_time_at_work_before": MICRO_BATCH_SECONDS * rates[0],
        "share_of_time_at_work_during": MICRO_BATCH_SECONDS * rates[1],
    }


def main() -> int:
    """Exit code 1 where they come later or cost more than asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--joiners", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=40.0, help="of compute, about, with the workers of the beginning")
    parser.add_argument("--keep", type=Path, help="leave the run's directory and the logs here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        row = measure(options.workers, options.joiners, options.step_seconds, folder)
    met = (
        float(str(row["slowed"])) <= MOST_SLOWED and float(str(row["of_use_in_copies"])) <= MOST_COPIES and row["of_use"] == options.joiners
    )
    if options.json:
        print_json({"met": met, "slowed_at_most": MOST_SLOWED, "copies_at_most": MOST_COPIES, "row": row, "load_before": load})
    else:
        print_table(
            f"Joining at once, in a lab (load before: {load:.1f})", ("", "measured"), [[name, value] for name, value in row.items()]
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
