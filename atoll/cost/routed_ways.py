"""The ways of micro-batches that are routed one by one: which replicas send to which, how often, and what a transfer then takes."""

from collections.abc import Sequence
from itertools import pairwise

from atoll.cost.played import Counts
from atoll.cost.routing import pair_counts
from atoll.cost.setting import Place
from atoll.cost.sharing import SharedLinks
from atoll.cost.transfer import Path, Transfers
from atoll.cost.workers import Hop, Hops
from atoll.plan import Plan

__all__ = ["routed_hops", "routing_codec_seconds"]

_Use = tuple[int, int, tuple[str, ...]]  # the stage and replica that send, and the link they share with others


def routed_hops(transfers: Transfers, plan: Plan, places: Sequence[Place], counts: Counts) -> tuple[list[Hops], list[Hops]]:
    """What a micro-batch takes from replica to replica, forth and back, by boundary.

    A replica's transfers in one direction over a link that it shares with others queue for it; so do those over the wire to one receiver.
    """
    directions = [_Direction(), _Direction()]
    for s, (before, after) in enumerate(pairwise(map(tuple, counts))):
        both = transfers.boundary_bytes(plan, plan.stages[s])
        for pair, times in pair_counts(before, after).items():
            ways = transfers.both_ways(places[s], places[s + 1], *pair)
            directions[0].add(s, pair, (s, pair[0], ways[0].resource), ways[0], transfers.hop(plan, ways[0], both[0]).occupancy, times)
            directions[1].add(s, pair, (s + 1, pair[1], ways[1].resource), ways[1], transfers.hop(plan, ways[1], both[1]).occupancy, times)
    shared = SharedLinks()
    for direction in directions:
        direction.share(shared)
    boundaries = len(plan.stages) - 1
    onward, first_link = directions[0].hops(boundaries, shared, 0)
    return onward, directions[1].hops(boundaries, shared, first_link)[0]


class _Direction:
    """All ways that micro-batches take in one direction."""

    def __init__(self) -> None:
        self._ways: list[tuple[int, tuple[int, int], _Use, Path, float]] = []  # boundary, replicas, use, path, seconds of a transfer alone
        self._times: dict[_Use, int] = {}  # transfers of a sender over a shared link in a step
        self._seconds: dict[_Use, float] = {}  # of all of them together

    def add(self, boundary: int, pair: tuple[int, int], use: _Use, path: Path, seconds: float, times: int) -> None:
        self._ways.append((boundary, pair, use, path, seconds))
        if path.resource:
            self._times[use] = self._times.get(use, 0) + times
            self._seconds[use] = self._seconds.get(use, 0.0) + times * seconds

    def share(self, shared: SharedLinks) -> None:
        for use, times in self._times.items():
            shared.add(use[2], times, self._seconds[use] / times)

    def hops(self, boundaries: int, shared: SharedLinks, first_link: int) -> tuple[list[Hops], int]:
        """By boundary; links are numbered from `first_link` on, and the next number is given back."""
        rows: list[Hops] = [{} for _ in range(boundaries)]
        held = {use: (shared.occupancy(use[2], times), first_link + n) for n, (use, times) in enumerate(self._times.items())}
        following = first_link + len(held)
        for boundary, pair, use, path, seconds in self._ways:
            occupancy, link = held.get(use) or (seconds, following)
            following += link == following
            rows[boundary][pair] = Hop(occupancy, path.latency, link)
        return rows, following


def routing_codec_seconds(
    transfers: Transfers, plan: Plan, places: Sequence[Place], counts: Counts
) -> list[tuple[list[float], list[float]]]:
    """The most each replica of each stage spends on encoding a micro-batch, in forward and in backward."""
    seconds = [([0.0] * len(row), [0.0] * len(row)) for row in counts]
    if plan.codecs:
        for s, (before, after) in enumerate(pairwise(map(tuple, counts))):
            forth_bytes, back_bytes = transfers.boundary_bytes(plan, plan.stages[s])
            forward, backward = seconds[s][0], seconds[s + 1][1]
            for i, j in pair_counts(before, after):
                forth, returning = transfers.both_ways(places[s], places[s + 1], i, j)
                forward[i] = max(forward[i], transfers.codec_seconds(plan, forth, forth_bytes))
                backward[j] = max(backward[j], transfers.codec_seconds(plan, returning, back_bytes))
    return seconds
