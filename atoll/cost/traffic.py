"""Bytes a step puts on every link, by the plan alone."""

from collections.abc import Sequence
from itertools import pairwise

from atoll.codec import codec_spec
from atoll.cost.communication import collective_bytes
from atoll.cost.inside_traffic import InsideTraffic
from atoll.cost.played import Counts
from atoll.cost.routing import pair_counts
from atoll.cost.setting import Place, Setting
from atoll.cost.synchronisation import Synchronisation, Work
from atoll.cost.transfer import Transfers
from atoll.plan import Plan

__all__ = ["Traffic"]


class Traffic:
    """Bytes on the links of any plan; what repeats is remembered."""

    def __init__(self, setting: Setting, synchronisation: Synchronisation, transfers: Transfers) -> None:
        self._setting, self._synchronisation, self._transfers = setting, synchronisation, transfers
        self._inside = InsideTraffic(setting)

    def link_bytes(
        self,
        plan: Plan,
        places: Sequence[Place],
        counts: Counts,
        works: Sequence[Sequence[Work]],
        tied_volumes: Sequence[tuple[list[int], float]],
    ) -> dict[str, float]:
        """By link name: `"oslo–rome"` between sites, a site's name for its network, `"inside hosts"` for the rest.

        `counts` are the micro-batches of each replica, `works` what each stage synchronises, `tied_volumes` what several do together.
        """
        carried: dict[str, float] = {}
        for stage, place, row in zip(plan.stages, places, works, strict=True):
            for work in row:
                _add_sync(plan, work, carried)
            self._inside.add(plan, stage, place, carried)
        self._add_tied(plan, places, tied_volumes, carried)
        if len(places) > 1:
            self._add_boundaries(plan, places, counts, carried)
        return {name: nbytes for name, nbytes in carried.items() if nbytes}

    def _add_tied(self, plan: Plan, places: Sequence[Place], volumes: Sequence[tuple[list[int], float]], carried: dict[str, float]) -> None:
        """Gradients of parameters that several stages hold copies of."""
        for homes, nbytes in volumes:
            for group in self._synchronisation.tied_groups([places[s] for s in homes]):
                for name, amount in collective_bytes(group.span, nbytes, 2.0, plan.codecs).items():
                    carried[name] = carried.get(name, 0.0) + amount * group.times

    def _add_boundaries(self, plan: Plan, places: Sequence[Place], counts: Counts, carried: dict[str, float]) -> None:
        """Activations forth and gradients back, along the routes of the micro-batches."""
        for s, (before, after) in enumerate(pairwise(counts)):
            times = self._times_by_link(places[s], places[s + 1], before, after)
            both = sum(self._transfers.boundary_bytes(plan, plan.stages[s]))
            for (link, between_sites), count in times.items():
                codec = plan.codecs.get(link) if between_sites and plan.codecs else None
                ratio = codec_spec(codec).ratio(self._setting.element_bytes) if codec else 1.0
                carried[link] = carried.get(link, 0.0) + both * ratio * count

    def _times_by_link(self, here: Place, there: Place, before: list[int], after: list[int]) -> dict[tuple[str, bool], int]:
        """How many micro-batches cross a boundary over each link, one way; True for a link between sites."""
        times: dict[tuple[str, bool], int] = {}
        if before == after:
            for link, columns in self._transfers.boundary(here, there).links:
                times[link] = sum([before[column] for column in columns])
            return times
        for (i, j), count in pair_counts(tuple(before), tuple(after)).items():
            path = self._transfers.path(here, i, there, j)
            if path.link:
                link = (path.link, path.between_sites)
                times[link] = times.get(link, 0) + count
        return times


def _add_sync(plan: Plan, work: Work, carried: dict[str, float]) -> None:
    """Gradients among replicas; under islands links between sites carry them once every `outer_steps`."""
    for group in work.groups:
        rare = {link.name for link in group.span.wan_links} if plan.mode == "islands" else ()
        for name, amount in collective_bytes(group.span, work.nbytes, 2.0, plan.codecs).items():
            carried[name] = carried.get(name, 0.0) + amount * group.times / (max(1, plan.outer_steps) if name in rare else 1)
