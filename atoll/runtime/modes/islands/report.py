"""What `atoll report` says of sites that train together: what each gave to the rounds."""

from collections import Counter

from atoll.cost import Cost
from atoll.events import OuterChosen, RoundFinished, read_events
from atoll.runtime.report import ModeReport, ReportSection, ReportTable
from atoll.runtime.run_directory import RunDirectory
from atoll.units import plural

__all__ = ["report_islands"]


def report_islands(directory: RunDirectory, predicted: Cost | None) -> ModeReport:
    """From the run's events."""
    steps: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    made, chosen = 0, None
    for event in read_events(directory.events):
        if isinstance(event, RoundFinished):
            made += 1
            for site in event.sites:
                steps[site.site] += site.steps
                weights[site.site] += site.weight  # type: ignore[assignment]
                rounds[site.site] += 1
        elif isinstance(event, OuterChosen):
            chosen = event
    table = ReportTable(
        title="Sites",
        columns=("site", "rounds", "steps", "weight"),
        rows=tuple((site, str(rounds[site]), str(steps[site]), f"{weights[site]:,.0f}") for site in sorted(steps)),
    )
    facts = {
        "rounds": made,
        "sites": {site: {"rounds": rounds[site], "steps": steps[site], "weight": float(weights[site])} for site in sorted(steps)},
        "outer": None if chosen is None else {
            "inner_steps": chosen.inner_steps, "delay_steps": chosen.delay_steps, "codec": chosen.codec,
            "learning_rate": chosen.learning_rate, "momentum": chosen.momentum,
        },
    }  # fmt: skip
    line = f"{plural(made, 'round')} between {plural(len(steps), 'site')}"
    section = ReportSection(facts=facts, title="Rounds", lines=(line,), tables=(table,) if steps else ())
    return ModeReport(sections=(section,), predicted_step_seconds=None if predicted is None else predicted.step_seconds)
