"""Run files: what a swarm keeps in its run's directory beside states: the job's description, when it began, the wish to stop."""

import time
from pathlib import Path

import msgspec

from atoll.control.journal import Term, decode
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.spec import SwarmSpec

__all__ = ["JOURNAL", "STATES", "STOP", "Start", "newest_term", "read_spec", "read_start", "write_spec", "write_start"]

JOURNAL = "journal.jsonl"
STATES = "swarm"
STOP = "stop"  # a file of this name asks the coordinator to end the run after a checkpoint
_SPEC = "swarm.json"
_START = "started.json"


class Start(msgspec.Struct, frozen=True):
    """When `atoll run` was last started, so that every coordinator of this start tells the same time."""

    at_seconds: float  # the run's own time then
    unix_seconds: float
    term: int  # the newest in the journal then
    address: str  # where the coordinator listens
    number: int = 0  # how often it was started before
    workers: int = 0  # that were started with it, one for every stage a process hosts


def write_spec(directory: RunDirectory, spec: SwarmSpec) -> None:
    """For the coordinator's process, and for one started in its place."""
    directory.write(_SPEC, msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_spec(path: Path) -> SwarmSpec:
    """What was written."""
    return RunDirectory(path).read_as(_SPEC, SwarmSpec)


def write_start(directory: RunDirectory, address: str, workers: int = 0, term: int | None = None) -> Start:
    """The run is started now, for the first time or again; `term` is the newest of a journal that is not in the directory."""
    before = read_start(directory)
    number = before.number + 1 if before is not None else 0
    newest = newest_term(directory.path) if term is None else term
    start = Start(directory.last_moment(), time.time(), newest, address, number, workers)
    directory.write(_START, msgspec.json.encode(start))
    return start


def read_start(directory: RunDirectory) -> Start | None:
    """What was written; None where nothing was."""
    return directory.read_as(_START, Start) if (directory.path / _START).exists() else None


def newest_term(path: Path) -> int:
    """Of the journal; 0 where there is none."""
    journal = path / JOURNAL
    records = decode(journal.read_bytes())[0] if journal.exists() else ()
    return max((record.term for record in records if isinstance(record, Term)), default=0)
