"""What latency costs a swarm and a GPipe pipeline of the same model, layout and links, measured: real processes in a lab.

    python benchmarks/latency_lab.py [--json] [--rounds 2] [--round-trips 0 100] [--micro-batch-ms 200]      # needs root or user namespaces

Four stages of one device each, on hosts of their own with interfaces of 500 Mbit/s (a fifth host has the coordinator and the feeder); half
of the round trip is added in each direction between any two hosts. The swarm is started as users start it (`atoll run --mode swarm`: TLS,
a journal, every sample once). GPipe is PyTorch's own `ScheduleGPipe` over Gloo, without TLS. Both train the same blocks from the same
weights on the same batches, and their losses must agree; both compute at the imposed speed of the same devices, so that four stages
overlap on fewer cores. GPipe may cut a step's batch as it likes: every number of chunks asked for is measured, once with the swarm's
micro-batches; the best for each latency is taken. Layouts and latencies take turns in every round; `kept` is the median over rounds of a
rate divided by the same way's rate without latency in the same round. One step of each is not timed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from imposed_devices import imposed, speed_for
from report import print_json, print_table
from swarm_faults_run import THREADS, SwarmRun
from swarm_faults_setup import Setup

from atoll.cluster import dump_cluster
from atoll.cluster.cluster import Cluster
from atoll.graph import Graph
from atoll.graph.capture import capture_program
from atoll.lab import Lab
from atoll.plan import Plan, Replica, Stage, to_text
from atoll.script import load_job

HERE = Path(__file__).parent
SCRIPT, GPIPE = HERE / "latency_lab_job.py", HERE / "latency_lab_gpipe.py"
STAGES, MICRO_BATCH = 4, 2
HOSTS = [f"here-{number}" for number in range(1, 1 + STAGES)]
CLUSTER = """
name = "far-apart"
[[site]]
name = "here"
network = {{ bandwidth = "{megabits:g} Mbit/s", latency = "{latency_us:g} us" }}
  [[site.host]]
  count = {hosts}
  devices = [{{ kind = "imposed" }}]
"""
NO_LATENCY_US = 50.0  # what a bridge has; nothing is added
GPIPE_SECONDS = 600.0
TRAINED = 2  # steps of each, without the one that is not timed
MOST_DIFFERENCE = 1e-3
ASKED_SWARM, ASKED_GPIPE = 0.9, 0.5


class Bench:
    """What all runs have in common."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.batch = MICRO_BATCH * options.micro_batches
        self.chunks = sorted({options.micro_batches, *options.chunks})
        self.arguments = (str(1 + TRAINED), str(self.batch), str(MICRO_BATCH))
        self.job = load_job(SCRIPT, self.arguments)
        self.graph: Graph = capture_program(self.job).graph
        self.bounds: tuple[int, ...] = sys.modules[type(self.job.dataset).__module__].bounds(len(self.graph.layers))
        self.flops = speed_for(
            options.micro_batch_ms / 1e3,
            self.graph,
            self.bounds,
            MICRO_BATCH,
            f"{HOSTS[0]}/0",
            lambda flops: self.cluster(0.0, flops),
            folder / "calibration.toml",
        )

    def cluster(self, round_trip_ms: float, flops: float | None = None) -> Cluster:
        """The hosts with this latency between them."""
        latency = max(NO_LATENCY_US, 1e3 * round_trip_ms / 2)
        sites = CLUSTER.format(megabits=self.options.megabits, latency_us=latency, hosts=1 + STAGES)
        return imposed(sites, self.flops if flops is None else flops)

    def swarm(self, round_trip_ms: float, folder: Path) -> tuple[float, list[float]]:
        """Seconds of a step, and all losses."""
        setup = self._setup(self.cluster(round_trip_ms), folder)
        with SwarmRun(setup) as run:
            run.wait_for_steps(setup.steps)
            run.wait_for_end()
            if run.process.returncode:
                raise SystemExit(f"the swarm failed:\n{run.log.read_text()[-3000:]}")
        events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
        steps = [event for event in events if event["event"] == "step_finished"]
        return (steps[-1]["at_seconds"] - steps[0]["at_seconds"]) / TRAINED, [step["loss"] for step in steps]

    def _setup(self, cluster: Cluster, folder: Path) -> Setup:
        folder.mkdir(parents=True)
        replicas = [(Replica(devices=(f"{host}/0",), samples=(self.batch,)),) for host in HOSTS]
        stages = tuple(Stage(start=self.bounds[s], stop=self.bounds[s + 1], replicas=replicas[s]) for s in range(STAGES))
        plan = Plan(
            graph=self.job.name, cluster=cluster.name, batch_size=self.batch, micro_batch_size=MICRO_BATCH, stages=stages, mode="swarm"
        )
        (folder / "swarm.plan").write_text(to_text(plan))
        return Setup(
            folder=folder,
            cluster=cluster,
            plan=folder / "swarm.plan",
            script=SCRIPT,
            arguments=self.arguments,
            steps=1 + TRAINED,
            micro_batches=self.options.micro_batches,
            stages=STAGES,
            head="here-0",
            hosts=tuple(HOSTS),
        )

    def gpipe(self, round_trip_ms: float, folder: Path) -> dict[int, tuple[float, list[float]]]:
        """For each number of chunks: seconds of a step, and all losses."""
        folder.mkdir(parents=True)
        cluster = self.cluster(round_trip_ms)
        file = folder / "cluster.toml"
        file.write_text(dump_cluster(cluster))
        with Lab(cluster, namespaces=True) as lab:
            environ = {**THREADS, "MASTER_ADDR": lab.address(HOSTS[0])}
            words = [str(TRAINED), str(self.batch), str(MICRO_BATCH), ",".join(map(str, self.chunks))]
            ranks = [
                lab.start(
                    host,
                    [sys.executable, str(GPIPE), str(rank), str(file), f"{host}/0", *words],
                    environ=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for rank, host in enumerate(HOSTS)
            ]
            ends = [rank.communicate(GPIPE_SECONDS) for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise SystemExit("GPipe failed:\n" + "\n".join(complaints.decode()[-1500:] for _, complaints in ends))
        rows = [json.loads(line) for line in ends[-1][0].splitlines()]
        return {row["chunks"]: (row["seconds"] / row["steps"], row["losses"]) for row in rows}


def measure_round(bench: Bench, number: int) -> dict[tuple[str, float], float]:
    """Steps a second of everything, by way and round trip."""
    rates: dict[tuple[str, float], float] = {}
    losses: dict[str, list[float]] = {}
    trips = bench.options.round_trips
    for trip in trips if number % 2 == 0 else trips[::-1]:
        folder = bench.folder / f"round-{number}-{trip:g}"
        seconds, losses["swarm"] = bench.swarm(trip, folder / "swarm")
        rates["swarm", trip] = 1 / seconds
        for chunks, (seconds, found) in bench.gpipe(trip, folder / "gpipe").items():
            rates[f"GPipe, {chunks} chunks", trip] = 1 / seconds
            _check_losses(losses["swarm"], found)
        rates["GPipe, best", trip] = max(rate for (way, at), rate in rates.items() if way.startswith("GPipe") and at == trip)
        shown = ", ".join(f"{way} {bench.batch * rate:.3g}/s" for (way, at), rate in rates.items() if at == trip)
        print(f"round {number + 1}, {trip:g} ms: samples {shown}", file=sys.stderr, flush=True)
    return rates


def _check_losses(swarm: list[float], gpipe: list[float]) -> None:
    worst = max(abs(one / other - 1) for one, other in zip(swarm, gpipe, strict=True))
    if worst > MOST_DIFFERENCE:
        raise SystemExit(f"the losses differ by {worst:.2g}: swarm {swarm}, GPipe {gpipe}")


def rows_of(bench: Bench, rounds: list[dict[tuple[str, float], float]]) -> list[dict[str, object]]:
    """One for every way and round trip."""
    still = min(bench.options.round_trips)
    rows: list[dict[str, object]] = []
    for way, trip in rounds[0]:
        kept = [rates[way, trip] / rates[way, still] for rates in rounds]
        rate = statistics.median(rates[way, trip] for rates in rounds)
        ideal = 1e3 / bench.options.micro_batch_ms * MICRO_BATCH  # samples a second of devices that never wait
        row: dict[str, object] = {"way": way, "round_trip_ms": trip, "step_s": 1 / rate, "samples_per_s": bench.batch * rate}
        rows.append(row | {"busy": bench.batch * rate / ideal, "kept": statistics.median(kept), "lowest": min(kept), "highest": max(kept)})
    return sorted(rows, key=lambda row: str(row["way"]))


def _kept(rows: list[dict[str, object]], way: str) -> float:
    """At the longest round trip."""
    return float(str(max((row for row in rows if row["way"] == way), key=lambda row: float(str(row["round_trip_ms"])))["kept"]))


def main() -> int:
    """Exit code 1 where the swarm keeps less than asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--round-trips", type=float, nargs="+", default=[0.0, 100.0], help="ms; half of it is added in each direction")
    parser.add_argument("--megabits", type=float, default=500.0, help="a second, of every host's interface")
    parser.add_argument("--micro-batch-ms", type=float, default=200.0, help="forward and backward of a stage, imposed")
    parser.add_argument("--micro-batches", type=int, default=48, help="of a step, for the swarm")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[8, 16], help="that GPipe cuts a step into, besides the swarm's micro-batches"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        rows = rows_of(bench, [measure_round(bench, number) for number in range(options.rounds)])
    kept = {way: _kept(rows, way) for way in ("swarm", "GPipe, best", f"GPipe, {options.micro_batches} chunks")}
    parameters = {"stages": STAGES, "samples_of_a_micro_batch": MICRO_BATCH, **vars(options), "device_flops": bench.flops}
    if options.json:
        print_json(
            {"parameters": parameters, "rows": rows, "kept": kept, "asked_swarm": ASKED_SWARM, "asked_gpipe": ASKED_GPIPE, "load": load}
        )
    else:
        title = f"Latency hiding in a lab: the swarm is to keep {ASKED_SWARM:g} where GPipe keeps {ASKED_GPIPE:g}"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])
        print(f"\nload of the machine before, which has {os.cpu_count()} cores: {load:.1f}")
    return 0 if kept["swarm"] >= ASKED_SWARM else 1


if __name__ == "__main__":
    sys.exit(main())
