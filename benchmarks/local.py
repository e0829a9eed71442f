"""Predicted against measured step time of training on this machine, for models of different shapes.

    python benchmarks/local.py [--json] [--models mlp gpt2 …] [--rounds 3] [--threads 1] [--cluster here.toml]

Every round probes the machine and then trains each model for some steps, so that whatever else the machine is doing touches both. The
prediction is that of `atoll plan` on a cluster file of `atoll probe`, for the job on this one device; nothing is fitted to the models. Only
loading a batch is the user's own code: that is timed by itself and added.

Machines are shared. With one thread, times are this process's own processor time, which leaves others out; the fastest tenth of the steps
counts, as it does for the probe. The median, and the time on the wall, are listed beside it. With several threads only the wall tells.
Limits: median error at most 10%, worst at most 25%.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from local_models import JOBS
from report import print_json, print_table

from atoll import Job, StopTraining
from atoll.cluster import Cluster, DeviceKind, Measurements, load_cluster
from atoll.cluster.probe import probe_host
from atoll.cost import Calibration, cost
from atoll.events import StepFinished
from atoll.graph import Graph
from atoll.graph.capture import capture
from atoll.plan import Plan, Replica, Stage

MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.25
_STEPS, _FIRST = 8, 2  # measured in a round, after some that find memory and caches as no later step does
_PROBE_S = 25.0


@dataclasses.dataclass
class Model:
    """A job with what was captured and measured of it."""

    name: str
    job: Job
    graph: Graph
    processor_s: list[float] = dataclasses.field(default_factory=list)
    wall_s: list[float] = dataclasses.field(default_factory=list)

    def train(self) -> None:
        """A few steps, each timed from the end of the one before."""
        stamps: list[tuple[float, float]] = []

        def listen(event: Any) -> None:
            if isinstance(event, StepFinished):
                stamps.append((time.process_time(), time.perf_counter()))
                if len(stamps) > _FIRST + _STEPS:
                    raise StopTraining

        job = dataclasses.replace(self.job, callbacks=[listen], eval_data=None, eval_every=None, metrics={})
        job.run(progress=False, device="cpu")
        pairs = list(zip(stamps[_FIRST:], stamps[_FIRST + 1 :], strict=False))
        self.processor_s += [after[0] - before[0] for before, after in pairs]
        self.wall_s += [after[1] - before[1] for before, after in pairs]


def fastest_tenth(seconds: Sequence[float]) -> float:
    """What the fastest tenth took at most."""
    return sorted(seconds)[len(seconds) // 10]


def merged(kinds: Sequence[DeviceKind]) -> DeviceKind:
    """One machine measured several times: of each figure the fastest, as disturbances only slow down."""
    measured = [kind.measured for kind in kinds if kind.measured is not None]
    tables = ("matmul", "conv", "memory", "operators", "attention", "updates")
    fastest: dict[str, Any] = {name: _fastest([row for one in measured for row in getattr(one, name)]) for name in tables}
    least = min(one.operator_seconds for one in measured)
    return msgspec.structs.replace(kinds[0], measured=Measurements(operator_seconds=least, threads=measured[0].threads, **fastest))


def _fastest(rows: Sequence[Any]) -> tuple[Any, ...]:
    """Rows that differ in their figures alone become one."""
    alike: dict[Any, list[Any]] = {}
    for row in rows:
        figures = {name: 0.0 for name in row.__struct_fields__ if name.endswith("_per_s") or name == "seconds"}
        alike.setdefault(msgspec.structs.replace(row, **figures), []).append(row)
    merged_rows = []
    for blank, same in alike.items():
        names = [name for name in blank.__struct_fields__ if name.endswith("_per_s") or name == "seconds"]
        best = {name: (min if name == "seconds" else max)(getattr(row, name) for row in same) for name in names}
        merged_rows.append(msgspec.structs.replace(blank, **best))
    return tuple(merged_rows)


def with_kind(cluster: Cluster, kind: DeviceKind) -> Cluster:
    """The cluster of one device, which is of that kind."""
    (site,) = cluster.sites
    (host,) = site.hosts
    device = msgspec.structs.replace(host.devices[0], kind=kind)
    host = msgspec.structs.replace(host, devices=(device,))
    return msgspec.structs.replace(cluster, sites=(msgspec.structs.replace(site, hosts=(host,)),))


def predicted(model: Model, cluster: Cluster) -> dict[str, float]:
    """The cost model's step time of the job alone on the cluster's device."""
    job = model.job
    replica = Replica(devices=(cluster.devices[0].name,), samples=(job.batch_size,))
    plan = Plan(
        graph=model.graph.name,
        cluster=cluster.name,
        batch_size=job.batch_size,
        micro_batch_size=job.micro_batch_size or job.batch_size,
        stages=(Stage(start=0, stop=len(model.graph.layers), replicas=(replica,)),),
    )
    optimizer = job.build_optimizer([torch.nn.Parameter(torch.zeros(1))])
    name = type(optimizer).__name__.lower()
    name = "momentum" if name == "sgd" and optimizer.defaults["momentum"] else name
    found = cost(model.graph, cluster, plan, optimizer=name, calibration=Calibration(step_seconds=job.samples.loading_seconds()))
    return {"step_seconds": found.step_seconds, **found.breakdown}


def row(model: Model, cluster: Cluster, threads: int) -> dict[str, Any]:
    """Everything about one model."""
    prediction = predicted(model, cluster)
    judged = model.processor_s if threads == 1 else model.wall_s
    measured = fastest_tenth(judged)
    return {
        "model": model.name,
        "parameters": model.graph.parameters,
        "flops": model.graph.training_flops * model.job.batch_size,
        "predicted_seconds": prediction["step_seconds"],
        "predicted_breakdown": prediction,
        "measured_seconds": measured,
        "error": prediction["step_seconds"] / measured - 1,
        "median_processor_seconds": statistics.median(model.processor_s),
        "median_wall_seconds": statistics.median(model.wall_s),
    }


def run(names: Sequence[str], rounds: int, threads: int, file: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a model."""
    torch.set_num_threads(threads)
    models = []
    for name in names:
        say(f"capturing {name}")
        job = JOBS[name]()
        models.append(Model(name, job, capture(job)))
    clusters = [load_cluster(file)] if file else []
    for number in range(rounds):
        if file is None:
            say(f"round {number + 1} of {rounds}: probing")
            clusters.append(probe_host(budget_s=_PROBE_S, undisturbed=True).cluster)
        for model in models:
            say(f"round {number + 1} of {rounds}: training {model.name}")
            model.train()
    cluster = with_kind(clusters[0], merged([cluster.devices[0].kind for cluster in clusters]))
    return [row(model, cluster, threads) for model in models]


def main() -> None:
    """Print the table or JSON; exit with 1 when the limits are not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cluster", type=Path, help="a file of `atoll probe`, in place of probing")
    options = parser.parse_args()
    rows = run(options.models, options.rounds, options.threads, options.cluster, lambda text: print(text, file=sys.stderr))
    errors = [abs(row["error"]) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    ok = median <= MEDIAN_LIMIT and worst <= WORST_LIMIT
    if options.json:
        print_json({"judged_on": _judged(options.threads), "rows": rows, "median_error": median, "worst_error": worst, "ok": ok})
    else:
        _show(rows, _judged(options.threads))
        limits = f"median error {median:.1%} (limit {MEDIAN_LIMIT:.0%}), worst {worst:.1%} (limit {WORST_LIMIT:.0%})"
        print(f"\n{limits}: {'ok' if ok else 'NOT MET'}")
    sys.exit(0 if ok else 1)


def _judged(threads: int) -> str:
    return f"the fastest tenth of steps, {'processor time' if threads == 1 else 'wall time'}, {threads} thread{'s' if threads > 1 else ''}"


def _show(rows: Sequence[dict[str, Any]], judged: str) -> None:
    header = ("model", "parameters", "GFLOP a step", "predicted ms", "measured ms", "error %", "median processor ms", "median wall ms")
    cells = [
        (
            row["model"],
            f"{row['parameters'] / 1e6:.1f} M",
            row["flops"] / 1e9,
            1e3 * row["predicted_seconds"],
            1e3 * row["measured_seconds"],
            round(100 * row["error"], 1),
            1e3 * row["median_processor_seconds"],
            1e3 * row["median_wall_seconds"],
        )
        for row in rows
    ]
    print_table(f"step time of local training; measured: {judged}", header, cells)


if __name__ == "__main__":
    main()
