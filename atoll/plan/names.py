"""Device names, many at once and short: `oslo-[0-15]/[0-7]` stands for 128 names, the last range running fastest.

A pattern is a row of pieces: bare text (`oslo-`), quoted text (`"my host"`, JSON's rules) and ranges (`[0-3,7]`). Numbers are padded to the
width of the first one of their range when it begins with a zero (`[00-15]`). What `shorten` writes, `Cursor.pattern` reads back exactly.
"""

import json
import re
from itertools import groupby

__all__ = ["BARE", "quote", "shorten"]

BARE = r"[\w./–-]+"
_NUMBER = re.compile(r"[0-9]{1,18}")
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
    if position < len(pattern) and _NUMBER.fullmatch(pattern[position][0]):
        return True, (*pattern[:position], (), *pattern[position + 1 :])
    return False, ()


def _written(pattern: tuple[Piece, ...]) -> str:
    if all(len(piece) == 1 for piece in pattern):
        return quote("".join(piece[0] for piece in pattern))
    return "".join(quote(piece[0]) if len(piece) == 1 else f"[{_ranges(piece)}]" for piece in pattern)


def _ranges(numbers: Piece) -> str:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number == following(runs[-1][0], runs[-1][-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def following(first: str, number: str) -> str:
    """The number after `number` in a range that began with `first`, padded as `first` is."""
    width = len(first) if first.startswith("0") else 0
    return str(int(number) + 1).zfill(width)
