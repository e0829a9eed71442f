"""Records, the fence, and what a journal adds up to."""

import pytest

from atoll.control.journal import Checkpointed, Epoch, FencedError, Record, Term, admit, encode, read_records, replay
from atoll.control.messages import Committed
from atoll.errors import AtollError

COMMIT = Committed(0, 3, (2, 7), ("a", "b"), 0.5, False, 12.25, 6.0)
RECORDS: list[Record] = [Term(1), Epoch(0, 0, 0), COMMIT, Checkpointed(0, 4)]


def test_a_journal_survives_the_disk() -> None:
    data = b"".join(map(encode, RECORDS))
    assert read_records(data) == (RECORDS, len(data))


def test_a_torn_end_was_never_durable() -> None:
    data = b"".join(map(encode, RECORDS))
    whole = len(b"".join(map(encode, RECORDS[:-1])))
    for cut in range(whole, len(data)):
        assert read_records(data[:cut]) == (RECORDS[:-1], whole)
    for cut in range(whole, len(data) - 1):  # the block with its end was on the disk, one before it not yet
        assert read_records(data[:cut] + bytes(len(data) - cut - 1) + b"\n") == (RECORDS[:-1], whole)


def test_damage_in_the_middle_is_an_error() -> None:
    lines = [encode(record) for record in RECORDS]
    with pytest.raises(AtollError, match="line 2 is damaged"):
        read_records(lines[0] + lines[1].replace(b"0", b"1", 1) + lines[2])


@pytest.mark.parametrize("rubbish", [b"\x93\x8f rubbish", b"{}\n", b"not a journal at all\n", b"PK\x03\x04" * 100])
def test_a_file_that_is_no_journal_or_ends_as_none_is_an_error(rubbish: bytes) -> None:
    for before in ([], RECORDS):
        with pytest.raises(AtollError, match=r"journal: .* restore the file from a copy"):
            read_records(b"".join(map(encode, before)) + rubbish)


def test_the_fence_refuses_older_terms_and_a_second_claim() -> None:
    assert admit(0, 1, Term(1)) == 1
    assert admit(1, 1, COMMIT) == 1
    assert admit(1, 2, Term(2)) == 2
    for term, record in ((1, COMMIT), (2, Term(2)), (1, Term(1))):
        with pytest.raises(FencedError, match="taken over"):
            admit(2, term, record)


def test_history() -> None:
    history = replay(RECORDS)
    assert (history.term, history.version, history.commit, history.checkpoint) == (1, 4, COMMIT, Checkpointed(0, 4))
    history = replay([*RECORDS, Epoch(1, 4, 0), Term(2)])
    assert (history.term, history.version, history.commit) == (2, 4, None)
    assert replay([]).version == 0
