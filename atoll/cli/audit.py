"""`atoll audit RUN`: what crossed which border, and whether the logs of it are as they were written."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from atoll.cli.output import headed_table, print_json, titled
from atoll.cli.render import show
from atoll.units import format_bytes, plural

if TYPE_CHECKING:
    from atoll.watch.audit import AuditReport

__all__ = ["audit"]

_WAYS = {"out": "to", "in": "from"}


def audit(
    run: Annotated[Path, typer.Argument(help="The directory of a run.", metavar="RUN")],
    head: Annotated[
        list[str] | None, typer.Option(help="A hash noted before, which a log must have; may be given several times.", metavar="HASH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify the audit logs of a run and add up what crossed which border. Exit code 1: a log is not what was written."""
    from atoll.watch.audit import read_audit

    found = read_audit(run, head or ())
    if as_json:
        print_json(found.to_json())
    else:
        show(_view(found))
    if not found.whole:
        raise typer.Exit(1)


def _view(found: "AuditReport") -> RenderableType:
    parts: list[RenderableType] = []
    for log in found.logs:
        state = Text("not whole", style="bold red") if log.problems else Text("whole", style="green")
        parts.append(Text.assemble((f"Log {log.name}  ", "bold"), state, f", {plural(len(log.records), 'record')}, head {log.head}"))
        parts += [Text(f"  {problem}", style="red") for problem in log.problems]
        parts += [Text(f"  {note}") for note in log.notes]
    parts += [Text(problem, style="red") for problem in found.problems]
    parts.append(Text(""))
    for title, refused in (("Crossed", False), ("Refused", True)):
        if any(bool(one.refused) == refused for one in found.crossed):
            parts.append(_table(found, title, refused))
    return Group(*parts)


def _table(found: "AuditReport", title: str, refused: bool) -> RenderableType:
    table = headed_table()
    for column in ("site", "peer", "what", "codec"):
        table.add_column(column)
    table.add_column("messages", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("why" if refused else "when (UTC)")
    for one in found.crossed:
        if bool(one.refused) == refused:
            there = f" at {one.peer_site}" if one.peer_site else ""
            peer = f"{_WAYS[one.direction]} {one.peer}{there}"
            last = one.refused if refused else _when(one.first_unix_seconds, one.last_unix_seconds)
            cells = (one.site, peer, one.kind, one.codec, str(one.messages), format_bytes(one.bytes), last)
            table.add_row(*map(Text, cells))
    return titled(title, table)


def _when(first: float, last: float) -> str:
    begin, end = (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) for seconds in (first, last))
    return begin if begin == end else f"{begin} … {end[11:] if end[:10] == begin[:10] else end}"
