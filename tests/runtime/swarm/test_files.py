"""The journal's file: whatever two coordinators and crashes do, what `append` came back from is there, and no old term follows a newer."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.journal import Checkpointed, FencedError, Record, Term
from atoll.runtime.swarm.files import FileJournal

what = st.sampled_from(["append", "take over", "crash", "open anew"])


@given(st.lists(st.tuples(st.integers(0, 1), what), max_size=30))
def test_a_file_holds_what_was_appended(actions: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        journals, terms = [FileJournal(path), FileJournal(path)], [0, 0]
        expected: list[Record] = []
        newest = 0
        for number, (who, action) in enumerate(actions):
            if action == "crash":  # in the middle of a write of somebody
                with path.open("ab") as file:
                    file.write(b'0badc0de {"type":"ter')
                continue
            if action == "open anew":
                journals[who] = FileJournal(path)
                continue
            if action == "take over":
                terms[who] = newest + 1
            record: Record = Term(terms[who]) if action == "take over" else Checkpointed(0, number)
            try:
                asyncio.run(journals[who].append(terms[who], record))
            except FencedError:
                assert terms[who] < newest
            else:
                assert terms[who] >= newest
                newest = max(newest, terms[who])
                expected.append(record)
        assert asyncio.run(FileJournal(path).read()) == expected
