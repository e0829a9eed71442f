"""`atoll presets`: the published models that can be planned by name."""

from typing import Annotated

import msgspec
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from atoll.cli.output import print_json
from atoll.cli.render import show
from atoll.graph import PRESETS
from atoll.graph.presets import PresetEntry
from atoll.units import format_count

__all__ = ["presets"]


def presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the published models that can be planned by name."""
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode([_fields(entry) for entry in PRESETS]), indent=1).decode())
    else:
        show(_table())


def _fields(entry: PresetEntry) -> dict[str, str | float]:
    return {
        "name": entry.name,
        "parameters": entry.parameters,
        "precision": entry.precision,
        "batch_size": entry.batch_size,
        "optimizer": entry.optimizer,
        "description": entry.description,
        "source": entry.source,
    }


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("description", ratio=1)
    for entry in PRESETS:
        count = Text(format_count(entry.parameters))
        table.add_row(Text(entry.name, style="bold"), count, Text(entry.precision), Text(f"{entry.batch_size:,}"), Text(entry.description))
    return table
