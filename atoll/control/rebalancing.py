"""Rebalancing: who should work on which stage. Pure functions of what is measured; the coordinator acts on them between steps.

A pipeline runs as fast as its slowest stage, and a stage as fast as the speeds of its peers add up, divided by its work. A move must
raise that minimum by more than it costs, and by a margin (hysteresis), so that measured speeds that waver move nobody.

Workers of one process share its device and die together: they belong on different stages, next to each other where that costs nothing, and
count as one replica. Their speeds are those of their share of the device (`atoll/control/kernels.py`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from atoll.control.multi_stage import process_of, processes
from atoll.control.settings import BACKWARD_WORK

__all__ = ["Move", "RatedPeer", "best_throughput", "move_at_once", "place", "plan_moves", "throughput"]

NEARLY = 1.1  # stages with so many times the weakest's capacity are as good a place, if they are next to what a process hosts
AT_ONCE = 0.05  # of what is left of a step must be gained by a move in the middle of it
MICRO_BATCH_WORK = 1.0 + BACKWARD_WORK  # in forwards
CANDIDATES = 8  # peers of a stage that are tried for a move: those of distinct speeds, spread from slow to fast


class RatedPeer(msgspec.Struct, frozen=True):
    """A worker and its measured speed. One that is not `ready` is still fetching its stage: it counts, but it is not moved."""

    worker: str
    speed: float
    ready: bool = True


class Move(msgspec.Struct, frozen=True):
    """One peer changes stage; `reason` says what that brings."""

    worker: str
    source: int
    target: int
    reason: str


def throughput(capacities: Sequence[float]) -> float:
    """Of a pipeline of stages with these capacities."""
    return min(capacities, default=0.0)


def place(capacities: Sequence[float], hosted: Collection[int] = (), planned: int = -1) -> int:
    """The stage of a new peer: the one its plan means it for, else where it helps most, which is the weakest, the first of equals.

    `hosted` are the stages its process has already: it gets another while there is one, and among those nearly as weak as the weakest one
    that is next to them.
    """
    every = range(len(capacities))
    if planned in every and planned not in hosted:
        return planned
    free = [stage for stage in every if stage not in hosted] or list(every)
    enough = NEARLY * min(capacities[stage] for stage in free)
    near = [stage for stage in free if capacities[stage] <= enough and (stage - 1 in hosted or stage + 1 in hosted)]
    return min(near or free, key=lambda stage: (capacities[stage], stage))


def best_throughput(speeds: Sequence[float], work: Sequence[float]) -> float:
    """What the best assignment of these peers reaches: exact for equal speeds and equal work, else greedy from the fastest down."""
    if len(speeds) < len(work):
        return 0.0
    totals = [0.0] * len(work)
    for speed in sorted(speeds, reverse=True):
        stage = place([total / each for total, each in zip(totals, work, strict=True)])
        totals[stage] += speed
    return throughput([total / each for total, each in zip(totals, work, strict=True)])


def plan_moves(
    stages: Sequence[Sequence[RatedPeer]],
    work: Sequence[float],
    *,
    migration_seconds: float,
    horizon_seconds: float,
    minimum_replicas: int = 1,
    hysteresis: float = 0.03,
    most: int = 8,
) -> tuple[Move, ...]:
    """The moves, in order, whose gain over the horizon exceeds their cost by most; none where no gain passes the hysteresis.

    While a peer migrates it works nowhere, which costs throughput where its old stage becomes the slowest. No stage falls below
    `minimum_replicas`, nor below one, of processes that are ready; nobody moves to a stage that its process has already.
    """
    rows = [list(row) for row in stages]
    before = _capacities(rows, work)
    away = list(before)  # capacities while the peers moved so far are under way
    path: list[Move] = []
    best: tuple[Move, ...] = ()
    best_gain = 0.0
    while len(path) < most:
        step = _best_step(rows, work, max(1, minimum_replicas))
        if step is None:
            break
        source, target, peer = step
        rows[source].remove(peer)
        rows[target].append(RatedPeer(peer.worker, peer.speed, ready=False))  # nobody is moved twice
        away[source] -= peer.speed / work[source]
        path.append(Move(peer.worker, source, target, ""))
        after = throughput(_capacities(rows, work))
        if after <= throughput(before) * (1 + hysteresis):
            continue
        cost = migration_seconds * max(0.0, throughput(before) - throughput(away))
        gain = (after - throughput(before)) * max(0.0, horizon_seconds - migration_seconds) - cost
        if gain > best_gain:
            reason = _expected(throughput(before), after, len(path))
            best_gain, best = gain, tuple(Move(move.worker, move.source, move.target, reason) for move in path)
    return best


def move_at_once(
    stages: Sequence[Sequence[RatedPeer]],
    work: Sequence[float],
    summed: Mapping[str, float],
    remaining: float,
    *,
    migration_seconds: float,
    minimum_replicas: int = 1,
) -> Move | None:
    """A move that pays within the step under way: of `remaining` micro-batches, of which a peer that moves leaves behind what it has
    `summed`, for others to do again. None where no move is worth it, or where the weakest stage has nobody to give its state.

    Speeds are in forwards a second.
    """
    capacities = _capacities(stages, work)
    target = place(capacities)
    before = throughput(capacities) / MICRO_BATCH_WORK
    if not any(peer.ready for peer in stages[target]) or before <= 0:
        return None
    best: tuple[float, Move] | None = None
    for source in range(len(stages)):
        for peer in _movable(stages, source, target, max(1, minimum_replicas)) if source != target else ():
            away = list(capacities)
            away[source] -= peer.speed / work[source]
            after = list(away)
            after[target] += peer.speed / work[target]
            rate, meanwhile = throughput(after) / MICRO_BATCH_WORK, throughput(away) / MICRO_BATCH_WORK
            if rate <= before:
                continue
            again = summed.get(peer.worker, 0.0)
            seconds = (remaining + again) / rate + migration_seconds * (1 - meanwhile / rate)
            gain = remaining / before - seconds
            if gain > AT_ONCE * remaining / before and (best is None or gain > best[0]):
                reason = f"this step is expected to end {gain:.0f} s sooner"
                best = gain, Move(peer.worker, source, target, reason)
    return best[1] if best is not None else None


def _expected(before: float, after: float, moves: int) -> str:
    """What moves bring, for people: stages are as fast as they are measured to be, so it is expected, not known."""
    how = "once this move is made" if moves == 1 else f"once these {moves} moves are made"
    if before <= 0:
        return f"a stage does nothing yet; {how} all of them work"
    ratio = after / before
    faster = f"{ratio - 1:.0%} faster" if ratio < 2 else f"{ratio:.1f} times as fast"
    return f"the swarm is expected to go {faster} {how}"


def _capacities(rows: Sequence[Sequence[RatedPeer]], work: Sequence[float]) -> list[float]:
    return [sum(peer.speed for peer in row) / each for row, each in zip(rows, work, strict=True)]


def _best_step(rows: Sequence[Sequence[RatedPeer]], work: Sequence[float], minimum: int) -> tuple[int, int, RatedPeer] | None:
    """The single move after which the sorted capacities are greatest, compared from the slowest up; None where none improves them."""
    capacities = _capacities(rows, work)
    target = place(capacities)
    best: tuple[list[float], tuple[int, int, RatedPeer]] | None = None
    for source in range(len(rows)):
        if source == target:
            continue
        for peer in _candidates(rows, source, target, minimum):
            after = list(capacities)
            after[source] -= peer.speed / work[source]
            after[target] += peer.speed / work[target]
            key = sorted(after)
            if best is None or key > best[0]:
                best = key, (source, target, peer)
    if best is None or not _clearly_greater(best[0], sorted(capacities)):
        return None
    return best[1]


def _clearly_greater(first: Sequence[float], second: Sequence[float]) -> bool:
    """In the first place where they differ by more than rounding."""
    for a, b in zip(first, second, strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a > b
    return False


def _candidates(rows: Sequence[Sequence[RatedPeer]], source: int, target: int, minimum: int) -> list[RatedPeer]:
    """Peers that may move, one of each speed: of equals one whose process hosts a stage next to the target and none next to the source."""
    movable = [peer for peer in _movable(rows, source, target, minimum) if peer.ready]
    around = [_processes_around(rows, stage, source) for stage in (target, source)]

    def order(peer: RatedPeer) -> tuple[float, int, str]:
        name = process_of(peer.worker)
        return peer.speed, (name in around[0]) - (name in around[1]), peer.worker

    peers = list({peer.speed: peer for peer in sorted(movable, key=order)}.values())
    if len(peers) <= CANDIDATES:
        return peers
    return [peers[round(i * (len(peers) - 1) / (CANDIDATES - 1))] for i in range(CANDIDATES)]


def _movable(rows: Sequence[Sequence[RatedPeer]], source: int, target: int, minimum: int) -> list[RatedPeer]:
    """Whose process is not on the target yet, and without whom enough processes that are ready stay on the source."""
    there = processes(peer.worker for peer in rows[target])
    counts = Counter(process_of(peer.worker) for peer in rows[source] if peer.ready)
    staying = {name: len(counts) - (count == 1) for name, count in counts.items()}  # processes, when one worker of `name` goes
    return [peer for peer in rows[source] if (name := process_of(peer.worker)) not in there and staying.get(name, len(counts)) >= minimum]


def _processes_around(rows: Sequence[Sequence[RatedPeer]], stage: int, left: int) -> set[str]:
    """Those with a worker next to a stage, but for the stage that is left."""
    nearby = [near for near in (stage - 1, stage + 1) if 0 <= near < len(rows) and near != left]
    return processes(peer.worker for near in nearby for peer in rows[near])
