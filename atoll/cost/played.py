"""Played: what the pipeline engines are given of a plan, and what they say each replica did."""

from collections.abc import Callable
from typing import NamedTuple

from atoll.cost.replica import ReplicaSeconds

__all__ = ["Counts", "Played", "Replicas"]

Replicas = list[list[ReplicaSeconds]]  # by stage
Counts = list[list[int]]  # micro-batches of each replica, by stage


class Played(NamedTuple):
    """What each replica of each stage did in a step."""

    finish: list[list[float]]  # when it ended its last backward
    busy: list[list[float]]
    in_flight: list[list[int]]  # most micro-batches held at once
    transfer: Callable[[int, int], float]  # by stage and replica: what transfers added to `finish`
