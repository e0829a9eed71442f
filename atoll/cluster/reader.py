"""Reading tables out of TOML with errors that say file, place, key, what was wrong and what was meant."""

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from atoll import units
from atoll.errors import ClusterError

__all__ = ["BANDWIDTH", "BYTES", "FLOPS", "LATENCY", "MEMORY", "MEMORY_BANDWIDTH", "PREEMPTIONS", "PRICE_PER_BYTE", "PRICE_PER_HOUR"]
__all__ += ["NAME", "Quantity", "Table", "nearest"]


@dataclass(frozen=True)
class Quantity:
    """A kind of number with a unit, and the range in which one is believed."""

    parse: Callable[[str], float]
    spellings: Callable[[float], tuple[str, ...]]  # the nicest first; the last one is always read back exactly
    low: float
    high: float
    example: str

    def exact(self, value: float) -> str:
        """The nicest text that reads back as the very same number."""
        return units.exactly(value, self.parse, *self.spellings(value))

    def read_at(self, where: str, value: object) -> float:
        """The number, or `ClusterError` saying where it stands and what is wrong with it."""
        try:
            return self.read(value)
        except ValueError as error:
            raise ClusterError(f"{where}: {error}") from None

    def read(self, value: object) -> float:
        """The number, or `ValueError` saying what is wrong with it."""
        if not isinstance(value, str):
            raise ValueError(f"must be text with a unit, like {self.example!r}, got {_shown(value)}")
        number = self.parse(value)
        if number < 0 or (number == 0 and self.low > 0):
            raise ValueError(f"must {'be positive' if self.low > 0 else 'not be negative'}, got {value!r}")
        if not self.low <= number <= self.high:
            raise ValueError(f"must be between {self.exact(self.low)} and {self.exact(self.high)}, got {value!r}")
        return number


def _bytes_spelled(value: float) -> tuple[str, ...]:
    return units.format_bytes(value), f"{value / 2**30:g} GiB", f"{value!r} B"


def _rate_in_bytes(value: float) -> tuple[str, ...]:
    return f"{units.format_bytes(value)}/s", f"{value!r} B/s"


def _rate_spelled(value: float) -> tuple[str, ...]:
    return units.format_rate(value), *_rate_in_bytes(value)


def _flops_spelled(value: float) -> tuple[str, ...]:
    return units.format_flops(value).replace("FLOP/s", "FLOPS"), f"{value!r} FLOPS"


MEMORY = Quantity(units.parse_bytes, _bytes_spelled, 1e6, 1e15, "32 GB")
BYTES = Quantity(units.parse_bytes, _bytes_spelled, 1.0, 1e15, "64 kB")
BANDWIDTH = Quantity(units.parse_rate, _rate_spelled, 125.0, 1e15 / 8, "200 Mbit/s")
MEMORY_BANDWIDTH = Quantity(units.parse_rate, _rate_in_bytes, 125.0, 1e15 / 8, "25 GB/s")  # which is spoken of in bytes
LATENCY = Quantity(units.parse_seconds, lambda value: (units.exact_seconds(value),), 0.0, 60.0, "40 ms")
FLOPS = Quantity(units.parse_flops, _flops_spelled, 1e6, 1e18, "312 TFLOPS")
PREEMPTIONS = Quantity(units.parse_per_hour, lambda rate: (f"{rate!r} /h",), 0.0, 3600.0, "0.05 /h")
PRICE_PER_HOUR = Quantity(units.parse_price_per_hour, lambda price: (f"${price:.2f}/h", f"${price!r}/h"), 0.0, 1e5, "$2.50/h")
PRICE_PER_BYTE = Quantity(units.parse_price_per_byte, lambda price: (f"${price * 1e9:.4g}/GB", f"${price!r}/B"), 0.0, 1e-6, "$0.02/GB")

NAME = re.compile(r"[^\W_][\w.\-]*")


def nearest(word: str, known: Collection[str]) -> str:
    """`"; did you mean 'bandwidth'?"`, or nothing when no known name is near."""
    plain = {re.sub(r"[\W_]", "", name).casefold(): name for name in known}
    wanted = re.sub(r"[\W_]", "", word).casefold()
    starts = [name for key, name in plain.items() if wanted and key.startswith(wanted)][:3]
    close = [plain[key] for key in difflib.get_close_matches(wanted, plain, n=1, cutoff=0.6)]
    meant = ([plain[wanted]] if wanted in plain else starts) or close
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


class Table:
    """A TOML table, where it stands, and typed access to its keys. Keys nobody knows are refused at once."""

    def __init__(self, values: object, where: str, keys: Collection[str]) -> None:
        self.where = where
        if not isinstance(values, Mapping):
            raise ClusterError(f"{where}: must be a table {{ … }} with {', '.join(keys)}; got {_shown(values)}")
        self._values = values
        for key in values:
            if key not in keys:
                hint = nearest(str(key), keys) or f"; known here: {', '.join(keys)}"
                raise ClusterError(f"{where}{self._joint}{key}: unknown key{hint}")

    @property
    def _joint(self) -> str:
        """Between a place and a key: the file's own name is followed by a colon."""
        return " › " if ": " in self.where else ": "

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def at(self, key: str) -> str:
        """The place of a key, for messages about it."""
        return f"{self.where}{self._joint}{key}"

    def wrong(self, key: str, problem: str) -> ClusterError:
        """The error for a key of this table."""
        return ClusterError(f"{self.at(key)}: {problem}")

    def required(self, key: str, example: str) -> object:
        """The value of a key that must be there."""
        if key not in self._values:
            raise self.wrong(key, f"missing; write {key} = {example}")
        return self._values[key]

    def text(self, key: str, example: str, default: str | None = None) -> str:
        """Some text, not empty."""
        value = self.required(key, f'"{example}"') if default is None else self._values.get(key, default)
        if not isinstance(value, str) or (not value.strip() and default is None):
            raise self.wrong(key, f"must be text, like {example!r}, got {_shown(value)}")
        return value

    def name(self, key: str, example: str) -> str:
        """A name that can stand in `host/0` and in a plan's text."""
        value = self.text(key, example)
        if not NAME.fullmatch(value):
            raise self.wrong(
                key, f"must be made of letters, digits, '_', '.' and '-', and begin with a letter or digit, got {_shown(value)}"
            )
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number within bounds."""
        value = self.required(key, str(max(low, 1))) if default is None else self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"must be a whole number, got {_shown(value)}")
        if not low <= value <= high:
            raise self.wrong(key, f"must be between {low} and {high}, got {_shown(value)}")
        return value

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, got {_shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: float) -> float:
        """A plain number within bounds."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"must be a number, got {_shown(value)}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(key, f"must be between {low:g} and {high:g}, got {_shown(value)}")
        return float(value)

    def quantity(self, key: str, kind: Quantity, default: float | None = None) -> float:
        """A number with a unit."""
        if default is not None and key not in self._values:
            return default
        return kind.read_at(self.at(key), self.required(key, f'"{kind.example}"'))

    def table(self, key: str, keys: Collection[str], example: str) -> "Table":
        """A table inside this one."""
        return Table(self.required(key, example), self.at(key), keys)

    def items(self) -> list[tuple[str, object]]:
        """Keys and values, in the file's order."""
        return list(self._values.items())

    def entries(self, key: str, *, needed: str = "") -> list[object]:
        """A list of tables; with `needed` (how to write one) it may not be empty."""
        value = self._values.get(key, [])
        if isinstance(value, Mapping):
            raise self.wrong(key, f"must be a list of tables; write [[{key}]] for each, or {key} = [{{ … }}]")
        if not isinstance(value, list):
            raise self.wrong(key, f"must be a list of tables, got {_shown(value)}")
        if needed and not value:
            raise self.wrong(key, f"{'is empty' if key in self._values else 'missing'}; write {needed}")
        return value
