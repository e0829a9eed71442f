"""Replica and split on the same devices: a classifier with 100,000 classes, against plain data parallelism, through links of 1 Gbit/s.

    python benchmarks/large_output.py [--json] [--hosts 2 4] [--rate 1gbit] [--rounds 5]

The classifier is examples/classifier.py. Every device is a process in a network namespace of its own, on one thread; links are shaped in
either direction (root and iproute2 are needed). Both plans live in the same processes and take turns, in steps on the same data; their
losses must agree. Traffic is what a host's interface sent, headers included; predictions are the cost model's for such a network and
a core as `atoll probe` measures it, which nobody else uses.

Whale (USENIX ATC 2022) measured 1.13, 1.66 and 2.43 times faster steps on 8, 16 and 32 V100 behind 50 Gbit/s Ethernet. The ratio depends
on what computing there is to hide traffic behind, so it is reported and not required.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from lockstep_links import cannot_shape, joined_hosts, rate_bits, sent_bytes
from lockstep_peers import Atoll
from lockstep_processes import is_rank, joined, start_ranks
from report import print_json, print_table

from atoll import Job
from atoll.cluster import Cluster, DeviceKind, make_cluster, make_site
from atoll.cluster.probe import probe_host
from atoll.cost import Evaluator
from atoll.graph import Graph
from atoll.graph.capture import capture_program
from atoll.plan import Plan, Replica, Stage
from atoll.script import load_job

_EXAMPLE = Path(__file__).parents[1] / "examples" / "classifier.py"
_WARM_UP = 2
_PROBE_S = 15.0
_LOSS_TOLERANCE = 1e-4


def data_plan(graph: Graph, job: Job, devices: Sequence[str]) -> Plan:
    """Every device a replica."""
    each = job.batch_size // len(devices)
    replicas = tuple(Replica(devices=(name,), samples=(each,)) for name in devices)
    return _plan(graph, job, each, Stage(start=0, stop=len(graph.layers), replicas=replicas))


def hybrid_plan(graph: Graph, job: Job, devices: Sequence[str]) -> Plan:
    """Every device a lane: they repeat the network in front and divide the layer with most weights."""
    largest = max(range(len(graph.layers)), key=lambda i: graph.layers[i].split_parameters)
    replica = Replica(devices=tuple(devices), samples=(job.batch_size // len(devices),) * len(devices))
    return _plan(graph, job, job.batch_size, Stage(start=0, stop=len(graph.layers), replicas=(replica,), split=(largest,)))


def _plan(graph: Graph, job: Job, micro_batch: int, stage: Stage) -> Plan:
    return Plan(graph=graph.name, cluster="links", batch_size=job.batch_size, micro_batch_size=micro_batch, stages=(stage,))


def link_cluster(core: DeviceKind, hosts: int, rate: str) -> Cluster:
    """A core of this machine on every host."""
    network = f"{rate_bits(rate) / 1e6:g} Mbit/s"
    return make_cluster("links", [make_site("here", kind=core, hosts=hosts, devices=1, network=network, latency="50 us")])


def take_turns(runners: Sequence[Atoll], rounds: int) -> list[dict[str, Any]]:
    """Steps of each runner: times of the slowest rank, and the most bytes that a rank sent."""
    found: list[list[tuple[float, int]]] = [[] for _ in runners]
    for number in range(_WARM_UP + rounds):
        for index in (range(len(runners)), reversed(range(len(runners))))[number % 2]:
            dist.barrier()
            before, began = sent_bytes(), time.perf_counter()
            runners[index].step(number + 1)
            spent = torch.tensor([time.perf_counter() - began, sent_bytes() - before], dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            found[index].append((float(spent[0]), int(spent[1])))
    rows = [each[_WARM_UP:] for each in found]
    return [{"seconds": statistics.median(s for s, _ in row), "sent_bytes": statistics.median(b for _, b in row)} for row in rows]


def measure(core: DeviceKind, hosts: int, rate: str, rounds: int) -> dict[str, Any]:
    """Both plans on so many hosts; every rank takes part."""
    job = load_job(_EXAMPLE)
    captured = capture_program(job)
    cluster = link_cluster(core, hosts, rate)
    devices = [device.name for device in cluster.devices]
    plans = [make(captured.graph, job, devices) for make in (data_plan, hybrid_plan)]
    runners = [Atoll(job, captured, plan) for plan in plans]
    data, hybrid = take_turns(runners, rounds)
    losses = [runner.loss() for runner in runners]
    for runner in runners:
        runner.close()
    evaluator = Evaluator(captured.graph, cluster, optimizer="adamw")
    predicted = [evaluator.seconds(plan) for plan in plans]
    return {
        "hosts": hosts,
        "rate": rate,
        "parameters": captured.graph.parameters,
        "plan": str(plans[1]),
        "data_parallel": data,
        "hybrid": hybrid,
        "speed_up": data["seconds"] / hybrid["seconds"],
        "traffic_ratio": data["sent_bytes"] / hybrid["sent_bytes"],
        "predicted_seconds": predicted,
        "predicted_speed_up": predicted[0] / predicted[1],
        "losses": losses,
        "losses_agree": abs(losses[0] - losses[1]) <= _LOSS_TOLERANCE * abs(losses[0]),
        "load": os.getloadavg()[0],
    }


def run_rank(options: argparse.Namespace) -> int:
    """One number of hosts; rank 0 writes what was measured."""
    core = msgspec.json.decode(Path(options.core).read_bytes(), type=DeviceKind)
    with joined():
        line = measure(core, options.hosts[0], options.rate, options.rounds)
        if dist.get_rank() == 0:
            Path(options.out).write_bytes(msgspec.json.encode(line))
    return 0


def compare(core: DeviceKind, hosts: int, rate: str, rounds: int) -> dict[str, Any]:
    """Make the hosts, start a process on each, and read what they measured."""
    with tempfile.TemporaryDirectory() as folder, joined_hosts(hosts, rate) as made:
        out, kind = Path(folder) / "line.json", Path(folder) / "core.json"
        kind.write_bytes(msgspec.json.encode(core))
        arguments = ["--hosts", str(hosts), "--rate", rate, "--rounds", str(rounds), "--out", str(out), "--core", str(kind)]
        code = start_ranks(Path(__file__), arguments, hosts, host=made.address(0), inside=made.inside)
        if code:
            raise SystemExit(code)
        return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])


def _show(lines: Sequence[dict[str, Any]]) -> None:
    header = (
        "hosts",
        "data parallel ms",
        "replica + split ms",
        "speed-up",
        "predicted",
        "data parallel MB",
        "replica + split MB",
        "losses agree",
    )
    rows = [
        (
            line["hosts"],
            1e3 * line["data_parallel"]["seconds"],
            1e3 * line["hybrid"]["seconds"],
            round(line["speed_up"], 2),
            round(line["predicted_speed_up"], 2),
            line["data_parallel"]["sent_bytes"] / 1e6,
            line["hybrid"]["sent_bytes"] / 1e6,
            "yes" if line["losses_agree"] else f"NO: {line['losses']}",
        )
        for line in lines
    ]
    title = f"{lines[0]['parameters'] / 1e6:.1f} M parameters, links of {lines[0]['rate']}: a step, and what a host sends in it"
    print_table(title, header, rows)
    print(f"\nWhale: 1.13, 1.66, 2.43 with 8, 16, 32 GPUs. Load of the machine, which has {os.cpu_count()} cores: {lines[-1]['load']:.1f}")


def main(arguments: Sequence[str]) -> int:
    """The command, which makes hosts and links, and the ranks on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hosts", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--core", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if is_rank():
        return run_rank(options)
    reason = cannot_shape()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    torch.set_num_threads(1)
    core = probe_host(budget_s=_PROBE_S).cluster.devices[0].kind
    lines = [compare(core, hosts, options.rate, options.rounds) for hosts in options.hosts]
    if options.json:
        print_json({"lines": lines})
    else:
        _show(lines)
    return 0 if all(line["losses_agree"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
