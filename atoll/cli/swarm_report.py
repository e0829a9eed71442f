"""How `atoll report` shows a swarm: what happened, its stages, its workers, its slowest links."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cli.tables import figures, section, table_of
from atoll.units import format_bytes, format_clock, format_rate, format_seconds, plural

if TYPE_CHECKING:
    from atoll.watch.swarm import SwarmReport

__all__ = ["swarm_view"]

_MOST_MEMBERS = 32
_MOST_LINKS = 6


def swarm_view(found: "SwarmReport") -> RenderableType:
    """All of it."""
    parts: list[RenderableType] = [_happened(found)]
    if any(stage.micro_batches for stage in found.stages):
        parts.append(section("Stages: micro-batches done, and what one takes, the mean over all workers", _stages(found)))
    if found.members:
        parts.append(section("Workers: micro-batches done; state and work so long after connecting", _members(found)))
    if found.links:
        parts.append(section("Links, the slowest while busy", _links(found)))
    return Group(*parts)


def _happened(found: "SwarmReport") -> Text:
    text = Text.assemble(
        ("Swarm  ", "bold"),
        f"{_rate(found)}{_times(found.joined, 'joined')}, {_times(found.left, 'left')}, {_times(found.silent, 'fell silent')} "
        f"({_times(found.returned, 'came back')}), {_times(found.moved, 'moved')}; {plural(found.coordinators, 'coordinator')}",
    )
    again = sum(found.asked_again)
    if again:
        text.append(f"\n{plural(found.steps_repaired, 'step')} repaired: {_micro_batches(again)} of a stage asked for again")
    if found.stages_lost:
        text.append(f"\n{plural(found.stages_lost, 'return')} to a checkpoint, as a stage had nobody left")
    if found.again is not None:
        text.append(f"\n{_again(found, found.again, found.computed_again or 0.0)}")
    return text.append("\n")


def _again(found: "SwarmReport", again: int, share: float) -> str:
    """What was computed again, in all: repeated steps are part of it."""
    if not again:
        missing = "; the last seconds of workers that were not heard any more, or still work, are not in their accounts"
        return f"nothing is known to have been computed again{missing}" if found.again_at_least else "nothing was computed again"
    least = "at least " if found.again_at_least else ""
    steps = f", those of {plural(found.steps_repeated, 'repeated step')} among them" if found.steps_repeated else ""
    return f"{least}{share:.1%} of what was computed was computed again: {_micro_batches(again)} of a stage{steps}"


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}"


def _micro_batches(count: int) -> str:
    return plural(count, "micro-batch", "micro-batches")


def _rate(found: "SwarmReport") -> str:
    """The mean of a step and what follows from it: neither the median nor the samples a second of the whole run need agree with it."""
    if found.steps_per_second is None:
        return ""
    return (
        f"a step every {format_seconds(1 / found.steps_per_second)} on average after the first: "
        f"{found.steps_per_second:.3g} steps/s of {_micro_batches(found.micro_batches)}\n"
    )


def _stages(found: "SwarmReport") -> Table:
    """Two rows a stage, as all of it in one row is too wide for a terminal of 80 columns."""
    table = table_of("stage", "workers", "done", "per s", "", "measured", "predicted", "")
    for stage in found.stages:
        rate = "" if stage.micro_batches_per_second is None else f"{stage.micro_batches_per_second:.3g}"
        first = (str(stage.stage), str(stage.workers), f"{stage.micro_batches:,}", rate)
        for what, row in (("forward", stage.forward_seconds), ("backward", stage.backward_seconds)):
            if row.measured is not None or row.predicted is not None:
                table.add_row(*first, what, *figures(row))
                first = ("", "", "", "")
    return table


def _members(found: "SwarmReport") -> Table:
    table = table_of("", "stage", "came", "end", "done", "state", "in", "work in")
    for member in found.members[-_MOST_MEMBERS:]:
        end = member.ending if member.ended_seconds is None else f"{member.ending} {format_clock(member.ended_seconds)}"
        table.add_row(
            Text(member.name),
            "→".join(map(str, member.stages)),
            format_clock(member.joined_seconds),
            end,
            f"{member.micro_batches:,}",
            format_bytes(member.state_bytes) if member.state_bytes else "",
            _some(member.state_seconds, _in_seconds),
            _some(member.work_seconds, _in_seconds),
        )
    if len(found.members) > _MOST_MEMBERS:
        table.add_row(f"… and {len(found.members) - _MOST_MEMBERS} before them", *[""] * 7)
    return table


def _in_seconds(seconds: float) -> str:
    """All in one unit, so that a column can be read down."""
    return f"{seconds:.1f} s"


def _links(found: "SwarmReport") -> Table:
    table = table_of("", "bytes", "while busy", "round trip")
    for link in found.links[:_MOST_LINKS]:
        name = Text(f"{link.source} → {link.target}")
        table.add_row(name, format_bytes(link.bytes), _some(link.bytes_per_s, format_rate), _some(link.round_trip_seconds, format_seconds))
    more = len(found.links[_MOST_LINKS:]) + found.more_links
    if more:
        table.add_row(f"… and {more:,} more", "", "", "")
    return table


def _some(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)
