"""What `atoll report` says of the privacy that noised updates have cost each site."""

import msgspec

from atoll.errors import AtollError
from atoll.privacy.accounting import PrivacySpent, privacy_spent
from atoll.runtime.modes.islands.noise import NoiseRecord, read_noise
from atoll.runtime.report import ReportSection, ReportTable
from atoll.runtime.run_directory import RunDirectory

__all__ = ["report_privacy"]


def report_privacy(directory: RunDirectory) -> tuple[ReportSection | None, tuple[str, ...]]:
    """From what sites keep of the updates they have noised, and what is missing; no section where none were."""
    sites = sorted(path.name for path in (directory.path / "sites").glob("*") if path.is_dir())
    records = {site: record for site in sites if (record := read_noise(directory, site)) is not None}
    if not records:
        return None, ()
    try:
        spent = {site: _spent(record) for site, record in records.items()}
    except AtollError as error:
        facts = {"privacy": {site: {"updates": record.drawn} for site, record in records.items()}}
        return ReportSection(facts=facts), (str(error),)
    noise = next(iter(records.values())).noise
    table = ReportTable(
        title=f"Privacy: ε for δ = {noise.delta:g}, of all that a site has sent",
        columns=("site", "updates", "ε (PLD)", "ε (RDP)"),
        rows=tuple((site, str(one.updates), _shown(one.epsilon_pld), _shown(one.epsilon_rdp)) for site, one in spent.items()),
    )
    line = f"updates clipped to a norm of {noise.norm:g}, noise {noise.multiplier:g} times that; a site against one that sent only noise"
    facts = {"privacy": {site: msgspec.to_builtins(one) | {"clip_norm": records[site].noise.norm} for site, one in spent.items()}}
    return ReportSection(facts=facts, lines=(line,), tables=(table,)), ()


def _spent(record: NoiseRecord) -> PrivacySpent:
    return privacy_spent(record.noise.multiplier, record.drawn, record.noise.delta)


def _shown(epsilon: float | None) -> str:
    return "–" if epsilon is None else f"{epsilon:.3f}" if epsilon < 1e4 else f"{epsilon:.3g}"
