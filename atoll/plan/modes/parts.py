"""Parts: several models that learn from one another, each whole on a device of its own. Their rules, and where each is computed.

A plan has a stage for every part, in the order of the job, with one layer: the part's number.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from atoll.cluster import Cluster
from atoll.cluster.cluster import Device
from atoll.errors import PlanError
from atoll.graph import Graph
from atoll.plan.modes.rules import HERE, ModeRules
from atoll.plan.plan import Mark, Plan, Problem, Replica, Stage

__all__ = ["PARTS", "PartLoad", "PartsMode", "PartsOptions", "place_parts"]

_TRAINING = 3.0  # forward and backward, in forwards


class PartsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `atoll run` for parts, and their section of run.json."""

    credits: Annotated[
        int,
        Meta(
            description="How many steps a part may be ahead of those that receive from it.",
            extra={"min": 1, "max": 1024, "only": "only parts send to one another"},
        ),
    ] = 4


class PartsMode(ModeRules):
    """For models at different sites."""

    name = "parts"
    summary = "models that learn from one another (atoll.collaborate), each at its own site"
    runtime = "atoll.runtime.modes.parts.runtime:PartsRuntime"
    options = PartsOptions
    needs_devices = False
    for_collaborations = True
    limits = "Mode parts trains what atoll.collaborate makes. "

    def why_not_graph(self, graph: Graph) -> str | None:
        """A graph is of one model."""
        return f"mode {self.name} trains what atoll.collaborate makes, each part whole; {graph.name} is one model"

    def problems(self, plan: Plan) -> Iterator[Problem]:
        """What is in a plan beside one device for every part."""
        for number, stage in enumerate(plan.stages):
            if len(stage.devices) != 1:
                yield Problem("mode parts computes every part whole, on one device", Mark("devices", number))
        yield from super().problems(plan)


PARTS = PartsMode()


class PartLoad(NamedTuple):
    """What a part needs: how much it computes, and where it was said to be."""

    name: str
    parameters: int
    trains: bool
    site: str | None
    precision: str

    @property
    def work(self) -> float:
        """In relation to others': what its parameters cost in a step."""
        return self.parameters * (_TRAINING if self.trains else 1.0)


def place_parts(parts: Sequence[PartLoad], cluster: Cluster | None, job: str, batch_size: int) -> tuple[Plan, tuple[str, ...]]:
    """A device for every part, and why: the largest first, each where it and what was placed there before end soonest.

    A part stays at its site, if it names one; PlanError where the cluster has no such site. Without a cluster all are on this machine.
    """
    chosen = (
        _chosen(parts, cluster) if cluster is not None else {part.name: (f"{HERE}/{n}", "on this machine") for n, part in enumerate(parts)}
    )
    stages = tuple(
        Stage(start=number, stop=number + 1, replicas=(Replica(devices=(chosen[part.name][0],), samples=(batch_size,)),))
        for number, part in enumerate(parts)
    )
    name = cluster.name if cluster is not None else HERE
    plan = Plan(graph=job, cluster=name, batch_size=batch_size, micro_batch_size=batch_size, stages=stages, mode=PARTS.name)
    return plan, tuple(f"{part.name}: {chosen[part.name][1]}" for part in parts)


def _chosen(parts: Sequence[PartLoad], cluster: Cluster) -> dict[str, tuple[str, str]]:
    busy: dict[str, float] = {}
    found: dict[str, tuple[str, str]] = {}
    sites = [site.name for site in cluster.sites]
    for part in sorted(parts, key=lambda part: (part.site is None, -part.work)):
        if part.site is not None and part.site not in sites:
            raise PlanError(f"{part.name}: its site is {part.site!r}, and {cluster.name} has {', '.join(sites)}")
        devices = [device for device in cluster.devices if part.site in (None, device.site)]

        def ends(device: Device, part: PartLoad = part) -> float:
            return busy.get(device.name, 0.0) + part.work / (device.kind.peak(part.precision) * device.speed)

        best = min(devices, key=ends)
        shared = busy.get(best.name, 0.0) > 0
        busy[best.name] = ends(best)
        why = "as it says" if part.site is not None else "where its steps end soonest"
        with_others = ", with others" if shared else ""
        found[part.name] = (best.name, f"on {best.name} at {best.site}, {why}{with_others}")
    return found
