"""Workers and hops: what the pipeline engines are given of a plan, and what they say each replica did."""

from collections.abc import Callable
from typing import NamedTuple

from atoll.cost.replica import ReplicaSeconds

__all__ = ["Counts", "Hop", "Hops", "NO_HOP", "Played", "Replicas", "StageReplica", "Timeline"]


class Hop(NamedTuple):
    """A transfer between two replicas: how long it holds its link, and how long after that it arrives."""

    occupancy: float  # as long as all that share the link need (see `sharing`)
    latency: float
    link: int  # transfers of one sender on the same link queue for it; no two senders name the same; -1 for none


NO_HOP = Hop(0.0, 0.0, -1)
Hops = dict[tuple[int, int], Hop]  # of one boundary and direction, by the replicas before and after the boundary


class StageReplica(NamedTuple):
    """A replica of a stage as the engines see it."""

    forward: float
    backward: float
    device: int  # replicas of several virtual stages may share one


class Timeline(NamedTuple):
    """The end of all forwards and backwards, and what each worker did (indexed as given, stage by stage)."""

    seconds: float
    finish: list[list[float]]  # when each worker ended its last backward
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: list[list[float]]  # seconds of transfers on the chain of waits that led to its last backward


Replicas = list[list[ReplicaSeconds]]  # by stage
Counts = list[list[int]]  # micro-batches of each replica, by stage


class Played(NamedTuple):
    """What each replica of each stage did in a step."""

    finish: list[list[float]]  # when it ended its last backward
    busy: list[list[float]]
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: Callable[[int, int], float]  # by stage and replica: what transfers added to `finish`
