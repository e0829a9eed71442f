"""Notices: what a coordinator tells whoever watches a swarm. A runtime turns them into events."""

from typing import TypeAlias

import msgspec

__all__ = [
    "Happening",
    "Joined",
    "Left",
    "Moved",
    "Refused",
    "Repaired",
    "Resealed",
    "Returned",
    "RolledBack",
    "Saved",
    "Silent",
    "StateRefused",
    "StatesDiffer",
    "StepCommitted",
    "TooSlow",
    "TookOver",
]


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


class Refused(msgspec.Struct, frozen=True):
    """A step is not committed, since this number of it must not be: the run ends with the state before it."""

    version: int
    what: str  # "loss", "gradient" or "weight"
    value: float


class Resealed(msgspec.Struct, frozen=True):
    """A step was sealed, and why."""

    version: int
    reason: str


class StateRefused(msgspec.Struct, frozen=True):
    """A state that somebody sent to be stored was not taken."""

    name: str
    version: int
    stage: int
    reason: str


class StatesDiffer(msgspec.Struct, frozen=True):
    """Workers of a stage have states that are not equal to the bit, and no majority has the same; that of the one told was stored."""

    version: int
    stage: int


class RolledBack(msgspec.Struct, frozen=True):
    """A stage was lost; everybody continues from this version."""

    epoch: int
    version: int
    stage: int
    lost: int = 0  # steps that are made again


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


class Silent(msgspec.Struct, frozen=True):
    """A process was not heard for too long and is not used: it died, stands still or is cut off."""

    name: str
    stage: int
    seconds: float


class Returned(msgspec.Struct, frozen=True):
    """A process that was silent is heard again, as the one it was."""

    name: str
    stage: int


class TooSlow(msgspec.Struct, frozen=True):
    """A worker has not got its stage's state in several steps; commits wait for it no longer."""

    name: str
    stage: int
    fetched: float  # of the state, in the last attempt


class Left(msgspec.Struct, frozen=True):
    """A worker that asked to leave was let go."""

    name: str
    stage: int


class Repaired(msgspec.Struct, frozen=True):
    """A sealed step lacked something, which is asked for again."""

    version: int
    missing: tuple[int, ...]  # micro-batches, by stage


class Saved(msgspec.Struct, frozen=True):
    """Every stage's state at this version is stored, and the journal says so."""

    epoch: int
    version: int


Happening: TypeAlias = (
    TookOver
    | StepCommitted
    | Refused
    | Resealed
    | RolledBack
    | Joined
    | Moved
    | Silent
    | Returned
    | TooSlow
    | Left
    | Repaired
    | Saved
    | StateRefused
    | StatesDiffer
)
