"""The audit log: what crossed a site's border, one line a message, each with a hash over itself and the hash of the line before.

Beside a log NAME.jsonl lies its head, NAME.head.json: how many records there are and the hash of the last, under a checksum, so that
records cut off at the end are missed. Whoever can write both files can write another history: note a head elsewhere to compare with.

A line is `{"hash":"…",` and the rest of the record, and hash = SHA-256(hash before ‖ SHA-256(rest)); the bytes count, not how JSON is read.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from atoll.errors import AtollError

__all__ = ["AuditLog", "AuditRecord", "LogFinding", "check_log", "log_names"]

_LINE = re.compile(rb'\{"hash":"([0-9a-f]{64})",(.*\})')
_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ("records": *(\d+), "hash": "([0-9a-f]{64})"\})\n')
_NAME = re.compile(r"[^\W_][\w.\-]*")


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message that crossed a border, or was kept from it: `refused` says why."""

    number: int
    unix_seconds: float
    direction: Literal["out", "in"]
    site: str
    peer: str
    peer_site: str | None
    kind: str
    name: str
    codec: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each, as they travelled
    bytes: int
    refused: str = ""


class LogFinding(msgspec.Struct, frozen=True):
    """What a log turned out to be. It is whole where there are no problems; notes are no problems."""

    name: str
    records: tuple[AuditRecord, ...]
    hashes: tuple[str, ...]  # of the records
    head: str  # the hash of the last record there is
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _genesis(name: str) -> str:
    """What the first record follows: a log put in another's place is noticed."""
    return hashlib.sha256(f"atoll audit log 1: {name}".encode()).hexdigest()


def _chained(before: str, rest_digest: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(before) + rest_digest).hexdigest()


def _head_line(records: int, last: str) -> bytes:
    """Of one length whatever is in it, so that it is written over in one call."""
    rest = f'"records": {records:15d}, "hash": "{last}"}}'.encode()
    return b'{"sha256": "%s", %s\n' % (hashlib.sha256(rest).hexdigest().encode(), rest)


class AuditLog:
    """A log that is appended to, by one process; any thread. A record is with the operating system when `append` returns.

    A log that is there already is checked and gone on with. AtollError: it is not whole, or cannot be written.
    """

    def __init__(self, directory: Path, name: str, clock: Callable[[], float] = time.time) -> None:
        if not _NAME.fullmatch(name):
            raise AtollError(f"an audit log cannot be named {name!r}: letters, digits, '_', '.' and '-', beginning with a letter or digit")
        self.path = directory / f"{name}.jsonl"
        self._clock, self._lock = clock, threading.Lock()
        self._records, self._last, self._size = 0, _genesis(name), 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists() or _head_path(directory, name).exists():
                self._go_on(directory, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            self._head = os.open(_head_path(directory, name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, self._size)  # a line that was cut short when its process died: its message never went
            os.pwrite(self._head, _head_line(self._records, self._last), 0)
        except OSError as error:
            raise AtollError(f"{self.path}: cannot write the audit log: {error.strerror or error}") from None

    def _go_on(self, directory: Path, name: str) -> None:
        found = check_log(directory, name)
        if found.problems:
            raise AtollError(f"{self.path}: is not whole, so nothing is added to it: {found.problems[0]}; `atoll audit` shows all")
        self._records, self._last = len(found.records), found.head
        content = self.path.read_bytes()
        self._size = content.rfind(b"\n") + 1

    def append(self, **fields: Any) -> AuditRecord:
        """Writes a record down: the fields of AuditRecord but `number` and `unix_seconds`."""
        with self._lock:
            record = AuditRecord(number=self._records + 1, unix_seconds=round(self._clock(), 6), **fields)
            rest = msgspec.json.encode(record)[1:]
            last = _chained(self._last, hashlib.sha256(rest).digest())
            line = b'{"hash":"%s",%s\n' % (last.encode(), rest)
            try:
                if os.write(self._file, line) != len(line):
                    os.ftruncate(self._file, self._size)
                    raise OSError("there is no room for it")
                self._records, self._last, self._size = record.number, last, self._size + len(line)
                os.pwrite(self._head, _head_line(self._records, last), 0)
            except OSError as error:
                raise AtollError(f"{self.path}: cannot write the audit log: {error.strerror or error}") from None
            return record

    def close(self) -> None:
        """Nothing is written any more. Closing again does nothing."""
        with self._lock:
            for descriptor in {self._file, self._head} - {-1}:
                os.close(descriptor)
            self._file = self._head = -1


def _head_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.head.json"


def log_names(directory: Path) -> list[str]:
    """The logs of a directory: whatever has a log or a head."""
    logs = {path.name.removesuffix(".jsonl") for path in directory.glob("*.jsonl")}
    return sorted(logs | {path.name.removesuffix(".head.json") for path in directory.glob("*.head.json")})


class _Head(NamedTuple):
    records: int
    hash: str


class _Lines(msgspec.Struct):
    """What the lines of a log say, whatever order they stand in."""

    records: dict[int, AuditRecord] = {}
    hashes: dict[int, str] = {}
    digests: dict[int, bytes] = {}  # of what each hash is over
    problems: list[str] = []
    notes: list[str] = []

    def read(self, lines: Iterable[bytes]) -> None:
        latest = 0
        for place, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                self.notes.append(f"line {place} was cut short while it was written: its message did not cross, and it does not count")
                continue
            record = self._record(line)
            if record is None:
                self.problems.append(f"line {place} is no record")
            elif record.number in self.records:
                self.problems.append(f"line {place}: record {record.number} is there twice")
            else:
                if record.number < latest:
                    self.problems.append(f"line {place}: record {record.number} stands after record {latest}: it was moved")
                latest = max(latest, record.number)
                self.records[record.number] = record

    def _record(self, line: bytes) -> AuditRecord | None:
        match = _LINE.fullmatch(line.rstrip(b"\n"))
        if match is None:
            return None
        try:
            record = msgspec.json.decode(b"{" + match[2], type=AuditRecord)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if record.number < 1:
            return None
        if record.number not in self.records:
            self.hashes[record.number] = match[1].decode()
            self.digests[record.number] = hashlib.sha256(match[2]).digest()
        return record

    def check_chain(self, genesis: str) -> None:
        """Every record must follow the one before it, where that is there."""
        for number in sorted(self.records):
            before = genesis if number == 1 else self.hashes.get(number - 1)
            if before is not None and _chained(before, self.digests[number]) != self.hashes[number]:
                other = f", or record {number - 1} and its hash were" if number > 1 else ", or it is another log's"
                self.problems.append(f"record {number} was changed{other}")

    def check_numbers(self) -> None:
        """None may be missing up to the last there is."""
        last = 0
        for number in sorted(self.records):
            if number != last + 1:
                self.problems.append(f"{_range(last + 1, number - 1)} missing")
            last = number

    def check_heads(self, before: _Head, after: _Head, genesis: str) -> None:
        """The heads as they were before and after the log was read, in case it is being written."""
        last = max(self.records, default=0)
        if before.records > last:
            self.problems.append(f"{_range(last + 1, before.records)} missing at the end: the head knows {before.records}")
        elif after.records < last - 1:
            self.problems.append(f"{_range(after.records + 1, last)} not known to the head, which is an older one")
        elif after.records < last:
            self.notes.append(f"record {last} was written and its head was not: the process ended between the two")
        found = self.hashes.get(before.records) if before.records else genesis
        if found is not None and found != before.hash:
            self.problems.append(f"record {before.records} is not the one its head knows")


def _range(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} … {last} are"


def check_log(directory: Path, name: str) -> LogFinding:
    """Reads a log, also one that is being written, and says everything that is wrong with it. AtollError where it cannot be read."""
    lines, path = _Lines(), directory / f"{name}.jsonl"
    try:
        before = _read_head(directory, name)
        with path.open("rb") as file:
            lines.read(file)
        after = _read_head(directory, name)
    except FileNotFoundError:
        lines.problems.append("the log is gone; only its head is left")
        before = after = _read_head(directory, name)
    except OSError as error:
        raise AtollError(f"{path}: cannot read it: {(error.strerror or str(error)).lower()}") from None
    lines.check_numbers()
    lines.check_chain(_genesis(name))
    last = max(lines.records, default=0)
    if isinstance(before, str) or isinstance(after, str):
        lines.problems.append(before if isinstance(before, str) else str(after))
    else:
        lines.check_heads(before, after, _genesis(name))
    numbers = sorted(lines.records)
    records, hashes = tuple(lines.records[number] for number in numbers), tuple(lines.hashes[number] for number in numbers)
    return LogFinding(name, records, hashes, lines.hashes.get(last, _genesis(name)), tuple(lines.problems), tuple(lines.notes))


def _read_head(directory: Path, name: str) -> _Head | str:
    """The head of a log, or what is wrong with it."""
    path = _head_path(directory, name)
    try:
        match = _HEAD.fullmatch(path.read_bytes())
    except FileNotFoundError:
        return f"its head {path.name} is missing: nothing tells whether records were cut off at the end"
    if match is None or hashlib.sha256(match[2]).hexdigest() != match[1].decode():
        return f"its head {path.name} is not what was written: its checksum differs"
    return _Head(int(match[3]), match[4].decode())
