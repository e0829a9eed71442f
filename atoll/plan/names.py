"""Device names, many at once and short: `oslo-[0-15]/[0-7]` stands for 128 names, the last range running fastest.

A pattern is a row of pieces: bare text (`oslo-`), quoted text (`"my host"`, JSON's rules) and ranges (`[0-3,7]`). Numbers are padded to the
width of the first one of their range when it begins with a zero (`[00-15]`). What `shorten` writes, `Cursor` reads back exactly.
"""

import difflib
import json
import re
from collections.abc import Iterable
from itertools import groupby, product
from typing import NoReturn

from atoll.errors import PlanError

__all__ = ["Cursor", "quote", "ranges_text", "shorten"]

BARE = r"[\w./–-]+"
_DIGITS = re.compile(r"[0-9]{1,18}")
_PIECES = re.compile(r"[0-9]+|[^0-9]+")

Piece = tuple[str, ...]  # the texts that stand at one position of a pattern


def quote(name: str) -> str:
    """The name as the text form writes it: bare where that is unambiguous, else as a JSON string."""
    if re.fullmatch(BARE, name):
        return name
    return json.dumps(name, ensure_ascii=not name.isprintable())


def shorten(names: tuple[str, ...]) -> list[str]:
    """Patterns that expand, one after another, to exactly these names in this order."""
    patterns: list[tuple[Piece, ...]] = [tuple((piece,) for piece in _PIECES.findall(name)) for name in names]
    longest = max((len(pattern) for pattern in patterns), default=0)
    for position in reversed(range(longest)):
        patterns = _merge(patterns, position)
    return [_written(pattern) for pattern in patterns]


def _merge(patterns: list[tuple[Piece, ...]], position: int) -> list[tuple[Piece, ...]]:
    """Join neighbours that differ only in the number at `position`.

    Called from the last position to the first, so everything left of `position` is still a single text, which is what makes the joined
    pattern expand in the same order as its parts.
    """
    merged: list[tuple[Piece, ...]] = []
    for (has_number, _), run in groupby(patterns, lambda pattern: _around(pattern, position)):
        alike = list(run)
        if has_number:
            numbers = tuple(number for pattern in alike for number in pattern[position])
            merged.append((*alike[0][:position], numbers, *alike[0][position + 1 :]))
        else:
            merged += alike
    return merged


def _around(pattern: tuple[Piece, ...], position: int) -> tuple[bool, tuple[Piece, ...]]:
    """Whether a number stands at `position`, and what stands around it: neighbours that agree in both may join."""
    if position < len(pattern) and _DIGITS.fullmatch(pattern[position][0]):
        return True, (*pattern[:position], (), *pattern[position + 1 :])
    return False, ()


def _written(pattern: tuple[Piece, ...]) -> str:
    if all(len(piece) == 1 for piece in pattern):
        return quote("".join(piece[0] for piece in pattern))
    return "".join(quote(piece[0]) if len(piece) == 1 else f"[{ranges_text(piece)}]" for piece in pattern)


def ranges_text(numbers: Iterable[str]) -> str:
    """`["3", "4", "5", "9"]` → `"3-5,9"`; numbers of a range are padded as its first one is."""
    runs: list[list[str]] = []
    for number in numbers:
        width = len(runs[-1][0]) if runs and runs[-1][0].startswith("0") else 0
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(width):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# Blanks, comments, and line ends that are followed by an indented, empty or comment line: a statement goes on over indented lines.
_BLANK = re.compile(r"(?:[ \t\r]+|#[^\n]*|\n(?=[ \t]|\r?\n|#|\r?\Z))*")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_MOST_NAMES = 1_000_000  # no cluster is larger; a slip such as [0-99999999999] must not fill the memory


class Cursor:
    """Reads one text from start to end. Every `take_*` skips blanks and comments first and raises `PlanError` at its place."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.offset = 0
        self.skip_lines()

    def skip_blanks(self) -> None:
        """Move over blanks, comments and continued lines."""
        match = _BLANK.match(self.text, self.offset)
        assert match is not None
        self.offset = match.end()

    def skip_lines(self) -> None:
        """Move over empty lines as well, to the next statement."""
        self.skip_blanks()
        while self.text.startswith("\n", self.offset):
            self.offset += 1
            self.skip_blanks()

    @property
    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        return self.offset >= len(self.text)

    @property
    def at_line_end(self) -> bool:
        """Whether the statement is over."""
        self.skip_blanks()
        return self.at_end or self.text[self.offset] == "\n"

    def fail(self, message: str, offset: int | None = None) -> NoReturn:
        """Raise a `PlanError` that names the place and shows the line with a caret."""
        place = self.offset if offset is None else offset
        start = self.text.rfind("\n", 0, place) + 1
        line_number = self.text.count("\n", 0, place) + 1
        line = self.text[start:].split("\n", 1)[0].rstrip()
        column = place - start
        window = max(0, column - 60)
        shown = ("…" if window else "") + line[window : window + 100]
        caret = " " * (column - window + bool(window)) + "^"
        raise PlanError(f"{self.source}:{line_number}:{column + 1}: {message}\n    {shown}\n    {caret}")

    def expected(self, what: str) -> NoReturn:
        """Fail, saying what should have stood here and what does."""
        found = re.compile(rf"{BARE}|[^\n]").match(self.text, self.offset)
        self.fail(f"expected {what}, found {repr(found[0][:40]) if found else 'the end of the line'}")

    def peek(self, symbol: str) -> bool:
        """Whether `symbol` comes next."""
        self.skip_blanks()
        return self.text.startswith(symbol, self.offset)

    def take_if(self, symbol: str) -> bool:
        """Take `symbol` if it comes next."""
        found = self.peek(symbol)
        self.offset += len(symbol) if found else 0
        return found

    def take(self, symbol: str, where: str) -> None:
        """Take `symbol`, or say it was expected `where`."""
        if not self.take_if(symbol):
            self.expected(f"'{symbol}' {where}")

    def take_match(self, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
        """Take what the pattern matches here, if it does."""
        self.skip_blanks()
        match = pattern.match(self.text, self.offset)
        if match:
            self.offset = match.end()
        return match

    def take_number(self, what: str) -> int:
        """Take a whole number."""
        match = self.take_match(_NUMBER)
        if not match:
            self.expected(what)
        return int(match[0])

    def take_choice(self, choices: Iterable[str], what: str) -> str:
        """Take one of a few words; a wrong one gets the nearest right one."""
        options = list(choices)
        self.skip_blanks()
        start = self.offset
        match = self.take_match(re.compile(BARE))
        if not match or match[0] not in options:
            nearest = difflib.get_close_matches(match[0], options, 1) if match else []
            self.offset = start
            self.expected(f"{what} ({', '.join(options)})" + (f" — perhaps {nearest[0]!r}" if nearest else ""))
        return match[0]

    def take_name(self, what: str) -> str:
        """Take one name, bare or quoted."""
        self.skip_blanks()
        start = self.offset
        names = self.take_pattern(what)
        if len(names) != 1:
            self.fail(f"expected {what}, found a pattern of {len(names)} names", start)
        return names[0]

    def take_pattern(self, what: str) -> tuple[str, ...]:
        """Take a pattern and expand it, last range fastest."""
        self.skip_blanks()
        start = self.offset
        pieces: list[list[str]] = []
        while (piece := self._piece()) is not None:
            pieces.append(piece)
        if not pieces:
            self.expected(what)
        count = 1
        for piece in pieces:
            count *= len(piece)
        if count > _MOST_NAMES:
            self.fail(f"this pattern stands for {count:,} names, more than {_MOST_NAMES:,}", start)
        return tuple("".join(texts) for texts in product(*pieces))

    def _piece(self) -> list[str] | None:
        if match := re.compile(BARE).match(self.text, self.offset):
            self.offset = match.end()
            return [match[0]]
        if self.text.startswith('"', self.offset):
            return [self._quoted()]
        if self.text.startswith("[", self.offset):
            self.offset += 1
            return self._ranges()
        return None

    def _quoted(self) -> str:
        match = _QUOTED.match(self.text, self.offset)
        if not match:
            self.fail("this quoted name does not end on its line")
        try:
            name = json.loads(match[0])
        except ValueError:
            self.fail("this quoted name is not a valid JSON string")
        self.offset = match.end()
        assert isinstance(name, str)
        return name

    def _ranges(self) -> list[str]:
        numbers: list[str] = []
        while True:
            start = self.offset
            match = _RANGE.match(self.text, start)
            if not match:
                self.expected("a number or a range such as 0-7 after '['")
            self.offset = match.end()
            first, last = match[1], match[2] or match[1]
            if int(last) < int(first):
                self.fail(f"a range must not run backwards, got {match[0]}", start)
            if int(last) - int(first) >= _MOST_NAMES:
                self.fail(f"this range stands for more than {_MOST_NAMES:,} names", start)
            width = len(first) if first.startswith("0") else 0
            numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
            if self.take_if("]"):
                return numbers
            self.take(",", "or ']' in a range")
