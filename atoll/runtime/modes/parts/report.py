"""The report of a run of parts: what crossed under each name, in bytes a step and a position, and how long each part waited."""

import msgspec

from atoll.runtime.report import ModeReport, ReportSection, ReportTable
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes, format_seconds, plural

__all__ = ["Edge", "PartReport", "PartsMeasured", "report_parts", "write_measured_parts"]

_FILE = "measured/parts.json"


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """What crossed under one name, from one part to another."""

    name: str
    gradient: bool  # on the way back
    sender: str
    receiver: str
    steps: int
    bytes: int  # as it was encoded
    positions: int
    missed: int  # steps made without it
    waited_seconds: float  # by the receiver
    link_bytes: int  # that came over the connection, everything included

    @property
    def bytes_per_position(self) -> float | None:
        """None where nothing crossed."""
        return self.bytes / self.positions if self.positions else None


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a part that trains did."""

    name: str
    device: str
    steps: int
    seconds: float
    waited_seconds: float  # of these, for others


class PartsMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured."""

    edges: tuple[Edge, ...] = ()
    parts: tuple[PartReport, ...] = ()


def write_measured_parts(directory: RunDirectory, found: PartsMeasured) -> None:
    """For those who report."""
    directory.write(_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1))


def report_parts(directory: RunDirectory) -> ModeReport:
    """Sections, or what is missing."""
    if not (directory.path / _FILE).exists():
        return ModeReport(missing=(f"{_FILE}: it is written when a run ends",))
    found = directory.read_as(_FILE, PartsMeasured)
    crossing = ReportTable(
        title="What crossed, a step",
        columns=("", "", "bytes", "a position", "on the link", "without it"),
        rows=tuple(map(_row, found.edges)),
    )
    parts = ReportTable(
        title="Parts",
        columns=("", "device", "steps", "a step", "waiting"),
        rows=tuple(
            (one.name, one.device, f"{one.steps:,}", format_seconds(one.seconds / one.steps), f"{one.waited_seconds / one.seconds:.0%}")
            for one in found.parts
            if one.steps and one.seconds
        ),
    )
    missed = [edge for edge in found.edges if edge.missed]
    lines = tuple(f"{edge.receiver} made {plural(edge.missed, 'step')} without {edge.name!r} of {edge.sender}" for edge in missed)
    link_bytes: dict[str, float] = {}
    for edge in found.edges:
        link = f"{edge.sender} → {edge.receiver}"
        link_bytes[link] = max(link_bytes.get(link, 0.0), edge.link_bytes / max(1, edge.steps))
    facts = {"edges": [_facts(edge) for edge in found.edges], "parts": list(found.parts), "link_bytes": link_bytes}
    return ModeReport(
        sections=(
            ReportSection(facts=facts, lines=lines, tables=(crossing,), brief=True),
            ReportSection(tables=(parts,)),
        )
    )


def _facts(edge: Edge) -> dict[str, object]:
    return {**msgspec.to_builtins(edge), "bytes_per_position": edge.bytes_per_position}


def _row(edge: Edge) -> tuple[str, ...]:
    name = f"gradient of {edge.name}" if edge.gradient else edge.name
    steps = max(1, edge.steps)
    each = "" if edge.bytes_per_position is None else f"{edge.bytes_per_position:,.1f} B"
    way = f"{edge.sender} → {edge.receiver}"
    return (
        name,
        way,
        format_bytes(edge.bytes / steps),
        each,
        format_bytes(edge.link_bytes / steps),
        f"{edge.missed:,}" if edge.missed else "",
    )
