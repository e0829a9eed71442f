"""`atoll diff a.json b.json`: what became different from one plan to another."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.plan import diff as plan_diff
from atoll.plan import load_plan

__all__ = ["diff"]


def diff(
    before: Annotated[Path, typer.Argument(help="A plan, JSON or text.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="Another plan.", metavar="AFTER")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
) -> None:
    """Say in words what differs between two plans."""
    changes = plan_diff(load_plan(before), load_plan(after))
    print(changes.to_json() if as_json else changes)
