"""`atoll join ADDRESS --token T --site NAME`: this machine's devices as a whole site of a run whose sites train together."""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import JobError, RefusedError
from atoll.events import EventLog, Observer
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.fabric import Remote
    from atoll.runtime.modes.islands.joining import SiteJob
    from atoll.runtime.modes.islands.spec import IslandsSpec

__all__ = ["AsSite", "check_asked", "describe_sites", "join_as_site"]

_ANSWER_SECONDS = 30.0


class AsSite(NamedTuple):
    """What was asked for."""

    site: str
    samples: int | None
    devices: int
    script: Path | None
    out: Path | None
    max_restarts: int


def describe_sites(coordinator: "Remote") -> "SiteJob | None":
    """What sites train there; None where they do not train together."""
    from atoll.runtime.modes.islands.joining import JoinService
    from atoll.runtime.modes.swarm.spec import Nothing

    try:
        return coordinator.call_sync(JoinService.describe, Nothing(), timeout_seconds=_ANSWER_SECONDS)
    except RefusedError:
        return None


def check_asked(described: "SiteJob | None", asked: AsSite | None) -> None:
    """JobError where a site is asked for and there can be none, or the other way round."""
    if described is not None and asked is None:
        raise JobError("the sites of this run train together: give --site NAME, and this machine takes part as one")
    if described is None and asked is not None:
        raise JobError(f"--site {asked.site}: the sites of this run exchange no updates that another site could be part of; leave it out")


def join_as_site(coordinator: "Remote", job: "SiteJob", address: str, token: str, asked: AsSite, observer: Observer) -> Callable[[], int]:
    """Asks to be taken in and puts everything where the site's ranks find it; what is returned trains until the run is over.

    The connection to the coordinator is not needed by then.
    """
    from atoll.fabric.security.certificates import check_name
    from atoll.runtime.modes.islands.joining import SiteAsk, ask_to_join, with_joined

    site = check_name(asked.site)
    count = asked.samples if asked.samples is not None else min(one.stop - one.start for one in job.spec.sites)
    if count < asked.devices:
        raise JobError(f"--devices {asked.devices}: {plural(count, 'sample')} of a batch cannot be shared by so many; give more --samples")
    directory = (asked.out or Path(f"{site}-site")).resolve()
    _check_directory(directory, job.spec)
    print(f"Asking to take part as {site} with {plural(count, 'sample')} of every batch", flush=True)

    def waiting() -> None:
        print("Waiting for the end of the round that is under way", flush=True)

    joined = ask_to_join(coordinator, SiteAsk(site, count), waiting)
    spec = with_joined(job.spec, joined)
    own, whole = spec.site(site), spec.batch_size + sum(one.samples for one in joined)
    print(
        f"{site} takes part from step {own.base + 1} on, where a global batch has {whole} samples: {site}'s are the {own.stop - own.start}"
        f" from number {own.start + 1} on. What concerns it is in {directory}. Ctrl-C leaves",
        flush=True,
    )
    _write(directory, job, spec, site, asked.script)
    return lambda: _train(directory, address, token, asked, observer)


def _check_directory(directory: Path, spec: "IslandsSpec") -> None:
    """New, or of this site of this run before."""
    from atoll.runtime.modes.islands.spec import read_islands
    from atoll.runtime.run_directory import RunDirectory

    if not (directory / "islands.json").exists():
        RunDirectory(directory).check_new()
    elif read_islands(directory).fingerprint != spec.fingerprint:
        raise JobError(f"{directory}: is of another run; give another directory with --out")


def _write(directory: Path, job: "SiteJob", spec: "IslandsSpec", site: str, script: Path | None) -> None:
    from atoll.plan.modes.lockstep import LOCKSTEP
    from atoll.runtime.modes.islands.joining import script_of
    from atoll.runtime.modes.islands.spec import directory_of_site, write_islands
    from atoll.runtime.modes.swarm.spec import keep_start
    from atoll.runtime.run_directory import RunDirectory, RunSettings

    run = RunDirectory(directory)
    with run.must_take():
        directory.mkdir(parents=True, exist_ok=True)
        path = script_of(job, directory, script)
    settings = RunSettings(script=str(path), arguments=job.arguments, mode=LOCKSTEP.name, checkpoint_every=job.checkpoint_every, options={})
    run.write_settings(settings)
    write_islands(run, spec)
    keep_start(run, job.start)
    EventLog(directory, resume=True).close()  # its steps are in the site's own
    own = directory_of_site(run, site, False)
    with own.must_take():
        own.path.mkdir(parents=True, exist_ok=True)
    own.write_settings(settings)
    own.forget("plan.json")  # made anew, of as many devices as were asked for now


def _train(directory: Path, address: str, token: str, asked: AsSite, observer: Observer) -> int:
    from atoll.runtime.modes.lockstep.supervisor import launch
    from atoll.runtime.modes.swarm.supervisor import TOKEN
    from atoll.runtime.run_directory import run_lock

    mark = secrets.token_hex(3)  # a name belongs to one member at a time

    def command(rank: int, generation: int) -> Sequence[str]:
        name = f"{asked.site}-{mark}-{generation}"
        return [sys.executable, "-m", "atoll.cli.island_process", "rank", str(directory), address, asked.site, name]

    threads = max(1, (os.cpu_count() or 1) // asked.devices)
    environ = {TOKEN: token.strip(), "OMP_NUM_THREADS": str(threads)}
    with run_lock(directory):
        result = launch(
            command, asked.devices, observer=observer, max_restarts=asked.max_restarts, environ=environ, terminal_for_rank_0=False
        )
    if result.failure is not None:
        print(f"error: {result.failure.sentence}", file=sys.stderr, flush=True)
    return result.exit_code
