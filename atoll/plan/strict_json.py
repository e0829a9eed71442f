"""JSON into a typed struct, strictly: a wrong or unknown field is a `PlanError` that gives its path and the nearest right name."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from atoll.errors import PlanError

__all__ = ["check_word", "decode_strictly"]

T = TypeVar("T", bound=msgspec.Struct)

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def decode_strictly(text: "str | bytes", kind: type[T], *, what: str, version: int) -> T:
    """Decode `text` as `kind`. `what` begins every message; the optional key `format` must equal `version`."""
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PlanError(f"{what}: this is not JSON: {error}") from None
    if isinstance(raw, dict):
        raw.pop("sha256", None)  # of a plan in a run's directory, which whoever continues the run checks
        found = raw.pop("format", version)
        if found != version:
            raise PlanError(f"{what}: format: this Atoll reads format {version}, got {found!r}")
    _refuse_unknown(raw, kind, what, "")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise PlanError(f"{what}: {_in_words(str(error))}") from None


def _refuse_unknown(raw: Any, kind: Any, what: str, path: str) -> None:
    """Walk the decoded JSON beside its type; wrong kinds of value are left to `msgspec.convert`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for key, value in raw.items():
            here = f"{path}.{key}" if path else key
            if key not in fields:
                raise PlanError(f"{what}: {here}: there is no such field; {_hint(key, list(fields))}")
            _refuse_unknown(value, fields[key], what, here)
    elif get_origin(kind) is tuple and isinstance(raw, list):
        for index, value in enumerate(raw):
            _refuse_unknown(value, get_args(kind)[0], what, f"{path}[{index}]")
    elif get_origin(kind) is dict and isinstance(raw, dict):
        for key, value in raw.items():
            _refuse_unknown(value, get_args(kind)[1], what, f"{path}.{key}")
    elif get_origin(kind) is Literal and isinstance(raw, str):
        check_word(raw, get_args(kind), what=what, path=path)


def check_word(word: str, known: Sequence[str], *, what: str, path: str) -> None:
    """PlanError where the word in a field is none of those it may be."""
    if word not in known:
        raise PlanError(f"{what}: {path}: {word!r} is not one of its values; {_hint(word, list(known))}")


def _hint(wrong: str, right: list[str]) -> str:
    nearest = difflib.get_close_matches(wrong, right, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(right)}"


def _in_words(message: str) -> str:
    """`Expected `int`, got `str` - at `$.stages[0].start`` → `stages[0].start: expected a whole number, got a string`."""
    problem, _, place = message.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        return f"{path + '.' if path else ''}{missing[1]}: this field is missing"
    problem = re.sub(r"`(\w+)`", lambda match: _WORDS.get(match[1], match[0]), problem)
    return f"{path or 'the whole'}: {problem[:1].lower()}{problem[1:]}"
