"""Groups of devices that communicate at the same time: the different layouts among them, and the slowest.

Groups of one stage are often alike, but not always: one may live inside a site while another crosses two. All wait for the slowest.
"""

from collections.abc import Sequence
from typing import NamedTuple

from atoll.cluster import Cluster, Device
from atoll.cost.calibration import Calibration
from atoll.cost.communication import Span, all_reduce_seconds, sharing_of, span_with

__all__ = ["Group", "distinct_groups", "slowest_of", "slowest_span"]

_TYPICAL_BYTES = 64e6  # at which layouts are compared


class Group(NamedTuple):
    """One or more groups that live on the same hosts."""

    span: Span  # of any of them, with the contention among all groups
    hosts: tuple[str, ...]  # whose interfaces they use; () for a group inside one host
    links: tuple[str, ...]  # between sites, by name
    times: int  # how many there are


def distinct_groups(
    cluster: Cluster, groups: Sequence[Sequence[Device]], calibration: Calibration, others: Sequence[Sequence[Device]] = ()
) -> tuple[Group, ...]:
    """The different layouts among groups that communicate at once, `others` beside them."""
    by_hosts: dict[tuple[str, ...], list[Sequence[Device]]] = {}
    for group in groups:
        by_hosts.setdefault(tuple(sorted([device.host for device in group])), []).append(group)
    sharing = sharing_of([*groups, *others])
    found = []
    for names, alike in by_hosts.items():
        span = span_with(cluster, alike[0], calibration, sharing)
        hosts = tuple(dict.fromkeys(names))
        links = tuple([link.name for link in span.wan_links])
        found.append(Group(span, hosts if len(hosts) > 1 else (), links, len(alike)))
    return tuple(found)


def slowest_span(
    cluster: Cluster, groups: Sequence[Sequence[Device]], calibration: Calibration, others: Sequence[Sequence[Device]] = ()
) -> Span:
    """The span of that of the groups which takes longest, when all of them and `others` communicate at once."""
    return slowest_of(distinct_groups(cluster, groups, calibration, others), calibration)


def slowest_of(groups: Sequence[Group], calibration: Calibration) -> Span:
    """The span of that of the groups which takes longest."""
    spans = [group.span for group in groups]
    return spans[0] if len(spans) == 1 else max(spans, key=lambda span: all_reduce_seconds(span, _TYPICAL_BYTES, calibration, {}))
