"""Traces: who was there when, read from a file.

Two kinds of CSV: events (`time_s,event,node_id` with `add` and `remove`) and counts (`time_s,alive_count`, where the newest leave first).
"""

import csv
from pathlib import Path

import msgspec

from atoll.errors import AtollError

__all__ = ["Change", "alive_over_time", "read_trace"]


class Change(msgspec.Struct, frozen=True):
    """At a time a peer comes (`joins`) or goes."""

    at: float
    joins: bool
    peer: str


def read_trace(path: Path) -> list[Change]:
    """The changes in a trace, in order of time."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise AtollError(f"{path}: cannot be read: {error.strerror}") from error
    columns = set(rows[0]) if rows else set()
    try:
        if {"time_s", "event"} <= columns:
            changes = _from_events(rows)
        elif {"time_s", "alive_count"} <= columns:
            changes = _from_counts(rows)
        else:
            raise AtollError(f"{path}: a trace has the columns time_s,event,node_id or time_s,alive_count")
    except (TypeError, ValueError, KeyError) as error:
        raise AtollError(f"{path}: a row cannot be read: {error}") from error
    return sorted(changes, key=lambda change: change.at)


def _from_events(rows: list[dict[str, str]]) -> list[Change]:
    found = []
    for number, row in enumerate(rows, 2):
        if row["event"] not in ("add", "remove"):
            raise AtollError(f"line {number}: an event is add or remove, not {row['event']!r}")
        found.append(Change(float(row["time_s"]), row["event"] == "add", row["node_id"]))
    return found


def _from_counts(rows: list[dict[str, str]]) -> list[Change]:
    found: list[Change] = []
    alive: list[str] = []
    made = 0
    for row in rows:
        at, count = float(row["time_s"]), int(row["alive_count"])
        while len(alive) > count:
            found.append(Change(at, False, alive.pop()))
        while len(alive) < count:
            made += 1
            alive.append(f"node{made}")
            found.append(Change(at, True, alive[-1]))
    return found


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
