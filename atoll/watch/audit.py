"""What the audit logs of a run add up to, and whether they are what was written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import JobError
from atoll.privacy.audit_log import AuditRecord, LogFinding, check_log, log_names
from atoll.runtime.run_directory import RunDirectory

__all__ = ["AuditReport", "Crossed", "read_audit"]


class Crossed(msgspec.Struct, frozen=True, kw_only=True):
    """All messages that are alike in where they went and what they were."""

    site: str
    direction: str
    peer: str
    peer_site: str | None
    kind: str
    codec: str
    refused: str
    messages: int
    bytes: int
    first_unix_seconds: float
    last_unix_seconds: float


class AuditReport(msgspec.Struct, frozen=True):
    """The logs of a run, the sums over them, and what is wrong beside them."""

    logs: tuple[LogFinding, ...]
    crossed: tuple[Crossed, ...]  # those that were refused have a reason
    problems: tuple[str, ...]  # of no log in particular

    @property
    def whole(self) -> bool:
        """Whether everything is as it was written."""
        return not self.problems and not any(log.problems for log in self.logs)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        logs = [
            {"name": log.name, "records": len(log.records), "head": log.head, "problems": log.problems, "notes": log.notes}
            for log in self.logs
        ]
        crossed = [msgspec.structs.asdict(one) for one in self.crossed]
        return {
            "whole": self.whole,
            "problems": self.problems,
            "logs": logs,
            "crossed": [{key: value for key, value in one.items() if key != "refused"} for one in crossed if not one["refused"]],
            "refused": [one for one in crossed if one["refused"]],
        }


def read_audit(run: Path, heads: Sequence[str] = ()) -> AuditReport:
    """Checks and adds up a run's audit logs; `heads` are hashes noted before, each of which some log must have."""
    directory = RunDirectory(run).audit
    if not run.is_dir():
        raise JobError(f"{run}: there is no such directory; give the one that a run wrote")
    names = log_names(directory) if directory.is_dir() else []
    if not names:
        raise JobError(f"{run}: has no audit logs ({directory.name}/*.jsonl): the run crossed no border that was watched")
    logs = tuple(check_log(directory, name) for name in names)
    known = {each for log in logs for each in log.hashes}
    problems = tuple(f"no log has a record with the hash {head}, which was noted" for head in heads if head not in known)
    return AuditReport(logs, tuple(_sums(record for log in logs for record in log.records)), problems)


def _sums(records: Iterable[AuditRecord]) -> Iterable[Crossed]:
    alike: dict[tuple[Any, ...], list[AuditRecord]] = {}
    for record in records:
        key = (record.site, record.peer, record.direction, record.kind, record.codec, record.refused, record.peer_site)
        alike.setdefault(key, []).append(record)
    for key in sorted(alike, key=str):
        found = alike[key]
        yield Crossed(
            site=found[0].site,
            direction=found[0].direction,
            peer=found[0].peer,
            peer_site=found[0].peer_site,
            kind=found[0].kind,
            codec=found[0].codec,
            refused=found[0].refused,
            messages=len(found),
            bytes=sum(record.bytes for record in found),
            first_unix_seconds=min(record.unix_seconds for record in found),
            last_unix_seconds=max(record.unix_seconds for record in found),
        )
