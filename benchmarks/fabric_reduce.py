"""All-reduce of 25 million fp32 values among 2 sites × 2 hosts, over the fabric with int8 and with Gloo, on the same shaped links.

Three settings, made by `atoll lab` (network namespaces; needs root and Linux), one process a host:

- link: hosts of a site are 10 Gbit/s apart; the two sites share one link of 200 Mbit/s and 20 ms. Hosts of a site sum with Gloo, one of
  each site meets the other over the fabric, and passes the result on. Also what the cost model predicts.
- interfaces: every host has an interface of 200 Mbit/s for everything; sites are 20 ms apart.
- quarter: as interfaces, and one host has a quarter of that. The linear program's bound says what could be reached.

All processes start at an agreed time; a round lasts until the last one has its result. Medians of rounds, after one that is not counted.

    python benchmarks/fabric_reduce.py [--rounds 5] [--settings link interfaces quarter] [--codec int8] [--json]
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time

import msgspec
import torch
import torch.distributed as dist
from report import print_json, print_table

from atoll.cluster import Cluster
from atoll.cluster.file import parse_cluster
from atoll.codec import codec_spec
from atoll.cost.calibration import Calibration
from atoll.cost.communication import all_reduce_seconds, span_of
from atoll.fabric import Fabric
from atoll.fabric.collective import Collective, FixedCodecs, Network, PeerRates, RoundMember, RoundPlan, make_plan
from atoll.lab import Lab

ELEMENTS = 25_000_000
MBIT = 1e6 / 8
WAN = 200 * MBIT
HOSTS_OF_A_SITE = 2
SLOW_HOST, SLOWNESS = "rome-1", 4
CLUSTER = """
[[site]]
name = "oslo"
network = {{ bandwidth = "{network}", latency = "50 us" }}
  [[site.host]]
  count = 2
  devices = [{{ kind = "T4" }}]
[[site]]
name = "rome"
network = {{ bandwidth = "{network}", latency = "50 us" }}
  [[site.host]]
  count = 2
  devices = [{{ kind = "T4" }}]
[[link]]
between = ["oslo", "rome"]
bandwidth = "{link}"
latency = "20 ms"
"""
SETTINGS = {"link": ("10 Gbit/s", "200 Mbit/s"), "interfaces": ("200 Mbit/s", "1 Gbit/s"), "quarter": ("200 Mbit/s", "1 Gbit/s")}


class Task(msgspec.Struct, frozen=True):
    """What a process is told."""

    rank: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    plan: RoundPlan
    codec: str
    rounds: int
    gloo_rounds: int


class Times(msgspec.Struct, frozen=True):
    """Seconds from the agreed start of each round."""

    fabric: list[float]
    gloo: list[float]
    processor_seconds: float  # a round of the fabric's
    digests: list[str]
    error: float  # relative, of the last result
    up_bytes_per_s: float
    down_bytes_per_s: float


def main() -> None:
    """Measures and prints, or is one of the processes."""
    if len(sys.argv) == 3 and sys.argv[1] == "--task":
        print(msgspec.json.encode(work(msgspec.json.decode(sys.argv[2], type=Task))).decode())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(setting, arguments.codec, arguments.rounds) for setting in arguments.settings]
    if arguments.json:
        print_json({"elements": ELEMENTS, "codec": arguments.codec, "rounds": arguments.rounds, "settings": rows})
        return
    keys = ("setting", "fabric s", "Gloo s", "Gloo / fabric", "bound s", "fabric / bound", "predicted s", "fabric / predicted")
    print_table(f"All-reduce of 25 M fp32 with {arguments.codec}", keys, [[row.get(key, "") for key in keys] for row in rows])


def measure(setting: str, codec: str, rounds: int) -> dict[str, object]:
    """One setting, in a lab of its own."""
    network, link = SETTINGS[setting]
    cluster = parse_cluster(CLUSTER.format(network=network, link=link), "benchmark")
    with Lab(cluster) as lab:
        if setting == "quarter":
            lab.slow(SLOW_HOST, SLOWNESS)
        times, plan = run(lab, setting, codec, rounds)
    fabric = statistics.median(max(one) for one in zip(*(time.fabric[1:] for time in times), strict=True))
    row: dict[str, object] = {
        "setting": setting,
        "fabric s": fabric,
        "bound s": plan.bound_seconds,
        "fabric / bound": fabric / plan.bound_seconds,
    }
    gloo = [max(one) for one in zip(*(time.gloo[1:] for time in times), strict=True)]
    if gloo:
        row |= {"Gloo s": statistics.median(gloo), "Gloo / fabric": statistics.median(gloo) / fabric}
    if setting == "link":
        predicted = predict(cluster, codec)
        row |= {"predicted s": predicted, "fabric / predicted": fabric / predicted}
    assert len({tuple(time.digests) for time in times}) == 1, "all hold the same result"
    row |= {"relative error": times[0].error, "processor s of a round": sum(time.processor_seconds for time in times)}
    row["measured Mbit/s"] = [[round(time.up_bytes_per_s / MBIT), round(time.down_bytes_per_s / MBIT)] for time in times]
    row["all fabric s"] = [[round(second, 3) for second in time.fabric] for time in times]
    return row


def run(lab: Lab, setting: str, codec: str, rounds: int) -> tuple[list[Times], RoundPlan]:
    """A process on each host, until all are done."""
    hosts = lab.hosts
    plan = plan_for(setting, hosts, codec)
    processes = []
    for rank, host in enumerate(hosts):
        task = Task(rank, hosts, tuple(map(lab.address, hosts)), plan, codec, rounds + 1, 0 if setting == "quarter" else 3)
        command = [sys.executable, os.path.abspath(__file__), "--task", msgspec.json.encode(task).decode()]
        processes.append(lab.start(host, command, stdout=subprocess.PIPE))
    outputs = [process.communicate(600)[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a process failed")
    return [msgspec.json.decode(output.splitlines()[-1], type=Times) for output in outputs], plan


def plan_for(setting: str, hosts: tuple[str, ...], codec: str) -> RoundPlan:
    """Parts by the rates the lab was given; of sites that share a link only the first host takes part."""
    hosts = hosts[::HOSTS_OF_A_SITE] if setting == "link" else hosts
    members = [RoundMember(name=host) for host in hosts]
    rates = {host: WAN / (SLOWNESS if setting == "quarter" and host == SLOW_HOST else 1) for host in hosts}
    peers = tuple(PeerRates(name=host, up_bytes_per_s=rate, down_bytes_per_s=rate) for host, rate in rates.items())
    return make_plan("round", ELEMENTS, members, Network(peers=peers), element_bytes=4 * codec_spec(codec).ratio(4))


def predict(cluster: Cluster, codec: str) -> float:
    """What the cost model says of the same all-reduce."""
    calibration = Calibration()
    span = span_of(cluster, [[device for host in cluster.hosts for device in host.devices]], calibration)
    return all_reduce_seconds(span, 4.0 * ELEMENTS * codec_spec(codec).ratio(4.0), calibration)


def work(task: Task) -> Times:
    """One process: first the fabric's rounds, then Gloo's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{task.addresses[0]}:29500", rank=task.rank, world_size=len(task.hosts))
    name = task.hosts[task.rank]
    contributions = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) for seed in range(len(task.hosts))]
    exact = sum(contributions[1:], contributions[0].clone()).double()
    buffer = contributions[task.rank]
    del contributions
    gateways = [task.hosts.index(member.name) for member in task.plan.members]
    sites = [dist.new_group([first, first + 1]) for first in gateways] if len(gateways) < len(task.hosts) else []
    collective = Collective(name, codecs=FixedCodecs(task.codec))
    with Fabric(name, services=[collective.service]) as fabric:
        collective.attach(fabric)
        fabric.listen(f"{task.addresses[task.rank]}:7000")
        dist.barrier()
        for address in task.addresses[: task.rank]:
            fabric.run(fabric.connect(f"{address}:7000").connected(30))
        dist.barrier()
        seconds, digests, error = [], [], 0.0
        out, summed = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
        before = time.process_time()
        for number in range(task.rounds):
            plan = msgspec.structs.replace(task.plan, id=f"round {number}")
            start = agree()
            if sites:
                site, gateway = sites[task.rank // HOSTS_OF_A_SITE], gateways[task.rank // HOSTS_OF_A_SITE]
                dist.reduce(summed.copy_(buffer), gateway, group=site)
                if task.rank == gateway:
                    collective.reduce_soon(plan, summed, out).result().require_complete()
                dist.broadcast(out, gateway, group=site)
            else:
                collective.reduce_soon(plan, buffer, out).result().require_complete()
            seconds.append(time.time() - start)
            error = float((out.double() - exact).norm() / exact.norm()) if number == 0 else error
            digests.append(hashlib.sha256(out.numpy()).hexdigest())
        processor = (time.process_time() - before) / task.rounds
        rates = collective.rates()
        dist.barrier()
    collective.close()
    peer = gloo(buffer, task.gloo_rounds)
    dist.barrier()
    dist.destroy_process_group()  # its threads would otherwise meet the end of the process
    return Times(seconds, peer, processor, digests, error, rates.up_bytes_per_s, rates.down_bytes_per_s)


def gloo(buffer: torch.Tensor, rounds: int) -> list[float]:
    """The same with Gloo."""
    seconds = []
    for _ in range(rounds):
        copy = buffer.clone()
        start = agree()
        dist.all_reduce(copy)
        seconds.append(time.time() - start)
    return seconds


def agree() -> float:
    """A time at which all begin: they share this machine's clock."""
    start = torch.tensor([time.time() + 0.4], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, float(start) - time.time()))
    return float(start)


if __name__ == "__main__":
    main()
