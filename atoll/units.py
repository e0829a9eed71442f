"""Quantities as people write them: `"200 Mbit/s"`, `"40 ms"`, `"32 GB"`, `"$2.50/h"` — parsed and printed.

Decimal prefixes are powers of ten, `Ki`/`Mi`/`Gi`/`Ti` powers of two. Inside Atoll everything is bytes, seconds, bytes/s, FLOP/s and
dollars, and field names say so.
"""

import math
import re
from collections.abc import Callable

__all__ = [
    "exact_bytes",
    "exact_flops",
    "exact_per_hour",
    "exact_price_per_byte",
    "exact_price_per_hour",
    "exact_rate",
    "exact_seconds",
    "format_bytes",
    "format_clock",
    "format_count",
    "format_flops",
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "parse_flops",
    "parse_per_hour",
    "parse_price_per_byte",
    "parse_price_per_hour",
    "parse_rate",
    "parse_seconds",
    "plural",
]

_PREFIX = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}
_NUMBER = r"([-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
_PER_SECOND = {
    "ns": 1e9,
    "us": 1e6,
    "µs": 1e6,
    "μs": 1e6,
    "ms": 1e3,
    "s": 1.0,
}  # dividing by these is exact where multiplying by 1e-6 is not
_SECONDS = {"min": 60.0, "h": 3600.0}


def _number(text: str) -> float:
    value = float(text.replace("_", ""))
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large to be a number")
    return value


def _bad(text: str, what: str, example: str) -> ValueError:
    return ValueError(f"cannot read {text!r} as {what}; write it like {example}")


def parse_bytes(text: str) -> float:
    """`"32 GB"` → 32e9, `"16 GiB"` → 2³⁴."""
    match = re.fullmatch(_NUMBER + r"\s*([kKMGTPE]i?|)B(?:ytes?)?", text.strip())
    if not match or match[2] not in _PREFIX:
        raise _bad(text, "an amount of memory", "'32 GB' or '16 GiB'")
    return _number(match[1]) * _PREFIX[match[2]]


def parse_rate(text: str) -> float:
    """`"200 Mbit/s"`, `"10 Gbps"`, `"25 GB/s"` → bytes per second."""
    match = re.fullmatch(_NUMBER + r"\s*([kKMGTPE]i?|)(bit/s|bps|b/s|B/s|Bps)", text.strip())
    if not match or match[2] not in _PREFIX:
        raise _bad(text, "a bandwidth", "'200 Mbit/s' or '25 GB/s'")
    bits = match[3] in ("bit/s", "bps", "b/s")
    return _number(match[1]) * _PREFIX[match[2]] / (8.0 if bits else 1.0)


def parse_seconds(text: str) -> float:
    """`"40 ms"` → 0.04."""
    match = re.fullmatch(_NUMBER + r"\s*(ns|us|µs|μs|ms|s|min|h)", text.strip())
    if not match:
        raise _bad(text, "a time", "'40 ms' or '10 us'")
    return _number(match[1]) * _SECONDS[match[2]] if match[2] in _SECONDS else _number(match[1]) / _PER_SECOND[match[2]]


def parse_flops(text: str) -> float:
    """`"312 TFLOPS"` or `"312 TFLOP/s"` → 3.12e14."""
    match = re.fullmatch(_NUMBER + r"\s*([kKMGTPE]|)(?:FLOPS|FLOP/s|flops|flop/s)", text.strip())
    if not match:
        raise _bad(text, "a compute rate", "'312 TFLOPS'")
    return _number(match[1]) * _PREFIX[match[2]]


def parse_per_hour(text: str) -> float:
    """`"0.05 /h"`, `"0.05 per hour"`, `"1 /day"` → events per hour."""
    match = re.fullmatch(_NUMBER + r"\s*(?:/\s*|per\s+)(h|hour|day|d)", text.strip())
    if not match:
        raise _bad(text, "a rate of events", "'0.05 /h'")
    return _number(match[1]) / (24.0 if match[2].startswith("d") else 1.0)


def parse_price_per_hour(text: str) -> float:
    """`"$2.50/h"` → 2.5 dollars per hour."""
    match = re.fullmatch(r"\$\s*" + _NUMBER + r"\s*(?:/\s*|per\s+)(?:h|hour)", text.strip())
    if not match:
        raise _bad(text, "a price per hour", "'$2.50/h'")
    return _number(match[1])


def parse_price_per_byte(text: str) -> float:
    """`"$0.02/GB"` → 2e-11 dollars per byte."""
    match = re.fullmatch(r"\$\s*" + _NUMBER + r"\s*(?:/\s*|per\s+)([kKMGT]i?|)B", text.strip())
    if not match or match[2] not in _PREFIX:
        raise _bad(text, "a price of traffic", "'$0.02/GB'")
    return _number(match[1]) / _PREFIX[match[2]]


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


def _exact(value: float, nice: str, parse: Callable[[str], float], plain: str) -> str:
    """The nice form if it reads back as the very same number, else the plain one, which always does."""
    return nice if parse(nice) == value else plain


def exact_bytes(value: float) -> str:
    """An amount of memory that `parse_bytes` reads back exactly: `"32 GB"`, `"16 GiB"`, or all its digits."""
    gibibytes = f"{value / 2**30:g} GiB"
    return _exact(value, format_bytes(value), parse_bytes, _exact(value, gibibytes, parse_bytes, f"{value!r} B"))


def exact_rate(bytes_per_s: float) -> str:
    """A bandwidth that `parse_rate` reads back exactly."""
    as_bytes = _scaled(bytes_per_s, "B/s", _DECIMAL)
    return _exact(bytes_per_s, format_rate(bytes_per_s), parse_rate, _exact(bytes_per_s, as_bytes, parse_rate, f"{bytes_per_s!r} B/s"))


def exact_seconds(value: float) -> str:
    """A time that `parse_seconds` reads back exactly."""
    return _exact(value, format_seconds(value).replace("µ", "u"), parse_seconds, f"{value!r} s")


def exact_flops(flops_per_s: float) -> str:
    """A compute rate that `parse_flops` reads back exactly."""
    return _exact(flops_per_s, format_flops(flops_per_s).replace("FLOP/s", "FLOPS"), parse_flops, f"{flops_per_s!r} FLOPS")


def exact_per_hour(value: float) -> str:
    """A rate of events that `parse_per_hour` reads back exactly."""
    return f"{value!r} /h"


def exact_price_per_hour(dollars: float) -> str:
    """A price that `parse_price_per_hour` reads back exactly."""
    return _exact(dollars, f"${dollars:.2f}/h", parse_price_per_hour, f"${dollars!r}/h")


def exact_price_per_byte(dollars: float) -> str:
    """A price of traffic that `parse_price_per_byte` reads back exactly."""
    return _exact(dollars, f"${dollars * 1e9:.4g}/GB", parse_price_per_byte, f"${dollars!r}/B")
