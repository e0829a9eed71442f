"""What each site of a plan runs where sites train by themselves: a plan of its own, of its own part of every batch. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.cluster.cluster import device_index
from atoll.errors import PlanError
from atoll.plan.modes import default_rules
from atoll.plan.plan import Mark, Plan, Problem, Stage

__all__ = ["SitePart", "site_parts", "site_problems"]


class SitePart(NamedTuple):
    """One site's part of a plan."""

    site: str
    start: int  # of its samples in the global batch
    stop: int
    plan: Plan  # of its own devices, synchronous inside, for its own samples


def site_parts(plan: Plan, cluster: Cluster) -> tuple[SitePart, ...]:
    """In the order of the cluster's sites; PlanError where the plan is none that sites can train by, each for itself."""
    problem = next(site_problems(plan, cluster), None)
    if problem is not None:
        raise PlanError(problem.sentence)
    parts: list[SitePart] = []
    for site in _sites(plan, cluster):
        own = tuple(_stage_of(stage, site, cluster) for stage in plan.stages)
        samples = sum(replica.total_samples for replica in own[0].replicas)
        start = parts[-1].stop if parts else 0
        made = replace(
            plan, stages=own, batch_size=samples, micro_batch_size=min(plan.micro_batch_size, samples), mode=default_rules().name
        )
        parts.append(SitePart(site, start, start + samples, made))
    return tuple(parts)


def site_problems(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """What keeps sites from training by themselves: replicas across sites, stages that a site lacks, shares that differ by stage."""
    places, sites = device_index(cluster), _sites(plan, cluster)
    shares: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        own = dict.fromkeys(sites, 0)
        for number, replica in enumerate(stage.replicas):
            there = list(dict.fromkeys(places[device].site for device in replica.devices))
            if len(there) > 1:
                sentence = (
                    f"stage {index}: a replica is on devices of {' and '.join(there)}; a site trains by itself, in replicas of its own"
                )
                yield Problem(sentence, Mark("devices", index, number))
            own[there[0]] += replica.total_samples
        for site in (site for site, samples in own.items() if not samples):
            yield Problem(f"stage {index}: {site} has no samples of it; each site needs the whole model", Mark("devices", index))
        for site, samples in own.items():
            if shares.setdefault(site, samples) != samples:
                sentence = f"stage {index}: {site} takes {samples} samples here and {shares[site]} before; give it as many in all"
                yield Problem(sentence, Mark("devices", index))
    if len(sites) < 2:
        yield Problem("sites train together: the plan's devices are all at one site; use another mode there", Mark("devices", 0))


def _sites(plan: Plan, cluster: Cluster) -> list[str]:
    """Of the plan's devices, in the cluster's order."""
    places = device_index(cluster)
    unknown = next((device for stage in plan.stages for device in stage.devices if device not in places), None)
    if unknown is not None:
        raise PlanError(f"the plan names {unknown}, which {cluster.name} does not have; sites are those of its cluster file")
    used = {places[device].site for stage in plan.stages for device in stage.devices}
    return [site.name for site in cluster.sites if site.name in used]


def _stage_of(stage: Stage, site: str, cluster: Cluster) -> Stage:
    places = device_index(cluster)
    return replace(stage, replicas=tuple(replica for replica in stage.replicas if places[replica.devices[0]].site == site))
