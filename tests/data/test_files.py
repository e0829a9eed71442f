"""Lines of files are those that Python reads, whoever reads them; nothing of a file is held."""

import json
import pickle
from pathlib import Path

import pytest

from atoll.data import JsonLines, TextLines
from atoll.data import files as module
from atoll.errors import JobError


def test_lines_are_those_that_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one\n\nzwölf ist länger\nthree", "", "\n\nlast\n"]
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    expected = [line for text in texts for line in text.split("\n") if line]
    for size in (1, 3, 1 << 24):  # a line may be cut by the end of what is looked at
        monkeypatch.setattr(module, "_CHUNK_BYTES", size)
        lines = TextLines(*paths)
        assert [lines[index] for index in range(len(lines))] == expected
    sent = pickle.loads(pickle.dumps(lines))  # as a worker gets it, after it was read
    assert [sent[index] for index in reversed(range(len(sent)))] == expected[::-1]
    with pytest.raises(IndexError, match="line 4 of 4"):
        lines[4]
    with pytest.raises(JobError, match=r"TextLines: .*nowhere.txt: cannot read it: no such file"):
        TextLines(tmp_path / "nowhere.txt")


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "a\nb", "label": 1}, {"text": "", "label": 0}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert list(JsonLines(tmp_path / "rows.jsonl")) == rows
