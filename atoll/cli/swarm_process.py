"""`python -m atoll.cli.swarm_process ROLE RUN ADDRESS [DEVICES] NAME`: a process of a swarm, as `atoll run` starts it. Not for people."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.callbacks import listeners
from atoll.cli.output import show_what_the_terminal_can
from atoll.errors import AtollError
from atoll.events import AnyEvent, Observer, Warned
from atoll.runtime.mode import CapturedJob
from atoll.runtime.run_directory import SPEEDS, RunDirectory
from atoll.runtime.supervise.hosts import find_lab
from atoll.watch.describe import describe_event

if TYPE_CHECKING:
    from atoll.fabric.security import Credentials
    from atoll.runtime.imposed_speed import Imposed
    from atoll.runtime.modes.swarm.spec import SwarmSpec

__all__ = ["imposed_speed", "main"]

_PATIENCE_SECONDS = 120.0  # the coordinator may just be starting again


def main(arguments: Sequence[str], known: CapturedJob | None = None) -> int:
    """Coordinate, feed or work until the run is over; or evaluate the states named in place of an address.

    `known` is the job where the process this one was forked from has captured it.
    """
    role, run, address, *devices, name = arguments
    try:
        if role == "coordinator":
            return 0 if _coordinate(RunDirectory(run), address, known) else 130
        elif role == "evaluate":
            _evaluate(RunDirectory(run), address)
        else:
            _take_part(run, address, name, known, *devices)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _coordinate(directory: RunDirectory, address: str, known: CapturedJob | None) -> bool:
    from atoll.fabric.shaped import imposed_links
    from atoll.runtime.modes.swarm.coordinator_process import coordinate
    from atoll.runtime.modes.swarm.spec import read_spec
    from atoll.script import load_job
    from atoll.watch.progress import Progress

    settings = directory.settings()
    job = known.job if known is not None else load_job(settings.script, settings.arguments)
    with Progress() as progress:
        observers: tuple[Observer, ...] = (progress, *listeners(job.callbacks))
        return coordinate(
            *(directory, read_spec(directory.path), job, address),
            observers=observers,
            recall=progress.recall,
            links=imposed_links(os.environ),
        )


def _evaluate(directory: RunDirectory, step: str) -> None:
    from atoll.runtime.modes.swarm.coordinator_process import evaluate_state
    from atoll.script import load_job

    settings = directory.settings()
    job = load_job(settings.script, settings.arguments)
    found = evaluate_state(directory, job, int(step))
    print(msgspec.json.encode(found).decode(), flush=True)


def _take_part(source: str, address: str, name: str, known: CapturedJob | None, devices: str = "{}") -> None:
    """`source` is the run's directory, or the script on a host that does not see it: then the coordinator describes the job."""
    from atoll.fabric.security import enrol
    from atoll.fabric.shaped import imposed_links
    from atoll.graph.capture import Captured
    from atoll.runtime.modes.swarm.member_process import run_member
    from atoll.runtime.modes.swarm.spec import OwnDevices, read_spec
    from atoll.runtime.modes.swarm.supervisor import TOKEN
    from atoll.script import load_job

    token = os.environ.pop(TOKEN)

    def show(event: AnyEvent) -> None:
        print(describe_event(event), flush=True)

    credentials = enrol(address, token, name, patience_seconds=_PATIENCE_SECONDS, observer=show)
    own = msgspec.json.decode(devices, type=OwnDevices)
    spec = _described(credentials, address) if Path(source).is_file() else read_spec(Path(source))
    if known is not None:
        assert isinstance(known.captured, Captured), "a swarm cuts what it trains"
        job, captured = known.job, known.captured
    else:
        job, captured = load_job(source if Path(source).is_file() else RunDirectory(source).settings().script, spec.arguments), None
    imposed, links = imposed_speed(os.environ), imposed_links(os.environ)

    def warn(event: AnyEvent) -> None:
        if isinstance(event, Warned):
            show(event)

    run_member(*(credentials, address, spec, job), imposed=imposed, links=links, polite=True, devices=own, observer=warn, captured=captured)


def _described(credentials: "Credentials", address: str) -> "SwarmSpec":
    """What the coordinator says of the job."""
    from atoll.fabric.security import RunMember
    from atoll.runtime.modes.swarm.spec import JobService, Nothing

    with RunMember(credentials) as member:
        coordinator = member.join(address)
        member.fabric.run(coordinator.connected(_PATIENCE_SECONDS))
        return coordinator.call_sync(JobService.describe, Nothing(), timeout_seconds=_PATIENCE_SECONDS)


def imposed_speed(environ: Mapping[str, str]) -> "Imposed | None":
    """The speed of the first device of the lab's host this process is on; None where nothing is imposed."""
    lab = find_lab(environ)
    if lab is None or not environ.get(SPEEDS):
        return None
    from atoll.runtime.imposed_speed import Imposed

    return Imposed(environ[SPEEDS], f"{lab.host}/0")


if __name__ == "__main__":
    show_what_the_terminal_can()
    sys.exit(main(sys.argv[1:]))
