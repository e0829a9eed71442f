"""`atoll authority DIR`: serve a run's authority by itself. Hidden: `atoll run` will do this for the runs that machines can join."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.output import show_event
from atoll.errors import AtollError
from atoll.units import parse_seconds

__all__ = ["authority"]


def authority(
    directory: Annotated[Path, typer.Argument(help="The run's directory.", metavar="DIR")],
    listen: Annotated[str, typer.Option(help="Where to listen.", metavar="HOST:PORT")] = "127.0.0.1:0",
    role: Annotated[str, typer.Option(help="What the token is for: worker, feeder or observer.")] = "worker",
    uses: Annotated[int, typer.Option(help="How many may enrol with the token.")] = 1,
    lifetime: Annotated[str, typer.Option(help="How long the token is good for.")] = "1 h",
    revoke: Annotated[str | None, typer.Option(help="Shut this member out instead, and end.", metavar="NAME")] = None,
    reason: Annotated[str, typer.Option(help="Why it is shut out.")] = "by the operator",
) -> None:
    """Open or make the authority of a run, print a join token, and accept members until Ctrl-C."""
    from atoll.fabric.security import Authority, serve  # PyTorch takes seconds to load

    there = (directory / "authority" / "authority.key").exists()
    opened = Authority.open(directory) if there or revoke is not None else Authority.create(directory)
    if revoke is not None:
        count = opened.revoke(revoke, reason)
        print(f"{revoke}: {count} certificate{'s' * (count != 1)} revoked; the token it enrolled with lets nobody in any more")
        return
    try:
        seconds = parse_seconds(lifetime)
    except ValueError as error:
        raise AtollError(f"--lifetime: {error}") from None
    token = opened.issue_token(role, uses=uses, lifetime_seconds=seconds)
    coordinator, address = serve(opened, listen, observer=show_event)
    with coordinator:
        print(f"atoll join {address} --token {token}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return
