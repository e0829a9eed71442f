"""`atoll join ADDRESS --token T`: enrol this machine in a run and stay in it."""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.join_site import AsSite, check_asked, describe_sites, join_as_site
from atoll.cli.output import show_event
from atoll.errors import JobError, RefusedError
from atoll.events import AnyEvent, Note, PeerChanged, PeerRetried, Warned
from atoll.fabric.address import split_address
from atoll.fabric.security.token import Token
from atoll.units import format_seconds, plural

if TYPE_CHECKING:
    from atoll.fabric import Remote
    from atoll.fabric.security import Credentials, RunMember
    from atoll.job import Job
    from atoll.runtime.modes.swarm.member_process import Ending
    from atoll.runtime.modes.swarm.spec import SwarmSpec

__all__ = ["farewell", "join"]

_CONNECT_SECONDS = 30.0
_INTERRUPTED = 130


def join(
    address: Annotated[str, typer.Argument(help="Where the run's coordinator listens.", metavar="HOST:PORT")],
    token: Annotated[str, typer.Option(help="The join token; `-` reads it from standard input.", metavar="TOKEN")],
    name: Annotated[str | None, typer.Option(help="What to be called in the run; the machine's name if not given.", metavar="NAME")] = None,
    keys: Annotated[Path | None, typer.Option(help="Keep key and certificate in this directory.", metavar="DIR")] = None,
    check: Annotated[bool, typer.Option("--check", help="Enrol, connect, say how that went and leave.")] = False,
    script: Annotated[
        Path | None, typer.Option(help="Use this copy of the training script instead of the one the run sends.", metavar="FILE")
    ] = None,
    timeout: Annotated[float, typer.Option(help="How long to try where nobody answers yet.", metavar="SECONDS", min=0)] = 60.0,
    stages: Annotated[
        int, typer.Option(help="Host so many of the job's stages here, on one device: for machines with memory to spare.", min=1)
    ] = 1,
    behind_nat: Annotated[
        bool, typer.Option("--behind-nat", help="Nobody can dial this machine; reach it through the coordinator.")
    ] = False,
    devices: Annotated[
        int, typer.Option(help="How many of this machine's devices work, in lockstep, as one worker.", metavar="N", min=1)
    ] = 1,
    site: Annotated[
        str | None, typer.Option(help="Take part as a site of this name in a run whose sites train together.", metavar="NAME")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="With --site: train so many samples more of every batch; as many as the site with the fewest if not given.", min=1
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --site: directory for what concerns the site; NAME-site if not given.", metavar="DIR")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="With --site: start it anew so many times when a process of it dies.", min=0)] = 0,
) -> None:
    """Enrol in a run with a token, and work for it until it is over or Ctrl-C.

    The token names the run's authority, so nothing secret is sent to anybody else. The run sends its training script, which is run here:
    join only runs whose owner you trust.
    """
    text = sys.stdin.readline() if token == "-" else token
    Token.parse(text)
    for one in address.split(","):
        split_address(one)
    news = _News()
    news(Note(message=f"loading PyTorch, then enrolling at {address}"))
    from atoll.fabric.security import RunMember, enrol  # PyTorch takes seconds to load: `--help` does not wait for it
    from atoll.runtime.modes.swarm.spec import check_devices, devices_here

    short = check_devices(devices, *devices_here())
    if short is not None:
        news(Warned(message=short))
    called = name or (f"{site}-{secrets.token_hex(3)}" if site is not None else _own_name())
    credentials = enrol(address, text, called, patience_seconds=timeout, observer=news)
    if keys is not None:
        credentials.save(keys)
    print(_enrolled(credentials), flush=True)
    with _not_begun(credentials.name), RunMember(credentials, observer=news) as member:
        coordinator = member.join(address)
        member.fabric.run(coordinator.connected(_CONNECT_SECONDS))
        print(f"Connected to {coordinator.name} at {address}", flush=True)
        described = describe_sites(coordinator) if credentials.role == "worker" else None
        asked = AsSite(site, samples, devices, script, out, max_restarts) if site is not None else None
        check_asked(described, asked)
        train = join_as_site(coordinator, described, address, text, asked, news) if described and asked and not check else None
        spec = _spec(coordinator) if described is None and credentials.role in ("worker", "feeder") else None
        if spec is not None:
            _check_stages(stages, spec)
        if check:
            print(f"All is well: {credentials.name} can take part as {credentials.role}", flush=True)
            return
        if spec is None and train is None:
            _stay(member, coordinator)
            return
    if train is not None:
        raise typer.Exit(train())
    assert spec is not None
    _work(credentials, address, spec, script, news, dialled=not behind_nat, devices=devices, stages=stages)


@contextmanager
def _not_begun(name: str) -> Iterator[None]:
    """What Ctrl-C does while there is no work yet that could be left."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{name} left before it had begun", flush=True)
        raise typer.Exit(_INTERRUPTED) from None


def _spec(coordinator: "Remote") -> "SwarmSpec | None":
    """What the run trains; None where it has nothing for those who join."""
    from atoll.runtime.modes.swarm.spec import JobService, Nothing

    try:
        return coordinator.call_sync(JobService.describe, Nothing(), timeout_seconds=_CONNECT_SECONDS)
    except RefusedError:
        return None


def _check_stages(stages: int, spec: "SwarmSpec") -> None:
    """Before the script is run and the model is captured, which may take long."""
    from atoll.runtime.modes.swarm.member_process import check_hosted

    check_hosted(stages, spec)


def _job(spec: "SwarmSpec", script: Path | None) -> "Job":
    """By the script that is here, or by the one that the run sent, which may lack what it imports and reads."""
    from atoll.runtime.modes.swarm.spec import load_spec_job
    from atoll.script import load_job

    if script is not None:
        return load_job(script, spec.arguments)
    try:
        return load_spec_job(spec)
    except JobError as error:
        if not isinstance(error.__cause__, (ImportError, OSError)):
            raise
        advice = "The run sends its script and no other file: copy what it imports and reads to this machine, and give --script FILE"
        raise JobError(f"{error}\n{advice}") from error


def _work(
    credentials: "Credentials",
    address: str,
    spec: "SwarmSpec",
    script: Path | None,
    news: "_News",
    *,
    dialled: bool,
    devices: int,
    stages: int,
) -> None:
    """Until the run is over."""
    with _not_begun(credentials.name):
        from atoll.cli.swarm_process import imposed_speed
        from atoll.fabric.shaped import imposed_links
        from atoll.runtime.modes.swarm.member_process import run_member
        from atoll.runtime.modes.swarm.spec import OwnDevices

        job = _job(spec, script)
    settings = spec.settings
    whole = f"{plural(settings.stages, 'stage')}, {plural(settings.steps, 'step')}"
    print(f"Working for {job.name}: {whole}; the model is captured first. Ctrl-C leaves", flush=True)
    try:
        ending = run_member(
            credentials,
            address,
            spec,
            job,
            observer=news,
            dialled=dialled,
            imposed=imposed_speed(os.environ),
            links=imposed_links(os.environ),
            polite=True,
            devices=OwnDevices(tuple(range(devices)), stages=stages),
        )
    except KeyboardInterrupt:
        print(f"{credentials.name} leaves at once: what it was doing is done again by others", flush=True)
        return
    print(farewell(ending, credentials.name), flush=True)


def farewell(ending: "Ending", name: str) -> str:
    """How it ended, and how to go on where that is possible."""
    match ending:
        case "over":
            return "The run is over"
        case "stopped":
            return (
                "The run was stopped before its last step; nothing was lost. When it goes on (atoll run … --resume, where it was started), "
                "join again with the command that is printed then"
            )
        case "left":
            return f"{name} has left; nothing was lost"


def _own_name() -> str:
    """The machine's name with something random behind it, as a name belongs to one member at a time."""
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname())[:40].strip("-")
    return f"{host or 'host'}-{secrets.token_hex(3)}"


def _enrolled(credentials: "Credentials") -> str:
    left = credentials.expires_unix_seconds - time.time()
    until = time.strftime("%H:%M:%S", time.gmtime(credentials.expires_unix_seconds))
    return (
        f"Enrolled as {credentials.name} ({credentials.role}) in run {credentials.identity.run}\n"
        f"Certificate until {until} UTC ({format_seconds(left)}), renewed while this runs"
    )


def _stay(member: "RunMember", coordinator: "Remote") -> None:
    """Until Ctrl-C, or until the run is over or does not want us."""
    never = threading.Event()
    try:
        print("Waiting: the run has no work for this machine. Ctrl-C leaves", flush=True)
        while coordinator.given_up is None:
            never.wait(0.2)
    except KeyboardInterrupt:
        print(f"{member.credentials.name} leaves", flush=True)
        return
    raise coordinator.given_up


class _News:
    """Tells what happens among the members. Who has said goodbye is not missed, and that it is not reached is no news."""

    def __init__(self) -> None:
        self._left: set[str] = set()

    def __call__(self, event: AnyEvent) -> None:
        match event:
            case PeerChanged(state="dead") if " left: " in event.reason:
                self._left.add(event.peer)
                show_event(Note(message=f"{event.peer} has left"))
                return
            case PeerRetried() if event.peer in self._left:
                return
            case PeerChanged(state="alive"):
                self._left.discard(event.peer)
        show_event(event)
