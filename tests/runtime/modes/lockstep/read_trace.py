"""Reads a trace back that `chrome_trace` made: for tests."""

from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.trace import TraceSpan


class _Event(msgspec.Struct):
    """What reading back looks at; metadata has no duration."""

    ph: str
    name: str
    pid: int
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the format's name


def read_chrome_trace(trace: Mapping[str, Any] | bytes) -> list[TraceSpan]:
    """Its spans, in order of time, to the nanosecond."""
    read = msgspec.json.decode(trace, type=_Trace) if isinstance(trace, bytes) else msgspec.convert(trace, _Trace)
    spans = []
    for event in read.traceEvents:
        if event.ph == "X":
            begin = round(event.ts * 1000)
            end = begin + round(event.dur * 1000)
            spans.append(TraceSpan(event.pid - 1, Action.parse(event.name), begin / 1e9, end / 1e9))
    return spans
