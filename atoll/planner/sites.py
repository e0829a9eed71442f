"""The plan for sites that train by themselves: every device a replica of the whole model, with a share of the batch by its speed."""

from atoll.cost import Cost, Evaluator
from atoll.errors import NoPlanError
from atoll.plan import Plan, Replica, Stage
from atoll.planner.balance import shares
from atoll.planner.reasons import bottleneck
from atoll.units import plural

__all__ = ["plan_of_sites"]


def plan_of_sites(evaluator: Evaluator, batch_size: int, mode: str) -> tuple[Plan, Cost, tuple[str, ...], str]:
    """(plan, what a site's steps take, reasons, the bottleneck); NoPlanError where a device cannot hold the whole model."""
    cluster, graph = evaluator.cluster, evaluator.graph
    if len(cluster.sites) < 2:
        raise NoPlanError(f"mode {mode}: {cluster.name} has one site; sites that train together are two or more")
    layers, devices = len(graph.layers), cluster.devices
    each = max(1, batch_size // len(devices))
    speeds = []
    for device in devices:
        replica = Replica(devices=(device.name,), samples=(each,))
        seconds = evaluator.replica_seconds(Stage(start=0, stop=layers, replicas=(replica,)), replica, float(each))
        speeds.append(1.0 / (seconds.forward + seconds.backward))
    own = shares(batch_size, speeds)
    if own is None:
        raise NoPlanError(f"mode {mode}: a batch of {batch_size} has no sample for each of {plural(len(devices), 'device')}")
    replicas = tuple(Replica(devices=(device.name,), samples=(samples,)) for device, samples in zip(devices, own, strict=True))
    micro = max(own)
    while True:
        for recompute in (False, True):
            stage = Stage(start=0, stop=layers, replicas=replicas, recompute=recompute)
            plan = Plan(graph=graph.name, cluster=cluster.name, batch_size=batch_size, micro_batch_size=micro, stages=(stage,), mode=mode)
            cost = evaluator.cost(plan)
            if cost.fits:
                reason = f"{mode}: every site trains the whole model, each of its devices on a share of the batch by its speed"
                return plan, cost, (reason,), bottleneck(plan, cost, evaluator)
        if micro == 1:
            lacks, lacking = max(cost.over_memory.items(), key=lambda item: item[1])
            raise NoPlanError(
                f"mode {mode}: the whole model does not fit on {lacks} ({lacking / 1e9:.1f} GB too little); "
                "write a plan in which every site has all stages, and give it with --plan"
            )
        micro = max(1, micro // 2)
