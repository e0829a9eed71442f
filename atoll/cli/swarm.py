"""The swarm part of `atoll run`: coordinator, feeder and local workers are started, and the command with which others join is printed."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import typer

from atoll.cli.status import say
from atoll.errors import PlanError
from atoll.lab.environment import LabView, find_lab
from atoll.lab.remote import remote_command
from atoll.plan import Plan
from atoll.runtime.run_directory import RunDirectory, RunSettings

__all__ = ["launch_swarm"]

_JOIN_USES = 1000
_JOIN_SECONDS = 24 * 3600.0


def launch_swarm(
    directory: RunDirectory, settings: RunSettings, plan: Plan, parameters: int, max_restarts: int, listen: str | None
) -> None:
    """Starts the swarm and waits for its end."""
    _check(plan)
    from atoll.fabric.security import Authority  # PyTorch takes seconds to load: mistakes above are told before
    from atoll.runtime.swarm.coordinating import write_spec
    from atoll.runtime.swarm.launching import SwarmProcesses, free_address
    from atoll.runtime.swarm.spec import spec_of
    from atoll.script import load_job

    job = load_job(settings.script, settings.arguments)
    write_spec(directory, spec_of(Path(settings.script), settings.arguments, job, plan, parameters, settings.checkpoint_every))
    exists = (directory.path / "authority" / "authority.key").exists()
    authority = Authority.open(directory.path) if exists else Authority.create(directory.path)
    hosts = [device.rpartition("/")[0] for stage in plan.stages for device in stage.devices]
    lab = _lab_with(hosts)
    address = listen or free_address("127.0.0.1" if lab is None else lab.address)
    where = "on this machine" if lab is None else f"on hosts of {lab.name}"
    say(f"starting a coordinator, a feeder and {len(hosts)} workers {where}; the run is in {directory.path}")
    token = authority.issue_token("worker", uses=_JOIN_USES, lifetime_seconds=_JOIN_SECONDS)
    say(f"others join with: atoll join {_dialled(address)} --token {token}")

    def place(number: int, command: list[str]) -> list[str]:
        return command if lab is None else remote_command(hosts[number], command)

    code = SwarmProcesses(directory.path, address, workers=len(hosts), max_restarts=max_restarts, say=say, place=place).run()
    if code:
        raise typer.Exit(code)
    say(f"`atoll report {directory.path}` says more")


def _lab_with(hosts: Sequence[str]) -> LabView | None:
    """The lab this command runs in, if its hosts are those of the plan: then each worker is started on its own host."""
    lab = find_lab(os.environ)
    return lab if lab is not None and all(host in lab.addresses for host in hosts) else None


def _dialled(address: str) -> str:
    """Where others dial: an address that stands for all of this machine's says none."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "") else address


def _check(plan: Plan) -> None:
    for number, stage in enumerate(plan.stages):
        if stage.tensor > 1 or stage.expert or stage.split:
            raise PlanError(
                f"stage {number}: a swarm's worker holds a whole stage by itself; tensor, expert and split parallelism inside stages are "
                "not run in swarm mode"
            )
