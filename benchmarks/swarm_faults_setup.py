"""What `swarm_faults.py` runs on: two sites, a plan of two stages, devices whose speed is imposed, and a plain reference."""

import sys
from functools import partial
from pathlib import Path

import msgspec
import torch
from imposed_devices import imposed, speed_for

from atoll.cluster import dump_cluster
from atoll.cluster.cluster import Cluster
from atoll.graph.capture import capture_program
from atoll.job import Job
from atoll.plan import Plan, Replica, Stage, to_text
from atoll.script import load_job

__all__ = ["Setup", "prepare", "reference"]

SCRIPT = Path(__file__).with_name("swarm_faults_job.py")
CLUSTER = """
name = "two-sites"
[[site]]
name = "oslo"
network = {{ bandwidth = "1 Gbit/s", latency = "50 us" }}
  [[site.host]]
  count = {oslo}
  devices = [{{ kind = "imposed" }}]
[[site]]
name = "rome"
network = {{ bandwidth = "1 Gbit/s", latency = "50 us" }}
  [[site.host]]
  count = {rome}
  devices = [{{ kind = "imposed" }}]
[[link]]
between = ["oslo", "rome"]
bandwidth = "200 Mbit/s"
latency = "30 ms"
"""
SITE_BYTES_PER_S, BETWEEN_BYTES_PER_S = 125e6, 25e6
MICRO_BATCH_SECONDS = 0.3  # imposed, forward and backward of a stage
OVERHEAD_SECONDS = 1.2  # of a step: filling, draining, summing up over the slow link; only to guess how many steps fill the time
SHARE_WITH_FAULTS = 0.85


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a run, and what is known beforehand."""

    folder: Path
    cluster: Cluster
    plan: Path
    script: Path
    arguments: tuple[str, ...]
    steps: int
    micro_batches: int
    stages: int
    head: str  # the host of coordinator and feeder
    hosts: tuple[str, ...]  # of the workers


def prepare(folder: Path, workers: int, seconds: float, *, width: int = 256, share: float = SHARE_WITH_FAULTS, rome: int = -1) -> Setup:
    """Writes cluster and plan; as many steps as should fill the seconds. `rome` workers are there, half of them if not given."""
    folder.mkdir(parents=True, exist_ok=True)
    job = load_job(SCRIPT, ("1", str(width)))
    size = job.micro_batch_size or job.batch_size
    micro_batches = job.batch_size // size
    step_seconds = micro_batches * MICRO_BATCH_SECONDS / (workers / 2) + OVERHEAD_SECONDS
    steps = max(4, round(seconds * share / step_seconds))
    cluster, stages = _layout(folder, job, workers, workers // 2 if rome < 0 else rome)
    plan = Plan(graph=job.name, cluster=cluster.name, batch_size=job.batch_size, micro_batch_size=size, stages=stages, mode="swarm")
    (folder / "swarm.plan").write_text(to_text(plan))
    return Setup(
        folder=folder,
        cluster=cluster,
        plan=folder / "swarm.plan",
        script=SCRIPT,
        arguments=(str(steps), str(width)),
        steps=steps,
        micro_batches=micro_batches,
        stages=len(stages),
        head="oslo-0",
        hosts=tuple(device.rpartition("/")[0] for stage in stages for device in stage.devices),
    )


def _layout(folder: Path, job: Job, workers: int, rome: int) -> tuple[Cluster, tuple[Stage, ...]]:
    """Devices of the speed that makes a micro-batch take as long as it shall; both stages at both sites."""
    graph = capture_program(job).graph
    layers = len(graph.layers)
    bounds = (0, layers // 2, layers)
    file = folder / "cluster.toml"
    described = partial(imposed, CLUSTER.format(oslo=1 + workers - rome, rome=max(1, rome)))
    cluster = described(speed_for(MICRO_BATCH_SECONDS, graph, bounds, job.micro_batch_size or 1, "oslo-0/0", described, file))
    file.write_text(dump_cluster(cluster))
    names = [f"oslo-{1 + index}/0" for index in range(workers - rome)], [f"rome-{index}/0" for index in range(rome)]
    mixed = [name for pair in zip(*names, strict=False) for name in pair] + names[0][len(names[1]) :]
    rows = mixed[: workers // 2], mixed[workers // 2 :]
    return cluster, tuple(
        Stage(start=bounds[number], stop=bounds[number + 1], replicas=tuple(_replica(job, name, len(row), i) for i, name in enumerate(row)))
        for number, row in enumerate(rows)
    )


def _replica(job: Job, device: str, count: int, index: int) -> Replica:
    whole = job.batch_size
    return Replica(devices=(device,), samples=(whole * (index + 1) // count - whole * index // count,))


def reference(setup: Setup) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, weights of steps and the weights at the end, by a plain loop. Of the job only the first weights and the data are used."""
    job = load_job(setup.script, setup.arguments)
    module = sys.modules[type(job.dataset).__module__]
    model = job.build_model("cpu")
    optimizer = module.optimizer(model.parameters())
    losses, weights = [], []
    for step in range(setup.steps):
        total, weight = module.loss(model, job.samples.batch(step))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float((total / weight).detach()))
        weights.append(float(weight))
    return losses, weights, model.state_dict()
