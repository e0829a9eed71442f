"""`atoll report RUN`: predicted against measured, for the step, each stage, collective and link."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.cli.output import notes_view, print_json
from atoll.cli.render import show
from atoll.cli.swarm_report import swarm_view
from atoll.cli.tables import apart, figures, section, table_of
from atoll.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from atoll.watch.report import RunReport

__all__ = ["report", "report_view", "short_view"]

_STATES = {
    "done": "done",
    "stopped": "stopped by a callback",
    "interrupted": "interrupted",
    "failed": "failed",
    "running": "under way",
    "silent": "ended without a word, or stands still",
    "not started": "no step yet",
}
_MOST_DEVICES = 16


def report(
    run: Annotated[Path, typer.Argument(help="The directory that `atoll run` wrote.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare what was predicted of a run with what was measured; also of one under way, failed or resumed."""
    from atoll.watch.report import read_report  # scipy and the cost model take a moment to load

    found = read_report(run)
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        show(report_view(found))


def report_view(found: "RunReport") -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [_heading(found)]
    if found.swarm is not None:
        parts.append(swarm_view(found.swarm))
    if found.breakdown:
        parts.append(section("A step, on the busiest device", _breakdown(found)))
    if any(stage.forward_seconds.measured is not None for stage in found.stages):
        parts.append(section("Stages: a micro-batch forward and backward, and waiting in a step", _stages(found)))
    if found.collectives:
        parts.append(section("Collectives of a step", _collectives(found)))
    if found.links:
        parts.append(section("Links, a step", _links(found)))
    if found.memory_bytes:
        parts.append(section("Memory at the peak (on a CPU, of the whole process)", _memory(found)))
    if found.events:
        parts.append(Text.assemble(("Events  ", "bold"), ", ".join(f"{count} {kind}" for kind, count in found.events.items()) + "\n"))
    if found.conclusion:
        parts.append(Text(found.conclusion + "\n"))
    if found.missing:
        parts.append(notes_view(tuple(found.missing)))
    return Group(*parts)


def short_view(found: "RunReport", directory: Path) -> RenderableType:
    """What `atoll run` says at its end: the step, the busiest device's breakdown, and where to read more."""
    parts: list[RenderableType] = [_step_line(found)]
    if found.breakdown:
        parts.append(Padding(_breakdown(found), (0, 0, 0, 2)))
    if found.conclusion:
        parts.append(Text(found.conclusion))
    parts.append(Text(f"`atoll report {directory}` says more; trace.json there is for ui.perfetto.dev", style="dim"))
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
    text = Text.assemble(("Step ", "bold"), (format_seconds(step.median), "bold green"), "" if found.swarm is None else " (the median)")
    if step.predicted is not None:
        text.append(f", predicted {format_seconds(step.predicted)} ({apart(step.median, step.predicted)})")
    return text


def _breakdown(found: "RunReport") -> Table:
    table = table_of("", "measured", "predicted", "")
    for name, row in found.breakdown.items():
        if row.measured or row.predicted:
            table.add_row(name, *figures(row))
    return table


def _stages(found: "RunReport") -> Table:
    table = table_of("stage", "samples", "forward", "predicted", "", "backward", "predicted", "", "waiting", "predicted")
    for stage in found.stages:
        wait = figures(stage.wait_seconds)[:2]
        size = f"{stage.micro_batches} × {stage.micro_batch_samples}"
        table.add_row(str(stage.stage), size, *figures(stage.forward_seconds), *figures(stage.backward_seconds), *wait)
    return table


def _collectives(found: "RunReport") -> Table:
    table = table_of("", "", "devices", "calls", "bytes", "measured", "predicted", "", "not hidden")
    for row in found.collectives:
        exposed = "" if row.exposed_seconds is None else format_seconds(row.exposed_seconds)
        kind = row.kind.replace("_", "-")
        table.add_row(row.what, kind, str(len(row.devices)), f"{row.calls:,}", format_bytes(row.bytes), *figures(row.seconds), exposed)
    return table


def _links(found: "RunReport") -> Table:
    table = table_of("", "bytes", "predicted", "", "busy", "predicted", "")
    for link in found.links:
        table.add_row(Text(link.name), *figures(link.bytes, format_bytes), *figures(link.seconds))
    return table


def _memory(found: "RunReport") -> Table:
    table = table_of("", "measured", "predicted", "")
    for device, row in list(found.memory_bytes.items())[:_MOST_DEVICES]:
        table.add_row(Text(device), *figures(row, format_bytes))
    if len(found.memory_bytes) > _MOST_DEVICES:
        table.add_row(f"… and {len(found.memory_bytes) - _MOST_DEVICES} more", "", "", "")
    return table
