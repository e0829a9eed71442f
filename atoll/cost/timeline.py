"""The order of events in a step: a plan's replicas, routes and links are handed to the pipeline engines, and what they played comes back.

Where every stage divides the batch in the same way, micro-batches run in columns that meet only on shared links: each kind of column is
played once. Any other plan is played whole; where only the length of a long step is asked, as in a search, it is extrapolated from two
shorter ones, which is a few per cent off at worst.
"""

from collections.abc import Sequence
from itertools import pairwise

from atoll.cost.columns import in_columns, play_columns
from atoll.cost.context import DevicePlace
from atoll.cost.pipeline import Counts, Hop, Hops, Played, Replicas, StageReplica, simulate
from atoll.cost.transfer import Path, SharedLinks, Transfers
from atoll.plan import Plan
from atoll.plan.division import pair_counts, route
from atoll.plan.schedule_policy import device_limits

__all__ = ["play", "play_routed", "routed_hops", "routing_codec_seconds"]

_PLAYED_MICRO_BATCHES = 128  # of the shorter of two steps, at least; and as many as there are replicas
_WORTH_PLAYING = 4  # times as many are played whole: extrapolation plays three times


def play(transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], replicas: Replicas, counts: Counts, only_step: bool) -> Played:
    """Plays one step; with `only_step`, no more of it than what decides how long it is."""
    if len(plan.stages) == 1:
        busy = [n * (r.forward + r.backward) for r, n in zip(replicas[0], counts[0], strict=True)]
        held = counts[0] if plan.schedule == "gpipe" else [1] * len(busy)
        return Played([busy], [busy], [held], lambda s, i: 0.0)
    if in_columns(plan, counts):
        return play_columns(transfers, plan, places, replicas, counts[0], only_step)
    length = max(_PLAYED_MICRO_BATCHES, sum(len(row) for row in counts))
    if not only_step or sum(counts[0]) <= _WORTH_PLAYING * length:
        return play_routed(transfers, plan, places, replicas, counts, counts)
    return _extrapolate(transfers, plan, places, replicas, counts, length)


def _extrapolate(
    transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], replicas: Replicas, counts: Counts, length: int
) -> Played:
    """From two shorter steps, one twice the other: what the second half took, every further part takes.

    Counts are scaled down and rounded; a replica's times are scaled by what rounding took from its share or gave to it, so that its work
    in proportion to the others' is exact.
    """
    total = sum(counts[0])
    fewer = [_apportion(row, length) for row in counts]
    scaled = [
        [seconds.scaled(count * length / (few * total)) for seconds, count, few in zip(*rows, strict=True)]
        for rows in zip(replicas, counts, fewer, strict=True)
    ]
    short = play_routed(transfers, plan, places, scaled, fewer, counts)
    longer = play_routed(transfers, plan, places, scaled, [[2 * few for few in row] for row in fewer], counts)
    parts = total / length - 2
    further = (max(map(max, longer.finish)) - max(map(max, short.finish))) * parts  # all ends move with the end of the step
    return Played([[end + further for end in row] for row in longer.finish], [], [], lambda s, i: 0.0)


def _apportion(counts: list[int], total: int) -> list[int]:
    """Counts in nearly the same proportion that sum to `total`, each at least one (largest remainders)."""
    before = sum(counts)
    fewer = [max(1, count * total // before) for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: fewer[i] - counts[i] * total / before)
    missing = total - sum(fewer)
    while missing:
        for i in by_remainder if missing > 0 else reversed(by_remainder):
            if missing > 0 or fewer[i] > 1:
                fewer[i] += 1 if missing > 0 else -1
                missing -= 1 if missing > 0 else -1
            if not missing:
                break
    return fewer


def play_routed(
    transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], replicas: Replicas, counts: Counts, shares: Counts
) -> Played:
    """Plays `counts` micro-batches under the limits on those in flight that `shares` of the batch have."""
    groups: dict[tuple[str, ...], int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            groups.setdefault(replica.devices, len(groups))
    routes = [route(tuple(row)) for row in counts]
    onward, back = routed_hops(transfers, plan, places, counts)
    workers = [
        [
            StageReplica(seconds.forward + forth_codec, seconds.backward + back_codec, groups[replica.devices])
            for seconds, forth_codec, back_codec, replica in zip(row, *codec, stage.replicas, strict=True)
        ]
        for row, codec, stage in zip(replicas, routing_codec_seconds(transfers, plan, places, counts), plan.stages, strict=True)
    ]
    timeline = simulate(workers, routes, onward, back, plan.schedule, device_limits(plan, shares, groups))
    busy = [[n * (w.forward + w.backward) for n, w in zip(*rows, strict=True)] for rows in zip(counts, workers, strict=True)]
    return Played(timeline.finish, busy, timeline.in_flight, lambda s, i: timeline.transfer[s][i])


_Use = tuple[int, int, tuple[str, ...]]  # the stage and replica that send, and the link they share with others


def routed_hops(transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], counts: Counts) -> tuple[list[Hops], list[Hops]]:
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
    transfers: Transfers, plan: Plan, places: Sequence[DevicePlace], counts: Counts
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
