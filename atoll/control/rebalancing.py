"""Rebalancing: who should work on which stage. Pure functions of what is measured; the coordinator acts on them between steps.

A pipeline runs as fast as its slowest stage, and a stage as fast as the speeds of its peers add up, divided by its work. A move must
raise that minimum by more than it costs, and by a margin (hysteresis), so that measured speeds that waver move nobody.
"""

from collections.abc import Sequence

import msgspec

__all__ = ["Move", "RatedPeer", "best_throughput", "place", "plan_moves", "throughput"]

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


def place(capacities: Sequence[float]) -> int:
    """The stage a new peer helps most: the weakest, the first of equals."""
    return min(range(len(capacities)), key=lambda stage: (capacities[stage], stage))


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
    `minimum_replicas`, nor below one, of those who are ready.
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
            reason = f"the slowest stage goes from {throughput(before):.4g} to {after:.4g} micro-batches a second with {len(path)} moves"
            best_gain, best = gain, tuple(Move(move.worker, move.source, move.target, reason) for move in path)
    return best


def _capacities(rows: Sequence[Sequence[RatedPeer]], work: Sequence[float]) -> list[float]:
    return [sum(peer.speed for peer in row) / each for row, each in zip(rows, work, strict=True)]


def _best_step(rows: Sequence[Sequence[RatedPeer]], work: Sequence[float], minimum: int) -> tuple[int, int, RatedPeer] | None:
    """The single move after which the sorted capacities are greatest, compared from the slowest up; None where none improves them."""
    capacities = _capacities(rows, work)
    target = place(capacities)
    best: tuple[list[float], tuple[int, int, RatedPeer]] | None = None
    for source, row in enumerate(rows):
        if source == target or sum(peer.ready for peer in row) <= minimum:
            continue
        for peer in _candidates(row):
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


def _candidates(row: Sequence[RatedPeer]) -> list[RatedPeer]:
    distinct = {peer.speed: peer for peer in sorted(row, key=lambda peer: (peer.speed, peer.worker)) if peer.ready}
    peers = list(distinct.values())
    if len(peers) <= CANDIDATES:
        return peers
    return [peers[round(i * (len(peers) - 1) / (CANDIDATES - 1))] for i in range(CANDIDATES)]
