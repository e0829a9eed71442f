"""Workers and hops: what the pipeline engines are given, and the timeline they give back."""

from typing import NamedTuple

__all__ = ["NO_HOP", "Hop", "Hops", "Timeline", "Worker"]


class Hop(NamedTuple):
    """A transfer between two replicas: how long it holds its link, and how long after that it arrives."""

    occupancy: float  # as long as all that share the link need (see `sharing`)
    latency: float
    link: int  # transfers of one sender on the same link queue for it; no two senders name the same; -1 for none


NO_HOP = Hop(0.0, 0.0, -1)
Hops = dict[tuple[int, int], Hop]  # of one boundary and direction, by the replicas before and after the boundary


class Worker(NamedTuple):
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
