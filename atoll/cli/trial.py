"""Before a run on the machine that was probed: the job itself is tried for a second, in as many processes as it will have.

The prediction that people see then holds for this job and this hour, whatever the probe knew of them.
"""

import os
import selectors
import time
from collections import Counter

import msgspec

from atoll.cli.output import working
from atoll.cli.target import Target
from atoll.cluster import Cluster
from atoll.cost import Calibration, Evaluator
from atoll.cost.calibration import KindFactor
from atoll.plan import Plan, Replica, Stage
from atoll.runtime.supervise.fork_server import ForkServer
from atoll.units import format_seconds

__all__ = ["TRIAL", "tried"]

TRIAL = "atoll.trial"  # what the fork server calls it
_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0
_MOST_BYTES = 2e9  # of all copies of the model, with gradients and the optimizer's state
_LONGEST_STEP = 2.0  # seconds; what takes longer is measured by its first steps soon enough


class _Times(msgspec.Struct):
    """As `runtime/trial_steps.py` prints them."""

    compute_seconds: float
    update_seconds: float


def tried(server: ForkServer | None, plan: Plan, model: Target, cluster: Cluster, host: str) -> tuple[Calibration | None, str]:
    """How much longer than its probe says this machine takes over the job, and that in words; None where it is not tried.

    `host` is what the probe calls this machine.
    """
    used = {name for stage in plan.stages for name in stage.devices}
    devices = [device for device in cluster.devices if device.name in used]
    kinds = {device.kind.name for device in devices}
    probed = all(device.kind.measured is not None and device.host == host for device in devices)
    if server is None or not devices or not probed or len(kinds) > 1 or 16.0 * model.graph.parameters * len(devices) > _MOST_BYTES:
        return None, ""
    samples = _usual_samples(plan)
    stages = (Stage(start=0, stop=len(model.graph.layers), replicas=(Replica(devices=(devices[0].name,), samples=(samples,)),)),)
    alone = Plan(graph=model.graph.name, cluster=cluster.name, batch_size=samples, micro_batch_size=samples, stages=stages)
    predicted = Evaluator(model.graph, cluster, optimizer=model.optimizer).cost(alone).breakdown
    if model.graph.eager or not 0.0 < predicted.get("compute", 0.0) <= _LONGEST_STEP:
        return None, ""
    with working("trying the job for a second"):
        found = _measure(server, samples, len(devices))
    if found is None:
        return None, "the job could not be tried before the run: what is predicted is by the probe alone"
    compute, update = found.compute_seconds / predicted["compute"], found.update_seconds / max(predicted.get("optimizer", 0.0), 1e-9)
    factor = KindFactor(kind=devices[0].kind.name, forward=compute, backward=compute, update=update)
    sentence = (
        f"the job was tried: {samples} samples take {format_seconds(found.compute_seconds)} forward and backward in each of "
        f"{len(devices)} processes at once, where the probe has {format_seconds(predicted['compute'])}; the prediction counts with that"
    )
    loading = model.loading_seconds if len(cluster.devices) == 1 else 0.0
    return Calibration(kind_factors=(factor,), step_seconds=loading, source="the job, tried here"), sentence


def _usual_samples(plan: Plan) -> int:
    """Of a micro-batch on most devices."""
    sizes = Counter(
        min(samples, plan.micro_batch_size) for stage in plan.stages for replica in stage.replicas for samples in replica.samples if samples
    )
    return sizes.most_common(1)[0][0]


def _measure(server: ForkServer, samples: int, processes: int) -> _Times | None:
    """All at once; None where one does not say what it took."""
    cores = len(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes)))}
    pipes = [os.pipe() for _ in range(processes)]
    with open(os.devnull, "wb") as nowhere:
        started = [server.start("trial", TRIAL, [str(samples), str(_SECONDS)], environment, (end, nowhere.fileno())) for _, end in pipes]
    for _, end in pipes:
        os.close(end)
    said = {source: b"" for source, _ in pipes}
    until = time.monotonic() + _PATIENCE_SECONDS
    with selectors.DefaultSelector() as selector:
        for source in said:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(0.1):
                chunk = os.read(key.fd, 1 << 12)
                said[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
    for process in started:
        process.signal(9)
    for source in said:
        os.close(source)
    try:
        times = [msgspec.json.decode(text.splitlines()[-1], type=_Times) for text in said.values()]
    except (msgspec.DecodeError, IndexError):
        return None
    middle = len(times) // 2
    return _Times(sorted(t.compute_seconds for t in times)[middle], sorted(t.update_seconds for t in times)[middle])
