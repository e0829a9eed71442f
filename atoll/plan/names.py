"""Device names, many at once and short: `oslo-[0-15]/[0-7]` stands for 128 names, the last range running fastest.

A pattern is a row of pieces: bare text (`oslo-`), quoted text (`"my host"`, JSON's rules) and ranges (`[0-3,7]`). Numbers are padded to the
width of the first one of their range when it begins with a zero (`[00-15]`). What `shorten` writes, `Cursor.pattern` reads back exactly.
"""

import json
import re

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
    for pattern in patterns:
        if merged and _joinable(merged[-1], pattern, position):
            previous = merged[-1]
            merged[-1] = (*previous[:position], previous[position] + pattern[position], *previous[position + 1 :])
        else:
            merged.append(pattern)
    return merged


def _joinable(a: tuple[Piece, ...], b: tuple[Piece, ...], position: int) -> bool:
    if len(a) != len(b) or position >= len(a) or not (_NUMBER.fullmatch(a[position][0]) and _NUMBER.fullmatch(b[position][0])):
        return False
    return a[:position] == b[:position] and a[position + 1 :] == b[position + 1 :]


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
