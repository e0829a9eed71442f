"""How long it takes to a validation loss over a slow link: mode islands against DDP with gradients in fp32 and in fp16, in a lab.

    python benchmarks/islands.py --step-seconds 20      # how long a step takes instead, with gradients between sites every step
    python benchmarks/islands.py [--json] [--megabits 100 20] [--rates 1e-3 2e-3 3e-3] [--seeds 0] [--target 2.2]      # needs root

Two sites of two processes each, 20 ms there and back between them; DDP also where the link is a LAN's. All train the same model on the same
batches with the same learning rates, of which each way's best counts; the first rank evaluates every so many steps, in all of them. What a
loss is worth is the time since the first step began. Islands are started as users start them (`atoll run --mode islands`): TLS, a journal,
H, τ, codec and outer rates as the links say, unless `--islands` has options for them.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from report import print_json, print_table

from atoll.cluster.file import parse_cluster
from atoll.lab import Lab

HERE = Path(__file__).parent
JOB, DDP = HERE / "islands_job.py", HERE / "islands_ddp.py"
ATOLL = (sys.executable, "-c", "from atoll.cli import main; main()")
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CLUSTER = """name = "two-sites"
[[site]]
name = "oslo"
network = {{ bandwidth = "10 Gbit/s", latency = "50 us" }}
  [[site.host]]
  name = "o"
  devices = [{{ kind = "core", count = 2 }}]
[[site]]
name = "rome"
network = {{ bandwidth = "10 Gbit/s", latency = "50 us" }}
  [[site.host]]
  name = "r"
  devices = [{{ kind = "core", count = 2 }}]
[[link]]
between = ["oslo", "rome"]
bandwidth = "{megabits:g} Mbit/s"
latency = "{latency_ms:g} ms"
[[device_kind]]
name = "core"
cpu = true
memory = "4 GB"
memory_bandwidth = "10 GB/s"
link = {{ bandwidth = "5 GB/s", latency = "10 us" }}
flops = {{ fp32 = "{gigaflops:g} GFLOPS" }}
"""
_SYNCHRONOUS = ("DDP", "DDP fp16", "none", "bf16", "int8", "int4", "2-bit")
_WARM = 3  # steps
LAN_MEGABITS, LAN_MS, LINK_MS = 10_000.0, 0.1, 10.0
SECONDS = 3600.0

Curve = list[tuple[float, int, float]]
"""(seconds, step, loss) of every evaluation."""


def seconds_to(curve: Curve, target: float) -> tuple[float, int]:
    """When the loss was reached first, and after how many steps; never is infinite."""
    return next(((seconds, step) for seconds, step, loss in curve if loss <= target), (math.inf, 0))


def ddp(options: argparse.Namespace, megabits: float, latency_ms: float, hook: str, rate: float, seed: int) -> Curve:
    """A curve of DDP."""
    arguments = [str(options.steps), str(options.batch), str(rate), str(seed), str(options.every)]
    with Lab(parse_cluster(CLUSTER.format(megabits=megabits, latency_ms=latency_ms, gigaflops=options.gigaflops)), namespaces=True) as lab:
        meeting = {"MASTER_ADDR": lab.address("o"), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = []
        for rank, host in enumerate(("o", "o", "r", "r")):
            place = {"RANK": str(rank), "WORLD_SIZE": "4", **meeting}
            command = [sys.executable, str(DDP), hook, str(options.target), *arguments]
            ranks.append(lab.start(host, command, environ={**THREADS, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        ends = [rank.communicate(SECONDS) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("DDP failed:\n" + "\n".join(complaints.decode()[-1500:] for _, complaints in ends))
    rows = [json.loads(line) for line in ends[0][0].splitlines()]
    return [(row["seconds"], row["step"], row["loss"]) for row in rows]


def islands(options: argparse.Namespace, megabits: float, rate: float, seed: int, folder: Path) -> Curve:
    """A curve of mode islands: the first site's own log has its steps and its evaluations."""
    cluster, run = CLUSTER.format(megabits=megabits, latency_ms=LINK_MS, gigaflops=options.gigaflops), folder / "run"
    (folder / "c.toml").write_text(cluster)
    arguments = [str(options.steps), str(options.batch), str(rate), str(seed), str(options.every)]
    command = [*ATOLL, "run", str(JOB), "-c", str(folder / "c.toml"), "--mode", "islands", *options.islands.split(), "--out", str(run)]
    with Lab(parse_cluster(cluster), namespaces=True) as lab, (folder / "log").open("wb") as log:
        process = lab.start("o", [*command, "--", *arguments], environ=THREADS, stdout=log, stderr=log)
        process.communicate(SECONDS)
    if process.returncode:
        raise SystemExit(f"islands failed:\n{(folder / 'log').read_text()[-3000:]}")
    events = [json.loads(line) for line in (run / "sites" / "oslo" / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "step_finished")
    began = first["at_seconds"] - first["seconds"]
    return [(event["at_seconds"] - began, event["step"], event["loss"]) for event in events if event["event"] == "evaluated"]


def step_seconds(options: argparse.Namespace) -> None:
    """The median over some steps of every way that exchanges gradients in each of them, the first ones left out."""
    rows = []
    options.target, options.steps, options.every = 0.0, options.step_seconds + _WARM, 10**6
    for way, megabits in [("DDP on a LAN", LAN_MEGABITS), *((way, megabits) for megabits in options.megabits for way in _SYNCHRONOUS)]:
        with tempfile.TemporaryDirectory() as folder:
            if way.startswith("DDP"):
                curve = ddp(options, megabits, LAN_MS if "LAN" in way else LINK_MS, "fp16" if "fp16" in way else "none", 1e-3, 0)
                ends = [seconds for seconds, _, _ in curve]
            else:
                options.islands = f"--exchange gradients --outer-codec {way}"
                islands(options, megabits, 1e-3, 0, Path(folder))
                lines = (Path(folder) / "run" / "sites" / "oslo" / "events.jsonl").read_text().splitlines()
                ends = [event["at_seconds"] for event in map(json.loads, lines) if event["event"] == "step_finished"]
        took = sorted(after - before for before, after in pairwise(ends[_WARM - 1 :]))
        rows.append({"way": way, "megabits": megabits, "median": statistics.median(took), "least": took[0], "most": took[-1]})
        print(rows[-1], file=sys.stderr, flush=True)
    if options.json:
        print_json({"benchmark": "islands step seconds", "rows": rows})
        return
    print_table("seconds of a step", ("way", "Mbit/s", "median", "least", "most"), [list(row.values()) for row in rows])


def best(options: argparse.Namespace, way: str, megabits: float) -> dict[str, object]:
    """The learning rate that is fastest over all seeds, and how fast."""
    found = []
    for rate in options.rates:
        times = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                if way == "islands":
                    curve = islands(options, megabits, rate, seed, Path(folder))
                else:
                    curve = ddp(options, megabits, LAN_MS if "LAN" in way else LINK_MS, "fp16" if "fp16" in way else "none", rate, seed)
            times.append(seconds_to(curve, options.target))
            print(
                f"{way}, {megabits:g} Mbit/s, {rate:g}, seed {seed}: {times[-1][0]:.1f} s, {times[-1][1]} steps",
                file=sys.stderr,
                flush=True,
            )
        found.append((statistics.median(seconds for seconds, _ in times), rate, statistics.median(step for _, step in times)))
    seconds, rate, steps = min(found)
    return {"way": way, "megabits": megabits, "seconds": seconds, "steps": steps, "learning_rate": rate}


def main() -> None:
    """Run all, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabits", type=float, nargs="+", default=[100.0, 20.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 3e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=2.2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--gigaflops", type=float, default=8.0, help="of a core, which the choice is made by")
    parser.add_argument("--islands", default="", help="options of `atoll run --mode islands`, such as '--inner-steps 20'")
    parser.add_argument("--ways", nargs="+", default=["islands", "DDP fp16", "DDP"])
    parser.add_argument("--step-seconds", type=int, default=0, help="make so many steps only, and print how long one takes")
    options = parser.parse_args()
    if options.step_seconds:
        step_seconds(options)
        return
    rows = [best(options, "DDP on a LAN", LAN_MEGABITS)]
    rows += [best(options, way, megabits) for megabits in options.megabits for way in options.ways]
    lan = float(str(rows[0]["seconds"]))
    for row in rows:
        row["against_lan"] = float(str(row["seconds"])) / lan
    if options.json:
        print_json({"benchmark": "islands", "target": options.target, "rows": rows})
        return
    header = ("way", "Mbit/s", "seconds", "steps", "learning rate", "× DDP on a LAN")
    names = ("way", "megabits", "seconds", "steps", "learning_rate", "against_lan")
    print_table(f"to a validation loss of {options.target:g}", header, [[row[name] for name in names] for row in rows])


if __name__ == "__main__":
    main()
