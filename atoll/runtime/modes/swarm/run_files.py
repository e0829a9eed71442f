"""Run files: what a swarm keeps in its run's directory beside states: the job's description, when it began, the wish to stop."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.events import AnyEvent, RunStarted
from atoll.runtime.modes.swarm.spec import SwarmSpec
from atoll.runtime.run_directory import RunDirectory, with_checksum

__all__ = ["JOURNAL", "STATES", "STOP", "Start", "read_spec", "read_start", "since_start", "write_spec", "write_start"]

JOURNAL = "journal.jsonl"
STATES = "swarm"
STOP = "stop"  # a file of this name asks the coordinator to end the run after a checkpoint
_SPEC = "swarm.json"
_START = "started.json"


class Start(msgspec.Struct, frozen=True):
    """When `atoll run` was last started, so that every coordinator of this start tells the same time."""

    at_seconds: float  # the run's own time then
    unix_seconds: float
    address: str  # where the coordinator listens
    number: int = 0  # how often it was started before
    workers: int = 0  # that were started with it, one for every stage a process hosts


def write_spec(directory: RunDirectory, spec: SwarmSpec) -> None:
    """For the coordinator's process, and for one started in its place."""
    directory.write(_SPEC, with_checksum(msgspec.json.format(msgspec.json.encode(spec), indent=1)))


def read_spec(path: Path) -> SwarmSpec:
    """What was written."""
    return RunDirectory(path).read_as(_SPEC, SwarmSpec)


def write_start(directory: RunDirectory, address: str, workers: int = 0) -> Start:
    """The run is started now, for the first time or again."""
    before = read_start(directory)
    number = before.number + 1 if before is not None else 0
    start = Start(directory.last_moment(), time.time(), address, number, workers)
    directory.write(_START, with_checksum(msgspec.json.encode(start)))
    return start


def read_start(directory: RunDirectory) -> Start | None:
    """What was written; None where nothing was."""
    return directory.read_as(_START, Start) if (directory.path / _START).exists() else None


def since_start(events: Sequence[AnyEvent], start: Start) -> Sequence[AnyEvent]:
    """What was told since then, by whoever coordinated; nothing where nobody has told of that start."""
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if isinstance(event, RunStarted):
            return events[index:] if event.unix_seconds >= start.unix_seconds else ()
    return ()
