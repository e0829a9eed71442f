"""Tables of reports: titles, columns, measured beside predicted."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.units import format_seconds

if TYPE_CHECKING:
    from atoll.watch.comparison import Compared

__all__ = ["apart", "figures", "section", "table_of"]

_TWICE, _FAR = 2.0, 100.0  # from where on a ratio is told instead of a share, and from where on it means nothing


def section(title: str, table: Table) -> RenderableType:
    """A title over an indented table."""
    return Group(Text(title, style="bold"), Padding(table, (0, 0, 1, 2)))


def table_of(*columns: str) -> Table:
    """An empty table: the first column to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def figures(row: "Compared", form: Callable[[float], str] = format_seconds) -> tuple[str, str, str]:
    """Measured, predicted and how far apart they are."""
    measured, predicted = ("" if value is None else form(value) for value in (row.measured, row.predicted))
    return measured, predicted, apart(row.measured, row.predicted) if row.measured is not None and row.predicted else ""


def apart(measured: float, predicted: float) -> str:
    """How far a figure is from its prediction: `+21%`, `-34%`, `3.3 times`; of one that is nowhere near it, that it is over 100 times."""
    ratio = measured / predicted
    if ratio < _TWICE:
        return f"{ratio - 1:+.0%}"
    return f"{ratio:.{1 if ratio < 10 else 0}f} times" if ratio < _FAR else f"over {_FAR:.0f} times"
