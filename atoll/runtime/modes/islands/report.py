"""What `atoll report` says of sites that train together: what each gave to the rounds."""

from collections import Counter

import msgspec

from atoll.cost import Cost
from atoll.events import OuterChosen, RoundFinished, read_events
from atoll.runtime.modes.islands.privacy_report import report_privacy
from atoll.runtime.report import ModeReport, ReportSection, ReportTable
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes, format_seconds, plural

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
    accounts = _accounts(directory)
    if chosen is not None and chosen.exchange == "gradients":
        return _report_gradients(accounts, chosen, predicted)
    table = ReportTable(
        title="Sites",
        columns=("site", "rounds", "steps", "weight", "waited for rounds", "received"),
        rows=tuple(
            (site, str(rounds[site]), str(steps[site]), f"{weights[site]:,.0f}", *_told(accounts.get(site))) for site in sorted(steps)
        ),
    )
    facts = {
        "rounds": made,
        "sites": {
            site: {"rounds": rounds[site], "steps": steps[site], "weight": float(weights[site]), **_facts(accounts.get(site))}
            for site in sorted(steps)
        },
        "outer": None if chosen is None else {
            "inner_steps": chosen.inner_steps, "delay_steps": chosen.delay_steps, "codec": chosen.codec,
            "learning_rate": chosen.learning_rate, "momentum": chosen.momentum,
        },
    }  # fmt: skip
    line = f"{plural(made, 'round')} between {plural(len(steps), 'site')}"
    section = ReportSection(facts=facts, title="Rounds", lines=(line,), tables=(table,) if steps else ())
    privacy, missing = report_privacy(directory)
    sections = (section,) if privacy is None else (section, privacy)
    return ModeReport(sections=sections, missing=missing, predicted_step_seconds=None if predicted is None else predicted.step_seconds)


def _report_gradients(accounts: "dict[str, _Account]", chosen: OuterChosen, predicted: Cost | None) -> ModeReport:
    """Every site is part of every step."""
    table = ReportTable(
        title="Sites",
        columns=("site", "steps", "waited for others", "received"),
        rows=tuple((site, str(account.steps), *_told(account)) for site, account in sorted(accounts.items())),
    )
    facts = {
        "sites": {site: {"steps": account.steps, **_facts(account)} for site, account in sorted(accounts.items())},
        "outer": {"exchange": "gradients", "codec": chosen.codec},
    }
    line = f"gradients of every step in {chosen.codec}, added up over all sites"
    section = ReportSection(facts=facts, title="Gradients between sites", lines=(line,), tables=(table,) if accounts else ())
    return ModeReport(sections=(section,), predicted_step_seconds=None if predicted is None else predicted.step_seconds)


class _Account(msgspec.Struct):
    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    received_bytes: int = 0


def _accounts(directory: RunDirectory) -> dict[str, _Account]:
    """What sites told when they ended; nothing of a run that has not, or was killed."""
    path = directory.path / "sites.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, _Account]) if path.exists() else {}


def _told(account: _Account | None) -> tuple[str, str]:
    if account is None:
        return "", ""
    share = account.waited_seconds / account.seconds if account.seconds else 0.0
    return f"{format_seconds(account.waited_seconds)} ({share:.0%})", format_bytes(account.received_bytes)


def _facts(account: _Account | None) -> dict[str, float]:
    return {} if account is None else {"waited_seconds": account.waited_seconds, "received_bytes": float(account.received_bytes)}
