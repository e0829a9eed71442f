"""`Job.run` under torchrun, Slurm or Kubernetes: this process is one of many, and together they are a lockstep run.

What runs where comes from a plan or a cluster file, given to `Job.run` or in the environment (`ATOLL_PLAN`, `ATOLL_CLUSTER`). Rank r is the
r-th of the cluster file's devices that the plan uses. Only rank 0 needs the files: it tells the others. With neither, every process takes
an equal share of the batch: data parallel.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from atoll.cluster import Cluster, load_cluster
from atoll.errors import JobError
from atoll.events import EventLog, Observer
from atoll.graph import Graph
from atoll.job import Job
from atoll.plan import Plan, Replica, Stage, load_plan
from atoll.plan.division import apportion
from atoll.plan.modes.lockstep import LOCKSTEP
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.worker import Ended, Planning, run_rank
from atoll.runtime.run_directory import SPEEDS, RunDirectory, RunSettings, run_lock

__all__ = ["ClusterSource", "PlanSource", "run_among_others"]

PlanSource: TypeAlias = Plan | str | Path
ClusterSource: TypeAlias = Cluster | str | Path


def run_among_others(
    job: Job,
    role: Role,
    *,
    out: str | Path | None,
    plan: PlanSource | None,
    cluster: ClusterSource | None,
    resume: bool,
    checkpoint_every: int | None,
    observers: Sequence[Observer],
    own: Observer,
    environ: Mapping[str, str],
) -> Ended:
    """Train this process's rank. `observers` are told of events on rank 0 only, `own` on every rank of what concerns its process."""
    plan, cluster = plan or environ.get("ATOLL_PLAN") or None, cluster or environ.get("ATOLL_CLUSTER") or None
    if role.rank:  # rank 0 tells those whose hosts do not have the files
        plan, cluster = None if _is_missing(plan) else plan, None if _is_missing(cluster) else cluster
    devices = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    order = [device.name for device in devices.devices] if devices is not None else None
    planning: Planning = given if given is not None else _Planner(job, role, devices)
    directory = RunDirectory(out) if out is not None else None
    settings = RunSettings(
        script=str(Path(sys.argv[0]).resolve()),
        arguments=tuple(sys.argv[1:]),
        checkpoint_every=checkpoint_every,
        speeds=environ.get(SPEEDS) or None,
    )
    told = observers if role.rank == 0 else ()
    with ExitStack() as stack:
        if directory is not None and role.rank == 0:
            stack.enter_context(run_lock(directory.path))
            _begin(directory, settings, resume or role.generation > 0)
        return run_rank(job, planning, role, directory=directory, settings=settings, observers=told, order=order, cluster=devices, own=own)


def _is_missing(source: object) -> bool:
    return isinstance(source, (str, Path)) and not Path(source).exists()


def _begin(directory: RunDirectory, settings: RunSettings, resume: bool) -> None:
    if resume:
        directory.settings()  # an error where there is no run to continue
        directory.write_settings(settings)
    else:
        directory.create(settings)
    EventLog(directory.path, resume=True).close()  # the run's time goes on from here


class _Planner:
    """Makes the plan once the job is captured; only rank 0 is asked."""

    def __init__(self, job: Job, role: Role, cluster: Cluster | None) -> None:
        self._job, self._role, self._cluster = job, role, cluster

    def __call__(self, graph: Graph) -> Plan:
        if self._cluster is None:
            return equal_shares(graph, self._job.batch_size, self._job.micro_batch_size, self._role.world_size)
        from atoll.planner import plan  # it needs scipy, which takes a moment to load

        return plan(graph, self._cluster, batch_size=self._job.batch_size, mode=LOCKSTEP.name).candidates[0].plan


def equal_shares(graph: Graph, batch_size: int, micro_batch_size: int | None, processes: int) -> Plan:
    """Data parallel over all processes, as equally as the batch allows."""
    if processes > batch_size:
        raise JobError(f"{processes} processes cannot share a batch of {batch_size} samples; start fewer or make batch_size larger")
    shares = apportion(batch_size, [1] * processes)
    replicas = tuple(Replica(devices=(f"process-{rank}",), samples=(share,)) for rank, share in enumerate(shares))
    return Plan(
        graph=graph.name,
        cluster="processes",
        batch_size=batch_size,
        micro_batch_size=min(micro_batch_size or shares[0], shares[0]),
        stages=(Stage(start=0, stop=len(graph.layers), replicas=replicas),),
    )
