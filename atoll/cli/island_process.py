"""`python -m atoll.cli.island_process ROLE RUN ADDRESS [SITE NAME]`: a process of sites that train together, as `atoll run` starts it.

Not for people.
"""

import os
import sys
from collections.abc import Sequence

from atoll.callbacks import listeners
from atoll.cli.output import show_what_the_terminal_can
from atoll.errors import AtollError
from atoll.events import AnyEvent, Observer, Stalled, Warned
from atoll.runtime.mode import CapturedJob
from atoll.runtime.modes.lockstep.role import find_role, hidden_role
from atoll.runtime.run_directory import RunDirectory
from atoll.watch.describe import describe_event

__all__ = ["main"]

_PATIENCE_SECONDS = 120.0  # the coordinator may just be starting again


def main(arguments: Sequence[str], known: CapturedJob | None = None) -> int:
    """Coordinate, or be a rank of a site, until the run is over.

    `known` is the job where the process this one was forked from has captured it.
    """
    role, run, address, *site = arguments
    try:
        if role == "coordinator":
            return 0 if _coordinate(RunDirectory(run), address, known) else 130
        return _train(RunDirectory(run), address, known, *site)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _coordinate(directory: RunDirectory, address: str, known: CapturedJob | None) -> bool:
    from atoll.fabric.shaped import imposed_links
    from atoll.runtime.modes.islands.coordinator_process import coordinate_rounds
    from atoll.runtime.modes.islands.gradient_coordinator import coordinate_gradients
    from atoll.runtime.modes.islands.spec import read_islands
    from atoll.script import load_job
    from atoll.watch.progress import Progress

    settings = directory.settings()
    job = known.job if known is not None else load_job(settings.script, settings.arguments)
    with Progress() as progress:
        observers: tuple[Observer, ...] = (progress, *listeners(job.callbacks))
        spec, links = read_islands(directory.path), imposed_links(os.environ)
        coordinate = coordinate_gradients if spec.choice.exchange == "gradients" else coordinate_rounds
        return coordinate(directory, spec, job, address, observers=observers, recall=progress.recall, links=links)


def _train(directory: RunDirectory, address: str, known: CapturedJob | None, site: str, name: str, script: str | None = None) -> int:
    from atoll.fabric.security import enrol
    from atoll.fabric.shaped import imposed_links
    from atoll.runtime.modes.islands.gradient_site import train_site_by_gradients
    from atoll.runtime.modes.islands.site_process import train_site
    from atoll.runtime.modes.islands.spec import read_islands
    from atoll.runtime.modes.swarm.supervisor import TOKEN
    from atoll.script import load_job, seen_arguments

    role = find_role(os.environ)
    assert role is not None, "the launcher says which rank this is"
    token, settings = os.environ.pop(TOKEN), directory.settings()

    def show(event: AnyEvent) -> None:
        if isinstance(event, Warned | Stalled):
            print(describe_event(event), flush=True)

    credentials = enrol(address, token, name, patience_seconds=_PATIENCE_SECONDS, observer=show) if role.rank == 0 else None
    with hidden_role(os.environ):
        job = known.job if known is not None else load_job(script or settings.script, settings.arguments)
    spec = read_islands(directory.path)
    by_gradients = spec.choice.exchange == "gradients"
    with seen_arguments(script or settings.script, settings.arguments):
        (train_site_by_gradients if by_gradients else train_site)(
            directory, spec, site, role, job,
            known=known, credentials=credentials, address=address, observer=show, links=imposed_links(os.environ),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    show_what_the_terminal_can()
    sys.exit(main(sys.argv[1:]))
