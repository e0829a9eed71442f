"""What a mode says of a run: sections of the report, as facts for JSON and as lines and tables for people. Read without PyTorch."""

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.cost import Cost
from atoll.errors import AtollError, JobError
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_seconds

__all__ = ["Compared", "ModeReport", "ReportSection", "ReportTable", "RunSummary", "apart", "figures", "read_prediction"]

_TWICE, _FAR = 2.0, 100.0  # from where on a ratio is told instead of a share, and from where on it means nothing


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A figure twice; None where it is not known."""

    measured: float | None = None
    predicted: float | None = None


class ReportTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table under a title; the first column is for names, the others for figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """Something a mode has to say of a run."""

    facts: dict[str, Any] = msgspec.field(default_factory=dict)  # keys of `atoll report --json`
    title: str = ""  # before the lines
    lines: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    brief: bool = False  # `atoll run` shows it at its end, too


class ModeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that a mode has to say of a run."""

    sections: tuple[ReportSection, ...] = ()
    predicted_step_seconds: float | None = None  # of the plan that the steps were made under
    conclusion: str = ""  # where prediction and reality differ most, and what to do about it
    missing: tuple[str, ...] = ()  # what could not be reported, and why


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run in any mode, by its events."""

    state: str
    step_seconds: float | None  # the median
    steps_since_start: int  # made since the run was last started or resumed


def figures(row: Compared, form: Callable[[float], str] = format_seconds) -> tuple[str, str, str]:
    """Measured, predicted and how far apart they are."""
    measured, predicted = ("" if value is None else form(value) for value in (row.measured, row.predicted))
    return measured, predicted, apart(row.measured, row.predicted) if row.measured is not None and row.predicted else ""


def apart(measured: float, predicted: float) -> str:
    """How far a figure is from its prediction: `+21%`, `-34%`, `3.3 times`; of one that is nowhere near it, that it is over 100 times."""
    ratio = measured / predicted
    if ratio < _TWICE:
        return f"{ratio - 1:+.0%}"
    return f"{ratio:.{1 if ratio < 10 else 0}f} times" if ratio < _FAR else f"over {_FAR:.0f} times"


def read_prediction(directory: RunDirectory) -> Cost | None:
    """What the cost model expected of the run's plan; None where nothing was predicted."""
    if not directory.predicted.exists():
        return None
    try:
        return msgspec.json.decode(directory.predicted.read_bytes(), type=Cost)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise AtollError(f"{directory.predicted}: this is not a prediction: {error}; remove it to report without it") from None
    except OSError as error:
        raise JobError(f"{directory.predicted}: cannot read it: {(error.strerror or str(error)).lower()}") from None
