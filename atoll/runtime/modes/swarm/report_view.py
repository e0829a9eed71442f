"""A swarm's report as people read it: what happened, its stages, its workers, its slowest links; and whether it is still there."""

import socket
from collections.abc import Callable

import msgspec

from atoll.errors import AtollError
from atoll.events import read_events
from atoll.runtime.modes.swarm.report import SwarmReport, read_members, tell_swarm
from atoll.runtime.report import ModeReport, ReportSection, ReportTable, RunSummary, figures, read_prediction
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes, format_clock, format_rate, format_seconds, plural

__all__ = ["is_listening", "report_swarm", "swarm_section"]

_MOST_MEMBERS = 32
_MOST_LINKS = 6
_TIMEOUT_SECONDS = 1.0


class _Start(msgspec.Struct):
    """Of what is written when a swarm is started; the module that does needs PyTorch."""

    address: str


def is_listening(directory: RunDirectory) -> bool | None:
    """Whether somebody listens where the run's coordinator does; None where that is not known: it cannot be reached from here."""
    if not (directory.path / "started.json").exists():
        return None
    try:
        host, _, port = directory.read_as("started.json", _Start).address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_SECONDS):
            return True
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError, AtollError):
        return None


def report_swarm(directory: RunDirectory, summary: RunSummary) -> ModeReport:
    """From events, the workers' own accounts, plan and prediction."""
    has_plan = (directory.path / "plan.json").exists()
    plan = directory.plan() if has_plan else None
    predicted = read_prediction(directory)
    events = list(read_events(directory.events)) if directory.events.exists() else []
    micro_batches, stages = (plan.micro_batches, len(plan.stages)) if plan is not None else (0, 0)
    found = tell_swarm(events, read_members(directory), micro_batches, stages, predicted, silent=summary.state == "silent")
    return ModeReport(
        sections=(swarm_section(found),),
        predicted_step_seconds=None if predicted is None else predicted.step_seconds,
        missing=() if has_plan else ("plan.json: without it nothing can be compared",),
    )


def swarm_section(found: SwarmReport) -> ReportSection:
    """All of it."""
    tables = (_stages(found), _members(found), _links(found))
    return ReportSection(
        facts={"swarm": found}, title="Swarm", lines=tuple(_happened(found)), tables=tuple(table for table in tables if table.rows)
    )


def _happened(found: SwarmReport) -> list[str]:
    """The first line follows the title."""
    members = (
        f"{_times(found.joined, 'joined')}, {_times(found.left, 'left')}, {_times(found.silent, 'fell silent')} "
        f"({_times(found.returned, 'came back')}), {_times(found.moved, 'moved')}; {plural(found.coordinators, 'coordinator')}"
    )
    lines = [*_rate(found), members]
    again = sum(found.asked_again)
    if again:
        lines.append(f"{plural(found.steps_repaired, 'step')} repaired: {_micro_batches(again)} of a stage asked for again")
    if found.stages_lost:
        lines.append(f"{plural(found.stages_lost, 'return')} to a checkpoint, as a stage had nobody left")
    if found.again is not None:
        lines.append(_again(found, found.again, found.computed_again or 0.0))
    return lines


def _again(found: SwarmReport, again: int, share: float) -> str:
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


def _rate(found: SwarmReport) -> list[str]:
    """The mean of a step and what follows from it: neither the median nor the samples a second of the whole run need agree with it."""
    if found.steps_per_second is None:
        return []
    every = f"a step every {format_seconds(1 / found.steps_per_second)} on average after the first"
    return [f"{every}: {found.steps_per_second:.3g} steps/s of {_micro_batches(found.micro_batches)}"]


def _stages(found: SwarmReport) -> ReportTable:
    """Two rows a stage, as all of it in one row is too wide for a terminal of 80 columns."""
    rows: list[tuple[str, ...]] = []
    for stage in found.stages if any(stage.micro_batches for stage in found.stages) else ():
        rate = "" if stage.micro_batches_per_second is None else f"{stage.micro_batches_per_second:.3g}"
        first = (str(stage.stage), str(stage.workers), f"{stage.micro_batches:,}", rate)
        for what, row in (("forward", stage.forward_seconds), ("backward", stage.backward_seconds)):
            if row.measured is not None or row.predicted is not None:
                rows.append((*first, what, *figures(row)))
                first = ("", "", "", "")
    title = "Stages: micro-batches done, and what one takes, the mean over all workers"
    return ReportTable(title=title, columns=("stage", "workers", "done", "per s", "", "measured", "predicted", ""), rows=tuple(rows))


def _members(found: SwarmReport) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    for member in found.members[-_MOST_MEMBERS:]:
        end = member.ending if member.ended_seconds is None else f"{member.ending} {format_clock(member.ended_seconds)}"
        rows.append(
            (
                member.name,
                "→".join(map(str, member.stages)),
                format_clock(member.joined_seconds),
                end,
                f"{member.micro_batches:,}",
                format_bytes(member.state_bytes) if member.state_bytes else "",
                _some(member.state_seconds, _in_seconds),
                _some(member.work_seconds, _in_seconds),
            )
        )
    if len(found.members) > _MOST_MEMBERS:
        rows.append((f"… and {len(found.members) - _MOST_MEMBERS} before them", *[""] * 7))
    title = "Workers: micro-batches done; state and work so long after connecting"
    return ReportTable(title=title, columns=("", "stage", "came", "end", "done", "state", "in", "work in"), rows=tuple(rows))


def _in_seconds(seconds: float) -> str:
    """All in one unit, so that a column can be read down."""
    return f"{seconds:.1f} s"


def _links(found: SwarmReport) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    for link in found.links[:_MOST_LINKS]:
        speed, trip = _some(link.bytes_per_s, format_rate), _some(link.round_trip_seconds, format_seconds)
        rows.append((f"{link.source} → {link.target}", format_bytes(link.bytes), speed, trip))
    more = len(found.links[_MOST_LINKS:]) + found.more_links
    if more:
        rows.append((f"… and {more:,} more", "", "", ""))
    return ReportTable(title="Links, the slowest while busy", columns=("", "bytes", "while busy", "round trip"), rows=tuple(rows))


def _some(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)
