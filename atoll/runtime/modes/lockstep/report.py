"""The report of a lockstep run: what was predicted against what the ranks measured. Read without PyTorch."""

from collections.abc import Callable, Sequence

from atoll.cluster import Cluster
from atoll.cost import Cost
from atoll.plan import Plan
from atoll.runtime.modes.lockstep.comparison import Comparison, compare
from atoll.runtime.modes.lockstep.measurement import RankMeasured, read_measured
from atoll.runtime.report import Compared, ModeReport, ReportSection, ReportTable, RunSummary, figures, read_prediction
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes, format_seconds

__all__ = ["report_lockstep"]

_MOST_DEVICES = 16
_Found = tuple[Plan, Cluster | None, Cost | None, list[RankMeasured]]


def report_lockstep(directory: RunDirectory, summary: RunSummary) -> ModeReport:
    """Sections, where prediction and reality differ most, and what is missing to say more."""
    missing: list[str] = []
    found = _found(directory, missing)
    comparison, predicted = Comparison(), None
    if found is not None and (summary.steps_since_start or found[3] or summary.step_seconds is None):
        comparison = compare(*found, measured_step=summary.step_seconds)
        predicted = found[2].step_seconds if found[2] is not None else None
    elif found is not None:  # steps were made, but all of them under a plan before this one
        missing.append("plan.json: no step was made under this plan, so there is nothing to compare")
    return ModeReport(
        sections=_sections(comparison),
        predicted_step_seconds=predicted,
        conclusion=_conclusion(directory, summary, predicted, comparison),
        missing=tuple(missing),
    )


def _found(directory: RunDirectory, missing: list[str]) -> _Found | None:
    """What there is of plan, cluster, prediction and measurements; `missing` gets a sentence for each that is not there."""
    if not (directory.path / "plan.json").exists():
        missing.append("plan.json: without it nothing can be compared")
        return None
    plan = directory.plan()
    cluster = directory.load_cluster()
    if cluster is None or cluster.name != plan.cluster:
        missing.append(f"cluster.toml: the devices of {plan.cluster} are not known, so links are called by their devices")
        cluster = None
    predicted = read_prediction(directory)
    if predicted is None or len(predicted.stages) != len(plan.stages):
        missing.append("predicted.json: nothing was predicted; `atoll run` does where --cluster describes the plan's devices")
        predicted = None
    ranks = read_measured(directory)
    absent = sorted({device for stage in plan.stages for device in stage.devices} - {rank.device for rank in ranks})
    if absent:
        shown = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        missing.append(f"measured/: {shown} have written nothing; ranks write after some seconds of training and when they end")
    elif any(not rank.exchanges and len(ranks) > 1 for rank in ranks):
        missing.append("measured/: no exchanges were counted; a rank's second step is")
    return plan, cluster, predicted, ranks


def _conclusion(directory: RunDirectory, summary: RunSummary, predicted: float | None, comparison: Comparison) -> str:
    if summary.step_seconds is None or predicted is None or comparison.differs_most is None:
        return ""
    ratio = summary.step_seconds / predicted
    if 0.9 <= ratio <= 1.1:
        return f"Prediction and reality agree: a step took {ratio - 1:+.0%} against the prediction. {comparison.differs_most.sentence}"
    how = f"{ratio:.2g} times as long as predicted" if ratio >= 1 else f"{ratio:.0%} of the time predicted"
    calibration = directory.path / "calibration.json"
    advice = f" To plan with what was measured: `atoll plan … --calibration {calibration}`." if calibration.exists() else ""
    return f"A step took {how}. {comparison.differs_most.sentence}{advice}"


def _sections(found: Comparison) -> tuple[ReportSection, ...]:
    return (
        ReportSection(facts={"breakdown": found.breakdown}, tables=_breakdown(found), brief=True),
        ReportSection(facts={"stages": found.stages}, tables=_stages(found)),
        ReportSection(facts={"collectives": found.collectives}, tables=_collectives(found)),
        ReportSection(facts={"links": found.links, "link_bytes": found.link_bytes}, tables=_links(found)),
        ReportSection(facts={"memory_bytes": found.memory_bytes}, tables=_memory(found)),
        ReportSection(facts={"differs_most": found.differs_most}),
    )


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> tuple[ReportTable, ...]:
    return (ReportTable(title=title, columns=columns, rows=tuple(rows)),) if rows else ()


def _rows(rows: dict[str, Compared], form: Callable[[float], str] = format_seconds) -> list[tuple[str, ...]]:
    return [(name, *figures(row, form)) for name, row in rows.items()]


def _breakdown(found: Comparison) -> tuple[ReportTable, ...]:
    told = {name: row for name, row in found.breakdown.items() if row.measured or row.predicted}
    return _table("A step, on the busiest device", ("", "measured", "predicted", ""), _rows(told))


def _stages(found: Comparison) -> tuple[ReportTable, ...]:
    if all(stage.forward_seconds.measured is None for stage in found.stages):
        return ()
    columns = ("stage", "samples", "forward", "predicted", "", "backward", "predicted", "", "waiting", "predicted")
    rows: list[tuple[str, ...]] = []
    for stage in found.stages:
        size = f"{stage.micro_batches} × {stage.micro_batch_samples}"
        both = (*figures(stage.forward_seconds), *figures(stage.backward_seconds))
        rows.append((str(stage.stage), size, *both, *figures(stage.wait_seconds)[:2]))
    return _table("Stages: a micro-batch forward and backward, and waiting in a step", columns, rows)


def _collectives(found: Comparison) -> tuple[ReportTable, ...]:
    columns = ("", "", "devices", "calls", "bytes", "measured", "predicted", "", "not hidden")
    rows: list[tuple[str, ...]] = []
    for row in found.collectives:
        exposed = "" if row.exposed_seconds is None else format_seconds(row.exposed_seconds)
        sizes = (str(len(row.devices)), f"{row.calls:,}", format_bytes(row.bytes))
        rows.append((row.what, row.kind.replace("_", "-"), *sizes, *figures(row.seconds), exposed))
    return _table("Collectives of a step", columns, rows)


def _links(found: Comparison) -> tuple[ReportTable, ...]:
    rows = [(link.name, *figures(link.bytes, format_bytes), *figures(link.seconds)) for link in found.links]
    return _table("Links, a step", ("", "bytes", "predicted", "", "busy", "predicted", ""), rows)


def _memory(found: Comparison) -> tuple[ReportTable, ...]:
    rows = _rows(dict(list(found.memory_bytes.items())[:_MOST_DEVICES]), format_bytes)
    if len(found.memory_bytes) > _MOST_DEVICES:
        rows.append((f"… and {len(found.memory_bytes) - _MOST_DEVICES} more", "", "", ""))
    return _table("Memory at the peak (on a CPU, of the whole process)", ("", "measured", "predicted", ""), rows)
