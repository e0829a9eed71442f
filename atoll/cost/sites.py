"""What a plan costs whose sites train by themselves: each site's own part is priced as it runs, and the slowest says when all are there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.cluster.cluster import site_index
from atoll.plan.sites import SitePart

if TYPE_CHECKING:
    from atoll.cost.evaluate import Cost

__all__ = ["cluster_of_site", "merged_costs"]


def cluster_of_site(cluster: Cluster, site: str) -> Cluster:
    """One site, as if there were no other."""
    return Cluster(name=cluster.name, sites=(site_index(cluster)[site],))


def merged_costs(parts: Sequence[tuple[SitePart, "Cost"]], batch_size: int) -> "Cost":
    """Of all sites: the slowest one's step, everybody's memory, bytes and money. What updates take between sites is not part of it."""
    slowest = max((cost for _, cost in parts), key=lambda cost: cost.step_seconds)
    return replace(
        slowest,
        samples_per_second=batch_size / slowest.step_seconds,
        memory={device: use for _, cost in parts for device, use in cost.memory.items()},
        memory_available={device: size for _, cost in parts for device, size in cost.memory_available.items()},
        link_bytes={link: size for _, cost in parts for link, size in cost.link_bytes.items()},
        dollars_per_step=sum(cost.dollars_per_step for _, cost in parts),
    )
