"""`atoll diff a.json b.json`: what became different from one plan to another."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.plan import Plan, load_plan, validate
from atoll.plan import diff as plan_diff

__all__ = ["diff"]


def diff(
    before: Annotated[Path, typer.Argument(help="A plan, JSON or text.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="Another plan.", metavar="AFTER")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
) -> None:
    """Say in words what differs between two plans."""
    changes = plan_diff(_possible(before), _possible(after))
    print(changes.to_json() if as_json else changes)


def _possible(path: Path) -> Plan:
    """The plan in a file, which breaks no rule that can be checked without its graph and its cluster."""
    plan = load_plan(path)
    validate(plan, source=path)
    return plan
