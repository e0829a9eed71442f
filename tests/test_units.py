"""Quantities: what people write is read, what is written reads back, what makes no sense is refused."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import units
from atoll.cluster import reader


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "32 GB", 32e9),
        (units.parse_bytes, "16 GiB", 2.0**34),
        (units.parse_bytes, "1_000 B", 1000.0),
        (units.parse_bytes, " 1.5kB ", 1500.0),
        (units.parse_rate, "200 Mbit/s", 25e6),
        (units.parse_rate, "10 Gbps", 1.25e9),
        (units.parse_rate, "10 Gb/s", 1.25e9),
        (units.parse_rate, "25 GB/s", 25e9),
        (units.parse_rate, "1 GiB/s", 2.0**30),
        (units.parse_seconds, "40 ms", 0.04),
        (units.parse_seconds, "10 us", 1e-5),
        (units.parse_seconds, "10 µs", 1e-5),
        (units.parse_seconds, "2 min", 120.0),
        (units.parse_flops, "312 TFLOPS", 312e12),
        (units.parse_flops, "1.5 PFLOP/s", 1.5e15),
        (units.parse_per_hour, "0.05 /h", 0.05),
        (units.parse_per_hour, "12 per day", 0.5),
        (units.parse_price_per_hour, "$2.50/h", 2.5),
        (units.parse_price_per_hour, "$ 2 per hour", 2.0),
        (units.parse_price_per_byte, "$0.02/GB", 0.02 / 1e9),
        (units.parse_price_per_byte, "$1/TiB", 1 / 2.0**40),
    ],
)
def test_parses(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "32"),
        (units.parse_bytes, "32 gigabytes"),
        (units.parse_bytes, "nan GB"),
        (units.parse_bytes, "inf GB"),
        (units.parse_bytes, "1e999 GB"),
        (units.parse_bytes, "32 Gbit"),
        (units.parse_rate, "200 M"),
        (units.parse_rate, "200 Mbit"),
        (units.parse_rate, "200 kiB/s"),
        (units.parse_seconds, "40"),
        (units.parse_seconds, "40 msec"),
        (units.parse_flops, "312 T"),
        (units.parse_per_hour, "0.05"),
        (units.parse_price_per_hour, "2.50"),
        (units.parse_price_per_byte, "$0.02/GiBB"),
        (units.parse_price_per_byte, "$1/kiB"),
        (units.parse_price_per_byte, ""),
    ],
)
def test_refuses(parse, text):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (units.format_bytes(32e9), "32 GB"),
        (units.format_bytes(999.9e9), "1000 GB"),
        (units.format_rate(25e6), "200 Mbit/s"),
        (units.format_flops(3.12e14), "312 TFLOP/s"),
        (units.format_count(175e9), "175 G"),
        (units.format_seconds(0.04), "40 ms"),
        (units.format_seconds(0.0), "0 s"),
        (units.format_seconds(7200.0), "2 h"),
        (reader.MEMORY.exact(2.0**34), "16 GiB"),
        (units.exact_seconds(1e-5), "10 us"),
        (reader.PRICE_PER_HOUR.exact(2.5), "$2.50/h"),
        (reader.PRICE_PER_BYTE.exact(0.02 / 1e9), "$0.02/GB"),
    ],
)
def test_formats(written, text):
    assert written == text


EXACT = [
    (kind.exact, kind.parse)
    for kind in (
        reader.BYTES,
        reader.BANDWIDTH,
        reader.MEMORY_BANDWIDTH,
        reader.LATENCY,
        reader.FLOPS,
        reader.PREEMPTIONS,
        reader.PRICE_PER_HOUR,
        reader.PRICE_PER_BYTE,
    )
]


@pytest.mark.parametrize(("write", "parse"), EXACT)
@given(value=st.floats(min_value=0, max_value=1e20, allow_subnormal=False))
def test_exact_forms_read_back_exactly(write, parse, value):
    assert parse(write(value)) == value


@given(text=st.text(max_size=20))
def test_any_text_is_read_or_refused(text):
    for _, parse in EXACT:
        with contextlib.suppress(ValueError):
            assert math.isfinite(parse(text))


def test_plurals() -> None:
    assert [units.plural(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert units.plural(2, "process", "processes") == "2 processes"
