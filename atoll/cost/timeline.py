"""The order of events in a step: a plan's replicas, routes and links are handed to the pipeline engines, and what they played comes back.

Where every stage divides the batch in the same way, micro-batches run in columns that meet only on shared links: each kind of column is
played once. Any other plan is played whole; where only the length of a long step is asked, as in a search, it is extrapolated from two
shorter ones, which is a few per cent off at worst.
"""

from collections.abc import Sequence

from atoll.cost.columns import in_columns, play_columns
from atoll.cost.in_flight import device_limits
from atoll.cost.pipeline import simulate
from atoll.cost.played import Counts, Played, Replicas
from atoll.cost.routed_ways import routed_hops, routing_codec_seconds
from atoll.cost.routing import route
from atoll.cost.setting import Place
from atoll.cost.transfer import Transfers
from atoll.cost.workers import Worker
from atoll.plan import Plan

__all__ = ["play", "play_routed"]

_PLAYED_MICRO_BATCHES = 128  # of the shorter of two steps, at least; and as many as there are replicas
_WORTH_PLAYING = 4  # times as many are played whole: extrapolation plays three times


def play(transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: Counts, only_step: bool) -> Played:
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


def play_routed(transfers: Transfers, plan: Plan, places: Sequence[Place], replicas: Replicas, counts: Counts, shares: Counts) -> Played:
    """Plays `counts` micro-batches under the limits on those in flight that `shares` of the batch have."""
    groups: dict[tuple[str, ...], int] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            groups.setdefault(replica.devices, len(groups))
    routes = [route(tuple(row)) for row in counts]
    onward, back = routed_hops(transfers, plan, places, counts)
    workers = [
        [
            Worker(seconds.forward + forth_codec, seconds.backward + back_codec, groups[replica.devices])
            for seconds, forth_codec, back_codec, replica in zip(row, *codec, stage.replicas, strict=True)
        ]
        for row, codec, stage in zip(replicas, routing_codec_seconds(transfers, plan, places, counts), plan.stages, strict=True)
    ]
    timeline = simulate(workers, routes, onward, back, plan.schedule, device_limits(plan, shares, groups))
    busy = [[n * (w.forward + w.backward) for n, w in zip(*rows, strict=True)] for rows in zip(counts, workers, strict=True)]
    return Played(timeline.finish, busy, timeline.in_flight, lambda s, i: timeline.transfer[s][i])
