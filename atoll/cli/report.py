"""`atoll report RUN`: predicted against measured, for the step, each stage, collective and link."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.cli.output import notes_view, print_json, titled
from atoll.cli.render import show
from atoll.runtime.report import apart
from atoll.units import format_seconds, plural

if TYPE_CHECKING:
    from atoll.runtime.report import ReportSection, ReportTable
    from atoll.watch.report import RunReport

__all__ = ["report", "report_view", "section_view", "short_view"]

_STATES = {
    "done": "done",
    "stopped": "stopped early",
    "interrupted": "interrupted",
    "failed": "failed",
    "running": "under way",
    "silent": "ended without a word, or stands still",
    "not started": "no step yet",
}


def report(
    run: Annotated[Path, typer.Argument(help="The directory that `atoll run` wrote.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare what was predicted of a run with what was measured; also of one under way, failed or resumed."""
    from atoll.watch.report import read_report  # scipy and the cost model take a moment to load

    found = read_report(run)
    if as_json:
        print_json(found.to_json())
    else:
        show(report_view(found))


def report_view(found: "RunReport") -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [_heading(found)]
    for section in found.sections:
        parts += section_view(section)
    if found.compile_seconds:
        lines = [f"{name}: {format_seconds(s)}" if name else format_seconds(s) for name, s in found.compile_seconds.items()]
        parts.append(Text.assemble(("torch.compile  ", "bold"), ", ".join(lines) + "\n"))
    if found.logged:
        lines = [f"{name} {values[0]:.4g} → {values[-1]:.4g}" for name, values in found.logged.items()]
        parts.append(Text.assemble(("Logged  ", "bold"), ", ".join(lines) + "\n"))
    if found.events:
        parts.append(Text.assemble(("Events  ", "bold"), ", ".join(f"{count} {kind}" for kind, count in found.events.items()) + "\n"))
    if found.data is not None and found.data.in_words():
        parts.append(Text(found.data.in_words() + "\n"))
    if found.conclusion:
        parts.append(Text(found.conclusion + "\n"))
    if found.missing:
        parts.append(notes_view(tuple(found.missing)))
    return Group(*parts)


def section_view(section: "ReportSection") -> list[RenderableType]:
    """What a mode says: its lines, then its tables under their titles."""
    parts: list[RenderableType] = []
    if section.lines:
        title = (f"{section.title}  ", "bold") if section.title else ""
        parts.append(Text.assemble(title, "\n".join(section.lines) + "\n"))
    return [*parts, *(titled(table.title, _table(table)) for table in section.tables)]


def _table(content: "ReportTable") -> Table:
    """The first column to the left, the others to the right; names come from files and scripts, so nothing in it is markup."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(content.columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


def short_view(found: "RunReport", directory: Path) -> RenderableType:
    """What `atoll run` says at its end: the step, what the mode holds most important, and where to read more."""
    parts: list[RenderableType] = [_step_line(found)]
    for section in found.sections:
        if section.brief:
            parts += [*map(Text, section.lines), *(Padding(_table(table), (0, 0, 0, 2)) for table in section.tables)]
    if found.data is not None and found.data.in_words():
        parts.append(Text(found.data.in_words()))
    if found.conclusion:
        parts.append(Text(found.conclusion))
    trace = "; trace.json there is for ui.perfetto.dev" if (directory / "trace.json").exists() else ""
    parts.append(Text(f"`atoll report {directory}` says more{trace}", style="dim"))
    return Group(*parts)


def _heading(found: "RunReport") -> Text:
    text = Text.assemble((found.name or "a run", "bold"), f" · {found.mode}" if found.mode else "", f" · {_STATES[found.state]}")
    if found.message:
        text.append(f": {found.message}")
    text.append(f"\n{found.steps:,} of {plural(found.planned_steps, 'step')}")
    if found.losses:
        text.append(f" · loss {found.losses[0]:.4f} → {found.losses[-1]:.4f}")
    if found.samples_per_second:
        text.append(f" · {found.samples_per_second:,.4g} samples/s")
    if found.codecs:
        text.append(f"\ncodecs · {' · '.join(found.codecs)}")
    counted = found.samples
    text.append(f"\n{plural(counted.committed, 'sample')} committed, {counted.lost:,} lost, {counted.redone:,} redone\n")
    return text.append_text(_step_line(found)).append("\n")


def _step_line(found: "RunReport") -> Text:
    step = found.step_seconds
    if step.median is None:
        return Text("no step was finished")
    if not found.steps_since_start and found.state == "done":
        return Text(
            f"nothing was left to do: all {found.steps:,} steps had been made before, the last ones in {format_seconds(step.median)} each"
        )
    text = Text.assemble(("Step ", "bold"), (format_seconds(step.median), "bold green"), " (the median)")
    if step.predicted is not None:
        text.append(f", predicted {format_seconds(step.predicted)} ({apart(step.median, step.predicted)})")
    return text
