"""Quantities as people write them: `"200 Mbit/s"`, `"40 ms"`, `"32 GB"`, `"$2.50/h"` — parsed and printed.

Decimal prefixes are powers of ten, `Ki`/`Mi`/`Gi`/`Ti` powers of two. Inside Atoll everything is bytes, seconds, bytes/s, FLOP/s and
dollars, and field names say so.
"""

import re

__all__ = [
    "format_bytes",
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
}
_NUMBER = r"([-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _number(text: str) -> float:
    return float(text.replace("_", ""))


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
    return _number(match[1]) * _SECONDS[match[2]]


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
    if not match:
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


def format_seconds(value: float) -> str:
    """0.04 → `"40 ms"`."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 120:
        return f"{value / 60:.3g} min"
    return _scaled(value, "s", ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))) if value else "0 s"
