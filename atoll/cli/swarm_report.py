"""How `atoll report` shows a swarm: what happened, its stages, its workers, its busiest links."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from atoll.watch.comparison import Compared
    from atoll.watch.swarm import SwarmReport

__all__ = ["swarm_view"]

_MOST_MEMBERS = 32


def swarm_view(found: "SwarmReport") -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_happened(found)]
    if any(stage.micro_batches for stage in found.stages):
        parts.append(_section("Stages: a micro-batch, the mean over all workers", _stages(found)))
    if found.members:
        parts.append(_section("Workers", _members(found)))
    if found.links:
        parts.append(_section("Links, the busiest", _links(found)))
    return Group(*parts)


def _happened(found: "SwarmReport") -> Text:
    rate = "" if found.steps_per_second is None else f"{found.steps_per_second:.3g} steps/s of {found.micro_batches} micro-batches · "
    text = Text.assemble(
        ("Swarm  ", "bold"),
        f"{rate}{_times(found.joined, 'joined')}, {_times(found.left, 'left')}, {_times(found.silent, 'fell silent')} "
        f"({_times(found.returned, 'came back')}), {_times(found.moved, 'moved')}; {_times(found.coordinators, 'coordinator')}",
    )
    again = sum(found.asked_again)
    if again:
        text.append(f"\n{found.steps_repaired:,} steps repaired: {again:,} micro-batches of a stage asked for again")
    if found.computed_again:
        text.append(f"\n{found.computed_again:.1%} of what was computed was computed again")
    if found.stages_lost:
        text.append(f"\n{_times(found.stages_lost, 'return')} to a checkpoint, as a stage had nobody left")
    return text.append("\n")


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("s" if what in ("coordinator", "return") and count != 1 else "")


def _stages(found: "SwarmReport") -> Table:
    table = _table("stage", "workers", "micro-batches", "a second", "forward", "predicted", "", "backward", "predicted", "")
    for stage in found.stages:
        rate = "" if stage.micro_batches_per_second is None else f"{stage.micro_batches_per_second:.3g}"
        figures = (*_figures(stage.forward_seconds), *_figures(stage.backward_seconds))
        table.add_row(str(stage.stage), str(stage.workers), f"{stage.micro_batches:,}", rate, *figures)
    return table


def _members(found: "SwarmReport") -> Table:
    table = _table("", "stages", "came after", "end", "micro-batches", "state", "had it after", "worked after")
    for member in found.members[-_MOST_MEMBERS:]:
        end = member.ending if member.ended_seconds is None else f"{member.ending} at {format_seconds(member.ended_seconds)}"
        table.add_row(
            Text(member.name),
            " → ".join(map(str, member.stages)),
            format_seconds(member.joined_seconds),
            end,
            f"{member.micro_batches:,}",
            format_bytes(member.state_bytes) if member.state_bytes else "",
            _some(member.state_seconds, format_seconds),
            _some(member.work_seconds, format_seconds),
        )
    if len(found.members) > _MOST_MEMBERS:
        table.add_row(f"… and {len(found.members) - _MOST_MEMBERS} before them", *[""] * 7)
    return table


def _links(found: "SwarmReport") -> Table:
    table = _table("", "bytes", "while busy", "round trip")
    for link in found.links:
        name = Text(f"{link.source} → {link.target}")
        table.add_row(name, format_bytes(link.bytes), _some(link.bytes_per_s, format_rate), _some(link.round_trip_seconds, format_seconds))
    return table


def _some(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _figures(row: "Compared") -> tuple[str, str, str]:
    """Measured, predicted and how far apart they are."""
    apart = f"{row.measured / row.predicted - 1:+.0%}" if row.measured is not None and row.predicted else ""
    return _some(row.measured, format_seconds), _some(row.predicted, format_seconds), apart


def _section(title: str, table: Table) -> RenderableType:
    return Group(Text(title, style="bold"), Padding(table, (0, 0, 1, 2)))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table
