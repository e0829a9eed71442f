"""Replica and split on the same devices: ResNet-50 with 100,000 classes, against plain data parallelism.

    python benchmarks/hybrid.py [--json]

Whale (USENIX ATC 2022) measured its hybrid of replica (backbone) and split (classifier) against data parallelism on 8, 16 and 32 V100-32GB
in nodes joined by 50 Gbit/s Ethernet: 1.13, 1.66 and 2.43 times faster; with a million classes data parallelism was out of memory. Here
both plans are priced by the ordinary `Evaluator` with its default constants, and the planner is asked what it would choose.

Reported, not required. The paper gives neither the samples a device takes nor whether its all-reduces overlap backward; both decide the
ratio, so several sizes are listed. Assumed: fp32, SGD with momentum, 8 devices a node on NVLink, Atoll's overlap of synchronisation.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from report import print_json, print_table

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cost import Evaluator
from atoll.graph import preset, residual_network
from atoll.plan import Plan, Replica, Stage
from atoll.planner import plan

MEASURED = {8: 1.13, 16: 1.66, 32: 2.43}
NETWORKS = ("1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "50 Gbit/s")
SAMPLES = (16, 32, 64)  # a device


def volta(devices: int, network: str) -> Cluster:
    """Nodes of eight V100."""
    return make_cluster(
        f"{devices} V100", [make_site("a", kind="V100-32GB", hosts=devices // 8, devices=8, network=network, latency="20 us")]
    )


def data_parallel(evaluator: Evaluator, samples: int) -> Plan:
    """Every device a replica."""
    replicas = tuple(Replica(devices=(device.name,), samples=(samples,)) for device in evaluator.cluster.devices)
    return _plan(evaluator, Stage(start=0, stop=len(evaluator.graph.layers), replicas=replicas), samples)


def hybrid(evaluator: Evaluator, samples: int) -> Plan:
    """Every device a lane: they repeat the backbone and divide the classifier, which is the last layer."""
    names = tuple(device.name for device in evaluator.cluster.devices)
    replica = Replica(devices=names, samples=(samples,) * len(names))
    last = len(evaluator.graph.layers)
    return _plan(evaluator, Stage(start=0, stop=last, replicas=(replica,), split=(last - 1,)), samples * len(names))


def _plan(evaluator: Evaluator, stage: Stage, micro_batch: int) -> Plan:
    batch = sum(replica.total_samples for replica in stage.replicas)
    graph, cluster = evaluator.graph.name, evaluator.cluster.name
    return Plan(graph=graph, cluster=cluster, batch_size=batch, micro_batch_size=micro_batch, stages=(stage,))


def in_words(best: Plan) -> str:
    """`"sharded + split classifier on 16 devices"`."""
    words = [f"{len(best.stages)} stages"] if len(best.stages) > 1 else []
    words += ["sharded"] if any(stage.sharded for stage in best.stages) else []
    words += ["split classifier"] if any(stage.split for stage in best.stages) else []
    used = {name for stage in best.stages for name in stage.devices}
    return f"{' + '.join(words) or 'data parallel'} on {len(used)} devices"


def line(devices: int, network: str, samples: int) -> dict[str, Any]:
    """Both plans and the planner's own choice."""
    chosen = preset("resnet50-100k", precision="fp32")
    evaluator = Evaluator(chosen.graph, volta(devices, network), optimizer=chosen.optimizer)
    plain, both = data_parallel(evaluator, samples), hybrid(evaluator, samples)
    before, after = evaluator.seconds(plain), evaluator.seconds(both)
    best = plan(chosen.graph, evaluator.cluster, batch_size=samples * devices, optimizer=chosen.optimizer).candidates[0]
    return {
        "devices": devices,
        "network": network,
        "samples_a_device": samples,
        "data_parallel_seconds": round(before, 4),
        "hybrid_seconds": round(after, 4),
        "speed_up": round(before / after, 2),
        "measured": MEASURED[devices] if network == "50 Gbit/s" else "",
        "planner_seconds": round(best.cost.step_seconds, 4),
        "planner": in_words(best.plan),
    }


def million() -> dict[str, int]:
    """The most samples a device (a power of two) with which each plan fits when there are a million classes; 0: not even one."""
    graph = residual_network(name="resnet50-1m", classes=1_000_000, precision="fp32")
    evaluator = Evaluator(graph, volta(32, "50 Gbit/s"), optimizer="sgd")
    sizes = [2**n for n in range(9)]
    fitting = {make.__name__: [size for size in sizes if evaluator.fits(make(evaluator, size))] for make in (data_parallel, hybrid)}
    return {name: max(found, default=0) for name, found in fitting.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    lines = [line(devices, network, samples) for network in NETWORKS for devices in MEASURED for samples in SAMPLES]
    most = million()
    if options.json:
        print_json({"lines": lines, "most_samples_a_device_with_a_million_classes": most})
        return 0
    print_table("100,000 classes: replica + split against data parallel", list(lines[0]), [list(each.values()) for each in lines])
    said = ", ".join(f"{name} up to {size} samples a device" for name, size in most.items())
    print(f"\na million classes on 32 devices fit: {said} (Whale: data parallel was out of memory)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
