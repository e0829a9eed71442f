"""What several devices that are one worker add to a swarm, measured: real processes in a lab.

    python benchmarks/swarm_group.py [--json] [--rounds 2] [--devices 1 2 4] [--micro-batch-ms 400]      # needs root or user namespaces

Two stages on two hosts with 1 Gbit/s; each host is one worker with so many devices, which share every micro-batch's samples. Devices have
an imposed speed, so that they overlap on fewer cores: what is measured is what dividing, joining and adding up cost, not what cores can do.
Weights after all steps are compared with plain PyTorch. Numbers of devices take turns in every round; `faster` is the median over rounds of
a rate divided by that of one device in the same round. One step of each is not timed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from imposed_devices import imposed, speed_for
from report import print_json, print_table
from swarm_faults_run import SwarmRun, weights_difference
from swarm_faults_setup import Setup, reference

from atoll.cluster import dump_cluster
from atoll.cluster.cluster import Cluster
from atoll.graph.capture import capture_program
from atoll.plan import Plan, Replica, Stage, to_text
from atoll.script import load_job

SCRIPT = Path(__file__).with_name("swarm_faults_job.py")
WIDTH, MICRO_BATCH, TRAINED = 128, 8, 3
HOSTS = ("here-1", "here-2")
CLUSTER = """
name = "groups"
[[site]]
name = "here"
network = {{ bandwidth = "1 Gbit/s", latency = "50 us" }}
  [[site.host]]
  count = 3
  devices = [{{ kind = "imposed", count = {devices} }}]
  link = {{ bandwidth = "16 GB/s", latency = "10 us" }}
"""
MOST_DIFFERENCE = 1e-5


class Bench:
    """What all runs have in common."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, (str(1 + TRAINED), str(WIDTH), str(MICRO_BATCH))
        self.job = load_job(SCRIPT, self.arguments)
        graph = capture_program(self.job).graph
        layers = len(graph.layers)
        self.bounds = (0, layers // 2, layers)
        alone = partial(imposed, CLUSTER.format(devices=1))
        seconds = options.micro_batch_ms / 1e3
        self.flops = speed_for(seconds, graph, self.bounds, MICRO_BATCH, f"{HOSTS[0]}/0", alone, folder / "calibration.toml")

    def measure(self, devices: int, folder: Path) -> tuple[float, float]:
        """Seconds of a step, and how far the weights are from the reference."""
        setup = self._setup(imposed(CLUSTER.format(devices=devices), self.flops), devices, folder)
        with SwarmRun(setup) as run:
            run.wait_for_steps(setup.steps)
            run.wait_for_end()
            if run.process.returncode:
                raise SystemExit(f"the swarm failed:\n{run.log.read_text()[-3000:]}")
        events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
        moments = [event["at_seconds"] for event in events if event["event"] == "step_finished"]
        return (moments[-1] - moments[0]) / TRAINED, weights_difference(run, reference(setup)[2])

    def _setup(self, cluster: Cluster, devices: int, folder: Path) -> Setup:
        folder.mkdir(parents=True)
        batch = self.job.batch_size
        samples = (batch // devices,) * devices
        stages = tuple(
            Stage(start=start, stop=stop, replicas=(Replica(devices=tuple(f"{host}/{d}" for d in range(devices)), samples=samples),))
            for host, start, stop in zip(HOSTS, self.bounds, self.bounds[1:], strict=False)
        )
        plan = Plan(graph=self.job.name, cluster=cluster.name, batch_size=batch, micro_batch_size=MICRO_BATCH, stages=stages, mode="swarm")
        (folder / "swarm.plan").write_text(to_text(plan))
        (folder / "cluster.toml").write_text(dump_cluster(cluster))
        return Setup(
            folder=folder,
            cluster=cluster,
            plan=folder / "swarm.plan",
            script=SCRIPT,
            arguments=self.arguments,
            steps=1 + TRAINED,
            micro_batches=batch // MICRO_BATCH,
            stages=len(stages),
            head="here-0",
            hosts=HOSTS,
        )


def main() -> int:
    """Exit code 1 where weights differ from the reference's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4, 8))
    parser.add_argument("--micro-batch-ms", type=float, default=400.0, help="of one device, forward and backward of a stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    counts = sorted({1, *options.devices})
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    differences: dict[int, float] = dict.fromkeys(counts, 0.0)
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), options)
        for number in range(options.rounds):
            for count in counts:
                print(f"round {number + 1} of {options.rounds}: {count} devices a worker", file=sys.stderr)
                step, difference = bench.measure(count, Path(temporary) / f"{number}-{count}")
                seconds[count].append(step)
                differences[count] = max(differences[count], difference)
    rows = [
        {
            "devices": count,
            "step_s": statistics.median(seconds[count]),
            "faster": statistics.median(one / own for one, own in zip(seconds[1], seconds[count], strict=True)),
            "difference": differences[count],
        }
        for count in counts
    ]
    if options.json:
        print_json({"rows": rows, "load_before": load})
    else:
        print_table(f"Devices of a worker (load before: {load:.1f})", tuple(rows[0]), [list(row.values()) for row in rows])
    return 0 if max(differences.values()) <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
