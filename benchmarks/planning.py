"""How long planning takes, and how much memory, on one core: the largest problems anyone has described.

Each problem runs in a fresh process that may use one core; the best plan must fit and be valid.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
from report import print_json, print_table

from atoll.cluster import Cluster, load_cluster, make_cluster, make_site
from atoll.graph import preset
from atoll.plan import validate
from atoll.planner import plan as make_plans


def thousand() -> Cluster:
    """1,024 devices of 3 kinds in 8 sites."""
    kinds = ("A100-80GB", "A100-80GB", "A100-80GB", "V100-32GB", "V100-32GB", "V100-32GB", "RTX-3090", "RTX-3090")
    sites = [make_site(f"s{i}", kind=kind, hosts=16, devices=8, network="100 Gbit/s", latency="10 us") for i, kind in enumerate(kinds)]
    return make_cluster("thousand", sites, default_link=("10 Gbit/s", "20 ms"))


def ten_thousand() -> Cluster:
    """10,000 devices of 5 kinds in 10 sites."""
    kinds = ("H100-80GB", "A100-80GB", "A100-40GB", "V100-32GB", "RTX-3090")
    sites = [make_site(f"s{i}", kind=kinds[i % 5], hosts=125, devices=8, network="200 Gbit/s", latency="10 us") for i in range(10)]
    return make_cluster("ten thousand", sites, default_link=("20 Gbit/s", "20 ms"))


def whale() -> Cluster:
    """480 V100-32GB, as M6-MoE 1T was trained on (Whale, USENIX ATC 2022)."""
    return make_cluster("480 V100", [make_site("whale", kind="V100-32GB", hosts=60, devices=8, network="50 Gbit/s", latency="10 us")])


def small() -> Cluster:
    """4 + 4 mixed devices in two sites."""
    sites = [make_site("a", kind="A100-40GB", devices=4), make_site("b", kind="RTX-3090", devices=4)]
    return make_cluster("small", sites, default_link=("1 Gbit/s", "20 ms"))


PROBLEMS: dict[str, tuple[str, Callable[[], Cluster], float]] = {
    "gpt3-175b on 1,024 of 3 kinds, 8 sites": ("gpt3-175b", thousand, 10.0),
    "m6-moe-1t on 480 V100-32GB": ("m6-moe-1t", whale, 10.0),
    "gpt3-175b on 10,000 of 5 kinds, 10 sites": ("gpt3-175b", ten_thousand, 60.0),
    "bert-large on 10,000 of 5 kinds, 10 sites": ("bert-large", ten_thousand, 60.0),
    "bert-large on 8 of 2 kinds, 2 sites": ("bert-large", small, 10.0),
}


def solve(name: str, cluster: Cluster, target: str) -> dict[str, object]:
    """Plans one problem in this process."""
    chosen = preset(target)
    started, cpu = time.perf_counter(), time.process_time()
    planned = make_plans(chosen.graph, cluster, batch_size=chosen.batch_size, optimizer=chosen.optimizer)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    best = planned.candidates[0]
    validate(best.plan, chosen.graph, cluster)
    used = {device for stage in best.plan.stages for device in stage.devices}
    stage = best.plan.stages[0]
    return {
        "problem": name,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "fits": best.cost.fits,
        "devices_used": len(used),
        "stages": len(best.plan.stages),
        "tensor": stage.tensor,
        "lanes": stage.lanes,
        "mode": best.plan.mode,
        "step_seconds": best.cost.step_seconds,
        "considered": planned.considered,
        "priced": planned.priced,
    }


def in_fresh_process(name: str, cluster_file: str | None, target: str | None) -> dict[str, object]:
    """Runs one problem with one core and its own memory count."""
    command = [sys.executable, __file__, "--only", name]
    command += ["--cluster", cluster_file, "--target", target] if cluster_file and target else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return msgspec.json.decode(done.stdout, type=dict[str, object])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="plan on this cluster file instead")
    parser.add_argument("--target", help="preset to plan on --cluster")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.only:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        if options.cluster:
            result = solve(options.only, load_cluster(options.cluster), options.target)
        else:
            target, cluster, _ = PROBLEMS[options.only]
            result = solve(options.only, cluster(), target)
        print(msgspec.json.encode(result).decode())
        return
    if options.cluster:
        rows = [in_fresh_process(f"{options.target} on {options.cluster}", options.cluster, options.target)]
    else:
        rows = [in_fresh_process(name, None, None) for name in PROBLEMS]
    if options.json:
        print_json({"problems": rows})
        return
    print_table("planning on one core", list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
