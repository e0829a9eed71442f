"""The swarm part of `atoll run`: coordinator, feeder and local workers are started, and the command with which others join is printed."""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from atoll.cli.status import say
from atoll.errors import PlanError
from atoll.lab.environment import lab_of
from atoll.lab.remote import remote_command
from atoll.plan import Plan, why_not_swarm
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.fabric.security import Authority
    from atoll.graph.capture import Captured
    from atoll.job import Job
    from atoll.runtime.swarm.resuming import Resumed

__all__ = ["check_swarm", "launch_swarm"]

_JOIN_USES = 1000
_JOIN_SECONDS = 24 * 3600.0
_INTERRUPTED = 130


def launch_swarm(
    directory: RunDirectory,
    settings: RunSettings,
    plan: Plan,
    captured: "Captured",
    max_restarts: int,
    listen: str | None,
    standby: tuple[str, ...] = (),
) -> None:
    """Starts the swarm, or goes on with one that was begun, and waits for its end."""
    from atoll.fabric.security import Authority  # PyTorch takes seconds to load: mistakes above are told before
    from atoll.runtime.swarm.launching import SwarmProcesses, free_address
    from atoll.runtime.swarm.own_devices import planned_workers
    from atoll.runtime.swarm.resuming import continue_run
    from atoll.runtime.swarm.run_files import JOURNAL, read_start, write_spec, write_start
    from atoll.runtime.swarm.spec import spec_of
    from atoll.script import load_job

    job = load_job(settings.script, settings.arguments)
    spec = spec_of(Path(settings.script), settings.arguments, job, plan, captured, settings.checkpoint_every, settings.codec)
    before = read_start(directory)
    workers = planned_workers(plan)
    hosts = [host for host, _ in workers]
    lab = lab_of(hosts, os.environ)
    address = listen or (before.address if before is not None else free_address("127.0.0.1" if lab is None else lab.address))
    write_spec(directory, spec)
    known = (directory.path / "authority" / "authority.key").exists()
    authority = Authority.open(directory.path) if known else Authority.create(directory.path)
    resumed = asyncio.run(continue_run(directory, settings.nats, authority.run, spec.settings)) if before is not None else None
    start = write_start(directory, address, sum(own.stages for _, own in workers))
    if resumed is not None:
        say(_going_on(resumed, spec.settings.steps))
    if resumed is not None and resumed.committed >= spec.settings.steps and not resumed.lost:
        workers = []
    else:
        where = "on this machine" if lab is None else f"on hosts of {lab.name}"
        say(f"starting a coordinator, a feeder and {_workers([own.stages for _, own in workers])} {where}; the run is in {directory.path}")
        _invite(authority, directory, address, standby)

    def place(number: int, command: list[str]) -> list[str]:
        return command if lab is None else remote_command(hosts[number], command)

    processes = SwarmProcesses(
        directory.path,
        address,
        workers=[msgspec.json.encode(own).decode() for _, own in workers],
        max_restarts=max_restarts,
        say=say,
        generation=start.number,
        place=place,
        standby=standby,
    )
    try:
        code = processes.run()
    except KeyboardInterrupt:  # the second Ctrl-C
        code = _INTERRUPTED
    _end(code, directory, settings, journal=settings.nats is not None or (directory.path / JOURNAL).exists())


def _invite(authority: "Authority", directory: RunDirectory, address: str, standby: tuple[str, ...]) -> None:
    """Says with which commands others join and stand by."""
    token = authority.issue_token("worker", uses=_JOIN_USES, lifetime_seconds=_JOIN_SECONDS)
    say(f"{_others(address)} join with: atoll join {','.join((_dialled(address), *standby))} --token {token}")
    for other in standby:
        say(f"to stand by at {other}, copy {directory.path} there and start: atoll standby {directory.path.name} --listen {other}")


def _workers(hosted: Sequence[int]) -> str:
    several = sum(count > 1 for count in hosted)
    if not several:
        return plural(len(hosted), "worker")
    return f"{plural(len(hosted), 'worker')}, {several} of which host{'s' if several == 1 else ''} several stages,"


def _going_on(resumed: "Resumed", steps: int) -> str:
    committed, checkpoint = resumed.committed, resumed.checkpoint
    if resumed.lost:
        return f"{plural(committed, 'step')} made before, but the last states were not stored: going on after step {checkpoint}"
    if committed >= steps:
        return f"{plural(committed, 'step')} made before, the last one too: only the coordinator is started, to write what may be missing"
    if committed == checkpoint:
        return f"going on after step {committed}"
    made = f"{plural(committed, 'step')} made before"
    return f"{made}; the last checkpoint is of step {checkpoint}: from there, unless workers of before are still there"


def _end(code: int, directory: RunDirectory, settings: RunSettings, *, journal: bool) -> None:
    if code == _INTERRUPTED and journal:  # else nothing was begun that could go on
        say(f"to go on: atoll run {settings.script} --mode swarm --resume {directory.path}")
    if code:
        raise typer.Exit(code)
    say(f"`atoll report {directory.path}` says more")


def _others(address: str) -> str:
    """Who can dial an address."""
    if address.startswith(("127.", "localhost:", "[::1]")):
        return "others on this machine (give --listen 0.0.0.0:PORT to let other machines in)"
    return "others"


def _dialled(address: str) -> str:
    """Where others dial: an address that stands for all of this machine's says none."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "") else address


def check_resumed(directory: RunDirectory, plan: Plan, nats: str | None) -> None:
    """AtollError where a swarm cannot go on in this directory with this plan. Nothing has been written or started yet."""
    from atoll.runtime.swarm.resuming import check_files, check_same_stages
    from atoll.runtime.swarm.run_files import read_spec, read_start
    from atoll.runtime.swarm.spec import bounds_of

    if read_start(directory) is None:
        return
    check_same_stages(read_spec(directory.path).bounds, bounds_of(plan))
    if nats is None:
        check_files(directory, len(plan.stages))


def check_swarm(plan: Plan, captured: "Captured", job: "Job") -> None:
    """AtollError where this plan of this job cannot be trained by a swarm. Nothing has been written or started yet."""
    why_not = why_not_swarm(plan)
    if why_not is not None:
        raise PlanError(why_not)
    from atoll.runtime.swarm.spec import bounds_of
    from atoll.runtime.swarm.staleness import check_optimizer
    from atoll.runtime.swarm.taking_part import check_divisible

    check_divisible(captured, bounds_of(plan))
    if plan.staleness:
        check_optimizer(job)
