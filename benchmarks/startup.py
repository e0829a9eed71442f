"""Seconds from the command to the end of the first step, by phase, beside `torchrun` with DistributedDataParallel of the same model.

    python benchmarks/startup.py [--json] [--rounds 3] [--cases alone one two swarm tried] [--package DIR]

The job is examples/language_model.py's, for a few steps. Everything is started as users start it, one after the other in every round, in an
order that turns: `torchrun` with one and two processes (startup_ddp.py), `atoll run` alone, on one and two devices of this machine, and as
a swarm of two workers. Planning is part of it: devices are described by a file, so every start plans anew. "tried" is two devices whose
file says that they were probed here, so that the job is tried for a second before the prediction is shown. Processor time is of all
processes up to then. On a shared machine the ratio within a round counts. `--package` is a directory with another version of Atoll.
Limit: 1.5 times as long as `torchrun` with as many processes, in the median.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import print_json, print_table

from atoll.cluster.host_name import this_host

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
LIMIT = 1.5
_CASES = ["alone", "one", "two", "tried", "swarm"]
_LOOK_S, _PATIENCE_S = 0.02, 300.0
_ATOLL = "import sys; from atoll.cli.main import main; sys.exit(main())"
_CLUSTER = """name = "here"
[[site]]
name = "here"
network = {{ bandwidth = "10 Gbit/s", latency = "50 us" }}
  [[site.host]]
  name = "{host}"
  devices = [{{ kind = "core", count = {devices} }}]
  link = {{ bandwidth = "10 GB/s", latency = "20 us" }}
[[device_kind]]
name = "core"
cpu = true
memory = "4 GB"
memory_bandwidth = "10 GB/s"
flops = {{ fp32 = "50 GFLOPS" }}
"""
_PROBED = """[device_kind.measured]
threads = 1
operator = "2 us"
"""


@dataclass
class Case:
    """A way to start training, and what it took in each round."""

    name: str
    command: Callable[[Path], Sequence[str]]  # for a run in that directory
    baseline: str = ""  # with which it is compared
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


def cases(folder: Path) -> list[Case]:
    """All of them."""
    for devices in (1, 2):
        (folder / f"{devices}.toml").write_text(_CLUSTER.format(devices=devices, host="h"))
    (folder / "probed.toml").write_text(_CLUSTER.format(devices=2, host=this_host()) + _PROBED)
    job = str(HERE / "startup_job.py")

    def torchrun(processes: int) -> Callable[[Path], Sequence[str]]:
        place = ("--standalone", f"--nproc-per-node={processes}")
        return lambda run: (sys.executable, "-m", "torch.distributed.run", *place, str(HERE / "startup_ddp.py"), str(run))

    def atoll(*options: str, steps: int = 3) -> Callable[[Path], Sequence[str]]:
        return lambda run: (sys.executable, "-c", _ATOLL, "run", job, *options, "--out", str(run), "--", str(steps))

    return [
        Case("torchrun 1", torchrun(1)),
        Case("torchrun 2", torchrun(2)),
        Case("alone", atoll("--alone"), "torchrun 1"),
        Case("one", atoll("--cluster", str(folder / "1.toml")), "torchrun 1"),
        Case("two", atoll("--cluster", str(folder / "2.toml")), "torchrun 2"),
        Case("tried", atoll("--cluster", str(folder / "probed.toml"), steps=20), "torchrun 2"),
        Case("swarm", atoll("--cluster", str(folder / "2.toml"), "--mode", "swarm"), "torchrun 2"),
    ]


def first_step(case: Case, run: Path, environ: dict[str, str]) -> None:
    """Start it, note when its first step is over, and let it end."""
    log = run.with_suffix(".log").open("wb")
    began = time.perf_counter()
    process = subprocess.Popen(case.command(run), stdout=log, stderr=log, env=environ, cwd=ROOT, start_new_session=True)
    events = run / "events.jsonl"
    try:
        while not (events.exists() and b'"step_finished"' in events.read_bytes()):
            if process.poll() is not None or time.perf_counter() - began > _PATIENCE_S:
                raise SystemExit(f"{case.name}: no first step:\n{run.with_suffix('.log').read_text()[-2000:]}")
            time.sleep(_LOOK_S)
        case.seconds.append(time.perf_counter() - began)
        case.processor.append(processor_seconds(process.pid))
        case.phases.append(phases_of(events))
        process.wait(_PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def processor_seconds(root: int) -> float:
    """Of a process and everybody it started, with those who have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def phases_of(events: Path) -> dict[str, float]:
    """What the run's log says of its start, and the first step."""
    found = {}
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "phase_finished":
            found[f"{event.get('source', '')} {event['phase']}".strip()] = event["seconds"]
        elif event["event"] == "step_finished":
            return found | {"first step": event["seconds"]}
    return found


def measured(names: Sequence[str], rounds: int, package: Path | None, folder: Path) -> list[Case]:
    """Every case, once a round."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if package is not None:
        environ["PYTHONPATH"] = str(package)
    chosen = [case for case in cases(folder) if case.name in names or case.name.startswith("torchrun")]
    wanted = {case.baseline for case in chosen}
    chosen = [case for case in chosen if case.baseline or case.name in wanted]
    for number in range(rounds):
        for case in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
            print(f"round {number + 1} of {rounds}: {case.name}", file=sys.stderr, flush=True)
            first_step(case, folder / f"{case.name.replace(' ', '-')}-{number}", environ)
    return chosen


def row(case: Case, others: dict[str, Case]) -> dict[str, Any]:
    """What is said of a case."""
    phases = {name for one in case.phases for name in one}
    shown = {name: statistics.median(one[name] for one in case.phases if name in one) for name in sorted(phases)}
    result: dict[str, Any] = {
        "case": case.name,
        "seconds": statistics.median(case.seconds),
        "processor_seconds": statistics.median(case.processor),
        "rounds": case.seconds,
        "phases": shown,
    }
    if case.baseline:
        base = others[case.baseline]
        result["ratio"] = statistics.median(a / b for a, b in zip(case.seconds, base.seconds, strict=True))
        result["processor_ratio"] = statistics.median(a / b for a, b in zip(case.processor, base.processor, strict=True))
    return result


def main() -> None:
    """Print the table or JSON; exit with 1 when the limit is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=_CASES, choices=_CASES)
    parser.add_argument("--package", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = measured(options.cases, options.rounds, options.package, Path(folder))
    rows = [row(case, {case.name: case for case in done}) for case in done]
    ok = all(row.get("ratio", 0.0) <= LIMIT for row in rows)
    if options.json:
        print_json({"rows": rows, "limit": LIMIT, "ok": ok})
    else:
        header = ("case", "seconds", "processor s", "ratio", "ratio of processor s", "phases")
        cells = [
            (
                row["case"],
                row["seconds"],
                row["processor_seconds"],
                f"{row['ratio']:.2f}" if "ratio" in row else "",
                f"{row['processor_ratio']:.2f}" if "ratio" in row else "",
                ", ".join(f"{name} {seconds:.2g}" for name, seconds in row["phases"].items()),
            )
            for row in rows
        ]
        print_table("seconds to the end of the first step; ratio: to torchrun with as many processes", header, cells)
        print(f"\nlimit {LIMIT}: {'ok' if ok else 'NOT MET'}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
