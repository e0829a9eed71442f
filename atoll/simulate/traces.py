"""Traces: who was there when, read from a file.

Two kinds of CSV: events (`time_s,event,node_id` with `add` and `remove`) and counts (`time_s,alive_count`). Counts do not say who leaves:
it is drawn, the same for the same file.
Recorded traces begin in the middle and tell things twice: an event that says what is so already changes nothing.
"""

import csv
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from atoll.control.multi_stage import process_of
from atoll.errors import AtollError

__all__ = ["Change", "alive_over_time", "read_trace"]

_Row: TypeAlias = Mapping[str, str | None]  # a short row lacks its last values


class Change(msgspec.Struct, frozen=True):
    """At a time a peer comes (`joins`) or goes."""

    at: float
    joins: bool
    peer: str


def read_trace(path: Path) -> list[Change]:
    """The changes in a trace, in order of time, those of one instant in order of lines: who comes is not there, who goes is."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise AtollError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise AtollError(f"{path}: is no CSV: {error}") from error
    try:
        changes = _changes(columns, rows)
    except ValueError as error:
        raise AtollError(f"{path}: {error}") from None
    if not changes:
        raise AtollError(f"{path}: nobody ever comes in this trace")
    return changes


def _changes(columns: Sequence[str], rows: Iterable[tuple[int, _Row]]) -> list[Change]:
    """ValueError, naming the line, for what cannot be."""
    if {"time_s", "event", "node_id"} <= set(columns):
        return _from_events(_in_time(rows))
    if {"time_s", "alive_count"} <= set(columns):
        return _from_counts(_in_time(rows))
    raise ValueError("a trace has the columns time_s,event,node_id or time_s,alive_count")


def _in_time(rows: Iterable[tuple[int, _Row]]) -> list[tuple[float, int, _Row]]:
    """With their times, by which they are sorted, and their lines."""
    return sorted(((_seconds(row["time_s"], line), line, row) for line, row in rows), key=lambda found: found[:2])


def _seconds(text: str | None, line: int) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"line {line}: a time is a number of seconds, 0 or more, not {text!r}")
    return seconds


def _from_events(rows: Iterable[tuple[float, int, _Row]]) -> list[Change]:
    found = []
    there: set[str] = set()
    for at, line, row in rows:
        event, peer = row["event"], _name(row["node_id"], line)
        if event not in ("add", "remove"):
            raise ValueError(f"line {line}: an event is add or remove, not {event!r}")
        if (event == "add") != (peer in there):
            there ^= {peer}
            found.append(Change(at, event == "add", peer))
    return found


def _name(text: str | None, line: int) -> str:
    """Of a peer. Some names a simulated swarm has for its own processes and for the workers that a process hosts."""
    if not text:
        raise ValueError(f"line {line}: a node has no name")
    if process_of(text) != text or text == "coordinator" or text.startswith("feeder"):
        raise ValueError(f"line {line}: a node cannot be called {text!r}: names with `+`, coordinator and feeder… are the swarm's own")
    return text


def _from_counts(rows: Iterable[tuple[float, int, _Row]]) -> list[Change]:
    found: list[Change] = []
    alive: list[str] = []
    made, draw = 0, random.Random(0)
    for at, line, row in rows:
        count = _count(row["alive_count"], line)
        while len(alive) > count:
            found.append(Change(at, False, alive.pop(draw.randrange(len(alive)))))
        while len(alive) < count:
            made += 1
            alive.append(f"node{made}")
            found.append(Change(at, True, alive[-1]))
    return found


def _count(text: str | None, line: int) -> int:
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"line {line}: a count is a whole number, 0 or more, not {text!r}")
    return int(text)


def alive_over_time(changes: list[Change]) -> list[tuple[float, int]]:
    """(time, how many are there from then on)."""
    found: list[tuple[float, int]] = []
    alive = 0
    for change in changes:
        alive += 1 if change.joins else -1
        if found and found[-1][0] == change.at:
            found[-1] = (change.at, alive)
        else:
            found.append((change.at, alive))
    return found
