"""Happenings: what a coordinator tells whoever watches a swarm. A runtime turns them into events."""

from typing import TypeAlias

import msgspec

__all__ = ["Happening", "Joined", "Moved", "Resealed", "RolledBack", "StepCommitted", "TookOver"]


class TookOver(msgspec.Struct, frozen=True):
    """A coordinator began its term at this version."""

    term: int
    version: int


class StepCommitted(msgspec.Struct, frozen=True):
    """A step is durable. Loss and weight are totals."""

    epoch: int
    version: int
    loss: float
    weight: float
    skipped: bool
    seconds: float  # since the step before
    rounds: int  # how often the step was sealed


class Resealed(msgspec.Struct, frozen=True):
    """A step was sealed, and why."""

    version: int
    reason: str


class RolledBack(msgspec.Struct, frozen=True):
    """A stage was lost; everybody continues from this version."""

    epoch: int
    version: int
    stage: int


class Joined(msgspec.Struct, frozen=True):
    """A process got an incarnation and, if it is a worker, a stage."""

    name: str
    incarnation: int
    stage: int


class Moved(msgspec.Struct, frozen=True):
    """A worker was sent to another stage."""

    worker: str
    source: int
    target: int
    reason: str


Happening: TypeAlias = TookOver | StepCommitted | Resealed | RolledBack | Joined | Moved
