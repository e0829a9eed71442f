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

__all__ = ["figures", "section", "table_of"]


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
    apart = f"{row.measured / row.predicted - 1:+.0%}" if row.measured is not None and row.predicted else ""
    return measured, predicted, apart
