"""`python -m atoll.cli.swarm_process ROLE RUN ADDRESS [DEVICES] NAME`: a process of a swarm, as `atoll run` starts it. Not for people."""

import os
import sys
from collections.abc import Sequence

import msgspec

from atoll.cli.output import show_what_the_terminal_can
from atoll.errors import AtollError
from atoll.runtime.run_directory import RunDirectory

__all__ = ["main"]

_PATIENCE_SECONDS = 120.0  # the coordinator may just be starting again


def main(arguments: Sequence[str]) -> int:
    """Coordinate, feed or work until the run is over; or evaluate the states named in place of an address."""
    role, run, address, *devices, name = arguments
    try:
        if role == "coordinator":
            return 0 if _coordinate(RunDirectory(run), address) else 130
        elif role == "evaluate":
            _evaluate(RunDirectory(run), address)
        else:
            _take_part(RunDirectory(run), address, name, *devices)
    except AtollError as error:
        print(f"error: {name}: {error}" if role != "coordinator" else f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _coordinate(directory: RunDirectory, address: str) -> bool:
    from atoll.runtime.swarm.coordinating import coordinate
    from atoll.runtime.swarm.run_files import read_spec
    from atoll.script import load_job
    from atoll.watch.progress import Progress

    settings = directory.settings()
    job = load_job(settings.script, settings.arguments)
    with Progress() as progress:
        return coordinate(directory, read_spec(directory.path), job, address, observers=(progress, *job.callbacks), recall=progress.recall)


def _evaluate(directory: RunDirectory, keys: str) -> None:
    from atoll.runtime.swarm.evaluating import evaluate_state
    from atoll.runtime.swarm.files import Key
    from atoll.script import load_job

    settings = directory.settings()
    job = load_job(settings.script, settings.arguments)
    found = evaluate_state(directory, job, msgspec.json.decode(keys, type=list[Key]))
    print(msgspec.json.encode(found).decode(), flush=True)


def _take_part(directory: RunDirectory, address: str, name: str, devices: str = "{}") -> None:
    from atoll.cli.imposed import imposed_speed
    from atoll.fabric.security import enrol
    from atoll.runtime.swarm.launching import TOKEN
    from atoll.runtime.swarm.own_devices import OwnDevices
    from atoll.runtime.swarm.run_files import read_spec
    from atoll.runtime.swarm.taking_part import take_part
    from atoll.script import load_job

    token = os.environ.pop(TOKEN)
    settings = directory.settings()
    job = load_job(settings.script, settings.arguments)

    def say(line: str) -> None:
        print(f"{name}: {line}", flush=True)

    credentials = enrol(address, token, name, patience_seconds=_PATIENCE_SECONDS, say=say)
    own = msgspec.json.decode(devices, type=OwnDevices)
    spec, imposed = read_spec(directory.path), imposed_speed(os.environ)
    take_part(credentials, address, spec, job, imposed=imposed, polite=True, devices=own, warn=say)


if __name__ == "__main__":
    show_what_the_terminal_can()
    sys.exit(main(sys.argv[1:]))
