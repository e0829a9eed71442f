"""`atoll standby RUN --listen HOST:PORT`: coordinate a swarm when nobody else does."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.callbacks import listeners
from atoll.errors import JobError
from atoll.plan.modes.swarm import SWARM, SwarmOptions
from atoll.runtime.run_directory import RunDirectory

__all__ = ["standby"]


def standby(
    run: Annotated[Path, typer.Argument(help="A copy of the run's directory, made after the run was started.", metavar="RUN")],
    listen: Annotated[str, typer.Option(help="Where to listen when coordinating: one of the run's --standby.", metavar="HOST:PORT")],
) -> None:
    """Stand by for a swarm whose journal is on NATS, and coordinate it when its coordinator is gone.

    The directory holds the run's authority, with which members are admitted: keep the copy as safe as the original.
    """
    directory = RunDirectory(run)
    settings = directory.settings()
    if settings.mode != SWARM.name or settings.options_as(SwarmOptions).nats is None:
        raise JobError(f"{run}: nothing to stand by for; start the run with `atoll run … --mode swarm --nats URL --standby {listen}`")
    from atoll.runtime.modes.swarm.coordinator_process import coordinate  # PyTorch takes seconds to load: mistakes above are told before
    from atoll.runtime.modes.swarm.spec import load_spec_job, read_spec
    from atoll.watch.progress import Progress

    spec = read_spec(directory.path)
    job = load_spec_job(spec)
    with Progress() as progress:
        coordinate(directory, spec, job, listen, observers=(progress, *listeners(job.callbacks)), recall=progress.recall)
