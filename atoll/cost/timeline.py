"""The order of events in a step: a plan's replicas, routes and links are handed to the pipeline engines, and what they played comes back.

Where every stage divides the batch in the same way, micro-batches run in columns that meet only on shared links: each kind of column is
played once. Any other plan is played whole; where only the length of a long step is asked, as in a search, it is extrapolated from two
shorter ones, which is a few per cent off at worst.
"""

from collections.abc import Sequence
from itertools import pairwise

from atoll.cost.columns import in_columns, play_columns
from atoll.cost.in_flight import device_limits
from atoll.cost.pipeline import Hop, Worker, route, simulate
from atoll.cost.played import Counts, Played, Replicas
from atoll.cost.setting import Place
from atoll.cost.transfer import Transfers
from atoll.plan import Plan

__all__ = ["play"]

_PLAYED_MICRO_BATCHES = 128  # at least, and as many as there are replicas; where only the step's time is asked, twice as many at most


def play(transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: Counts, only_step: bool) -> Played:
    """Plays one step; with `only_step`, no more of it than what decides how long it is."""
    if len(plan.stages) == 1:
        busy = [n * (r.forward + r.backward) for r, n in zip(replicas[0], counts[0], strict=True)]
        held = counts[0] if plan.schedule == "gpipe" else [1] * len(busy)
        return Played([busy], [busy], [held], [[0.0] * len(busy)])
    if in_columns(plan, counts):
        return play_columns(transfers, plan, places, replicas, counts[0], only_step)
    length = max(_PLAYED_MICRO_BATCHES, sum(len(row) for row in counts))
    if not only_step or sum(counts[0]) <= 2 * length:
        return _play_whole(transfers, plan, places, replicas, counts, counts)
    return _extrapolate(transfers, plan, places, replicas, counts, length)


def _extrapolate(transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: Counts, length: int) -> Played:
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
    short = _play_whole(transfers, plan, places, scaled, fewer, counts)
    longer = _play_whole(transfers, plan, places, scaled, [[2 * few for few in row] for row in fewer], counts)
    parts = total / length - 2
    further = (max(map(max, longer.finish)) - max(map(max, short.finish))) * parts  # all ends move with the end of the step

    def extended(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
        return [[y + (y - x) * parts for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

    held = [[min(*pair) for pair in zip(*rows, strict=True)] for rows in zip(longer.in_flight, counts, strict=True)]
    finish = [[end + further for end in row] for row in longer.finish]
    return Played(finish, extended(short.busy, longer.busy), held, extended(short.transfer, longer.transfer))


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


def _play_whole(transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: Counts, shares: Counts) -> Played:
    """Plays `counts` micro-batches under the limits on those in flight that `shares` of the batch have."""
    groups: dict[tuple[str, ...], int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            groups.setdefault(replica.devices, len(groups))
    routes = [route(tuple(row)) for row in counts]
    codec = [[[0.0, 0.0] for _ in row] for row in counts]
    onward, back = _hops(transfers, plan, places, routes, codec)
    workers = [
        [
            Worker(seconds.forward + extra[0], seconds.backward + extra[1], groups[replica.devices])
            for seconds, extra, replica in zip(row, extras, stage.replicas, strict=True)
        ]
        for row, extras, stage in zip(replicas, codec, plan.stages, strict=True)
    ]
    timeline = simulate(workers, routes, onward, back, plan.schedule, device_limits(plan, shares, groups))
    busy = [[n * (w.forward + w.backward) for n, w in zip(*rows, strict=True)] for rows in zip(counts, workers, strict=True)]
    return Played(timeline.finish, busy, timeline.in_flight, timeline.transfer)


_MicroBatchHops = list[list[Hop]]  # by boundary and micro-batch


def _hops(
    transfers: Transfers, plan: Plan, places: Sequence[Place], routes: Sequence[Sequence[int]], codec: list[list[list[float]]]
) -> tuple[_MicroBatchHops, _MicroBatchHops]:
    """The hops every micro-batch takes, forth and back; `codec` gets the most each replica spends on encoding, forward and backward."""
    links: dict[object, int] = {}
    both: tuple[_MicroBatchHops, _MicroBatchHops] = ([], [])
    for s, (here, there) in enumerate(pairwise(places)):
        forth_bytes, back_bytes = transfers.boundary_bytes(plan, plan.stages[s])
        pairs = list(zip(routes[s], routes[s + 1], strict=True))
        onward, back = {}, {}
        for pair in set(pairs):
            i, j = pair
            forth, returning = transfers.both_ways(here, there, i, j)
            onward[pair] = transfers.hop(plan, forth, forth_bytes, links.setdefault(forth.resource or (s, i, j, 0), len(links)))
            back[pair] = transfers.hop(plan, returning, back_bytes, links.setdefault(returning.resource or (s, i, j, 1), len(links)))
            if plan.codecs and forth.between_sites:
                codec[s][i][0] = max(codec[s][i][0], transfers.codec_seconds(plan, forth, forth_bytes))
                codec[s + 1][j][1] = max(codec[s + 1][j][1], transfers.codec_seconds(plan, returning, back_bytes))
        both[0].append([onward[pair] for pair in pairs])
        both[1].append([back[pair] for pair in pairs])
    return both
