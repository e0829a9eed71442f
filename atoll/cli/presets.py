"""`atoll presets`: the published models that can be planned by name."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from atoll.cli.output import headed_table, print_json
from atoll.cli.render import show
from atoll.graph import PRESETS
from atoll.units import format_count

__all__ = ["presets"]

_FIELDS = ("name", "parameters", "precision", "batch_size", "optimizer", "description", "source")


def presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the published models that can be planned by name."""
    if as_json:
        print_json([{name: getattr(entry, name) for name in _FIELDS} for entry in PRESETS])
    else:
        show(_table())


def _table() -> Table:
    table = headed_table()
    table.add_column("name", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("description", ratio=1)
    for entry in PRESETS:
        count = Text(format_count(entry.parameters))
        table.add_row(Text(entry.name, style="bold"), count, Text(entry.precision), Text(f"{entry.batch_size:,}"), Text(entry.description))
    return table
