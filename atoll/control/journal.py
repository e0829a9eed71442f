"""Journal: the records a coordinator writes before it speaks, how they look on disk, and what they add up to.

A line is a check-sum, a space and the record as JSON. A torn last line (the machine died while it was written) was never durable and
is dropped; damage before that is an error, since what follows was announced.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from atoll.control.messages import Committed
from atoll.errors import AtollError

__all__ = ["Checkpointed", "Epoch", "FencedError", "RECORDS", "History", "Record", "Term", "admit", "encode", "read_records", "replay"]


class FencedError(AtollError):
    """A newer coordinator has taken over: this one must stop."""

    exit_code = 1


class Term(msgspec.Struct, frozen=True, tag="term"):
    """A coordinator took over; records of older terms are refused from here on."""

    term: int


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """Everybody starts again from a checkpoint: that of `from_epoch` at `version`, or from the initial state when `version` is 0."""

    epoch: int
    version: int
    from_epoch: int


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Every stage's state at (epoch, version) is stored."""

    epoch: int
    version: int


Record: TypeAlias = Term | Epoch | Committed | Checkpointed


class History(msgspec.Struct):
    """What a journal adds up to."""

    term: int = 0
    origin: Epoch | None = None  # of the present epoch
    commit: Committed | None = None  # the last of this epoch
    checkpoint: Checkpointed | None = None  # the last

    @property
    def version(self) -> int:
        """Of the states everybody should have."""
        if self.commit is not None:
            return self.commit.version + 1
        return self.origin.version if self.origin is not None else 0

    @property
    def stored(self) -> bool:
        """Whether the states everybody should have are those of a checkpoint, or the initial ones."""
        saved, origin = self.checkpoint, self.origin
        if origin is None or self.version == origin.version:
            return True
        return saved is not None and (saved.epoch, saved.version) == (origin.epoch, self.version)


def replay(records: Iterable[Record]) -> History:
    """Reads a journal from its beginning."""
    history = History()
    for record in records:
        if isinstance(record, Term):
            history.term = max(history.term, record.term)
        elif isinstance(record, Epoch):
            history.origin, history.commit = record, None
        elif isinstance(record, Committed):
            history.commit = record
        else:
            history.checkpoint = record
    return history


def admit(newest_term: int, term: int, record: msgspec.Struct) -> int:
    """The fence: the newest term after this record, or `FencedError`. Every journal calls it where its records become durable."""
    if term < newest_term or (isinstance(record, Term) and term == newest_term):
        raise FencedError(f"the journal is at term {newest_term}; a record of term {term} is refused: another coordinator has taken over")
    return max(newest_term, term)


_TORN = re.compile(rb"[0-9a-f\0]{0,8}[ \0]?")  # how a record begins, as far as it was written
_ENCODER = msgspec.json.Encoder()
RECORDS: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: msgspec.Struct) -> bytes:
    """One line of a journal's file."""
    body = _ENCODER.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_records(data: bytes, decoder: "msgspec.json.Decoder[Any]" = RECORDS) -> tuple[Sequence[Any], int]:
    """The records in a journal's file and how many bytes of it are good; a torn end is not counted. `decoder` is of another protocol's.

    Torn is a last line that was not written whole when a machine died: its end is missing, or something before it is still zeros.
    """
    records: list[Any] = []
    good = 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        record = _decode_line(line, decoder)
        if record is None:
            if good + len(line) + 1 == len(data) and b"\0" in line:
                break
            raise AtollError(f"journal: line {number} is damaged; restore the file from a copy")
        records.append(record)
        good += len(line) + 1
    if not _TORN.fullmatch(data[good : good + 9]):
        raise AtollError(f"journal: what follows line {len(records)} is no record; restore the file from a copy")
    return records, good


def _decode_line(line: bytes, decoder: "msgspec.json.Decoder[Any]") -> Any:
    head, _, body = line.partition(b" ")
    if head != b"%08x" % zlib.crc32(body):
        return None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise AtollError(f"journal: a record cannot be read ({error}); it was written by another version of Atoll") from error
