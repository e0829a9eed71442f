"""Lines of text and JSON files that are larger than memory: a line is read when it is asked for."""

import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from atoll.errors import JobError

__all__ = ["JsonLines", "TextLines"]

_CHUNK_BYTES = 1 << 24  # of a file, looked at for where its lines begin


class TextLines:
    """The lines of text files, one file after the other; sample i is a line without its end. Lines that are empty are left out.

    Files are looked through once, for where their lines begin, which is all that is held: 8 bytes a line. They must not change meanwhile.
    """

    def __init__(self, *paths: str | Path) -> None:
        if not paths:
            raise JobError(f"{type(self).__name__}: give the files to read")
        self.paths = [Path(path) for path in paths]
        try:
            self._places = [_places(path) for path in self.paths]  # of each file: where its lines begin and end, in turn
        except OSError as error:
            raise JobError(f"{type(self).__name__}: {error.filename}: cannot read it: {(error.strerror or str(error)).lower()}") from error
        self._starts = [0, *accumulate(len(places) // 2 for places in self._places)]
        self._open: dict[int, mmap.mmap] = {}  # by file, by the process that reads it

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        line = 2 * (index - self._starts[number])
        begin, end = self._places[number][line : line + 2]
        return self.parse(self._mapped(number)[begin:end].decode("utf-8"))

    def parse(self, line: str) -> Any:
        """What a sample is, given its line."""
        return line

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes open the files themselves."""
        return {**vars(self), "_open": {}}

    def _mapped(self, number: int) -> mmap.mmap:
        if number not in self._open:
            with self.paths[number].open("rb") as file:
                self._open[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._open[number]


class JsonLines(TextLines):
    """The lines of JSON files (`.jsonl`), each an object; sample i is what a line says."""

    def parse(self, line: str) -> Any:
        """The value that a line holds."""
        return json.loads(line)


def _places(path: Path) -> Sequence[int]:
    places, begin, at = array("q"), 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found = chunk.find(b"\n")
            while found >= 0:
                if at + found > begin:
                    places.extend((begin, at + found))
                begin = at + found + 1
                found = chunk.find(b"\n", found + 1)
            at += len(chunk)
    if at > begin:
        places.extend((begin, at))
    return places
