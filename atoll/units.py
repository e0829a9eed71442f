"""Quantities as people write them: `"200 Mbit/s"`, `"40 ms"`, `"32 GB"`, `"$2.50/h"` — parsed and printed.

Decimal prefixes are powers of ten, `Ki`/`Mi`/`Gi`/`Ti` powers of two. Inside Atoll everything is bytes, seconds, bytes/s, FLOP/s and
dollars, and field names say so.
"""

import math
import re
from collections.abc import Callable

__all__ = ["format_bytes", "format_clock", "format_count", "format_flops", "format_rate", "format_seconds", "plural"]
__all__ += ["parse_bytes", "parse_flops", "parse_per_hour", "parse_price_per_byte", "parse_price_per_hour", "parse_rate", "parse_seconds"]
__all__ += ["exact_seconds", "exactly"]

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIX |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_NUMBER = r"([-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
# dividing by these is exact where multiplying by 1e-6 is not
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0}
_SECONDS = {"min": 60.0, "h": 3600.0}


def _read(text: str, before: str, after: str, what: str, example: str) -> tuple[float, str]:
    """The number between two patterns, and the first group of the second one."""
    match = re.fullmatch(before + _NUMBER + r"\s*" + after, text.strip())
    if not match:
        raise ValueError(f"cannot read {text!r} as {what}; write it like {example}")
    value = float(match[1].replace("_", ""))
    if not math.isfinite(value):
        raise ValueError(f"{match[1]} is too large to be a number")
    return value, match[2]


def parse_bytes(text: str) -> float:
    """`"32 GB"` → 32e9, `"16 GiB"` → 2³⁴."""
    number, prefix = _read(text, "", r"([kKMGTPE]|[KMGTP]i|)B(?:ytes?)?", "an amount of memory", "'32 GB' or '16 GiB'")
    return number * _PREFIX[prefix]


def parse_rate(text: str) -> float:
    """`"200 Mbit/s"`, `"10 Gbps"`, `"25 GB/s"` → bytes per second."""
    number, unit = _read(text, "", r"((?:[kKMGTPE]|[KMGTP]i|)(?:bit/s|bps|b/s|B/s|Bps))", "a bandwidth", "'200 Mbit/s' or '25 GB/s'")
    prefix = re.split("[bB]", unit)[0]
    return number * _PREFIX[prefix] / (1.0 if unit.endswith(("B/s", "Bps")) else 8.0)


def parse_seconds(text: str) -> float:
    """`"40 ms"` → 0.04."""
    number, unit = _read(text, "", "(ns|us|µs|μs|ms|s|min|h)", "a time", "'40 ms' or '10 us'")
    return number * _SECONDS[unit] if unit in _SECONDS else number / _PER_SECOND[unit]


def parse_flops(text: str) -> float:
    """`"312 TFLOPS"` or `"312 TFLOP/s"` → 3.12e14."""
    number, prefix = _read(text, "", "([kKMGTPE]|)(?:FLOPS|FLOP/s|flops|flop/s)", "a compute rate", "'312 TFLOPS'")
    return number * _PREFIX[prefix]


def parse_per_hour(text: str) -> float:
    """`"0.05 /h"`, `"0.05 per hour"`, `"1 /day"` → events per hour."""
    number, time = _read(text, "", r"(?:/\s*|per\s+)(h|hour|day|d)", "a rate of events", "'0.05 /h'")
    return number / (24.0 if time.startswith("d") else 1.0)


def parse_price_per_hour(text: str) -> float:
    """`"$2.50/h"` → 2.5 dollars per hour."""
    return _read(text, r"\$\s*", r"(?:/\s*|per\s+)(h|hour)", "a price per hour", "'$2.50/h'")[0]


def parse_price_per_byte(text: str) -> float:
    """`"$0.02/GB"` → 2e-11 dollars per byte."""
    number, prefix = _read(text, r"\$\s*", r"(?:/\s*|per\s+)([kKMGT]|[KMGT]i|)B", "a price of traffic", "'$0.02/GB'")
    return number / _PREFIX[prefix]


def _scaled(value: float, unit: str, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, prefix in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}" if abs(value) / factor < 999.5 else f"{value / factor:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(value: float) -> str:
    """32e9 → `"32 GB"`."""
    return _scaled(value, "B", _DECIMAL)


def format_rate(bytes_per_s: float) -> str:
    """25e6 → `"200 Mbit/s"`: links are spoken of in bits."""
    return _scaled(bytes_per_s * 8, "bit/s", _DECIMAL)


def format_flops(flops_per_s: float) -> str:
    """3.12e14 → `"312 TFLOP/s"`."""
    return _scaled(flops_per_s, "FLOP/s", _DECIMAL)


def format_count(value: float) -> str:
    """175e9 → `"175 G"`: plain counts such as parameters."""
    return _scaled(value, "", _DECIMAL).strip()


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 step`, `2,000 steps`; `many` is the noun of several where it is not formed by an s."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def format_seconds(value: float) -> str:
    """0.04 → `"40 ms"`."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 120:
        return f"{value / 60:.3g} min"
    return _scaled(value, "s", ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))) if value else "0 s"


def format_clock(value: float) -> str:
    """A moment or a longer time in whole seconds: 124.2 → `"2:04"`, 3661 → `"1:01:01"`."""
    minutes, whole = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def exactly(value: float, parse: Callable[[str], float], *spellings: str) -> str:
    """The first of these spellings that reads back as the very same number; the last one must."""
    return next(text for text in spellings if text is spellings[-1] or parse(text) == value)


def exact_seconds(value: float) -> str:
    """A time that `parse_seconds` reads back exactly."""
    return exactly(value, parse_seconds, format_seconds(value).replace("µ", "u"), f"{value!r} s")
