"""`python -m atoll.cli.worker RUN [SCRIPT]`: one rank of a run, as `atoll run` starts it for every device. Not for people."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from atoll.callbacks import Callback
from atoll.cli.output import show_what_the_terminal_can
from atoll.errors import AtollError
from atoll.runtime.mode import CapturedJob
from atoll.runtime.modes.lockstep.role import Role, find_role, hidden_role
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.watch.progress import Progress

if TYPE_CHECKING:
    from atoll.job import Job

__all__ = ["main"]


def main(arguments: Sequence[str], known: CapturedJob | None = None) -> int:
    """Run the rank that the launcher named in the environment; the run's directory says the rest, but where this host has the script.

    `known` is the job where the process this one was forked from has captured it.
    """
    role = find_role(os.environ)
    assert role is not None, "the launcher says which rank this is"
    try:
        return _run(RunDirectory(arguments[0]), role, known, *arguments[1:])
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _run(directory: RunDirectory, role: Role, known: CapturedJob | None, script: str | None = None) -> int:
    from atoll.runtime.modes.lockstep.worker import RankTraining, training_rank  # PyTorch takes seconds to load: mistakes are told before
    from atoll.runtime.training import train
    from atoll.script import execute, load_job, seen_arguments

    settings = directory.settings()
    settings = settings if script is None else msgspec.structs.replace(settings, script=script)
    if settings.trial_seconds is not None:
        return _try(directory, role, known, settings)
    with Progress() as progress:

        def opened(job: "Job", own_loop: bool) -> AbstractContextManager[RankTraining]:
            observers: list[Callback] = [progress, *job.callbacks] if role.rank == 0 else []
            return training_rank(
                job,
                directory.plan(),
                role,
                directory=directory,
                settings=settings,
                observers=observers,
                own=progress,
                notes_shown=True,
                known=known,
            )

        if settings.own_loop:
            execute(settings.script, settings.arguments, opened)
            return 0
        with hidden_role(os.environ):
            job = known.job if known is not None else load_job(settings.script, settings.arguments)
        with seen_arguments(settings.script, settings.arguments), opened(job, False) as training:
            train(training)
    return 0


def _try(directory: RunDirectory, role: Role, known: CapturedJob | None, settings: RunSettings) -> int:
    """The rank of a trial, of which nobody sees anything."""
    from atoll.runtime.modes.lockstep.trial import job_to_try, silenced, try_steps
    from atoll.runtime.modes.lockstep.worker import training_rank
    from atoll.script import load_job, seen_arguments

    silenced()
    assert settings.trial_seconds is not None
    with hidden_role(os.environ):
        job = job_to_try(known.job if known is not None else load_job(settings.script, settings.arguments))
    if known is not None:
        known = CapturedJob(job, known.captured, {})
    with (
        seen_arguments(settings.script, settings.arguments),
        training_rank(
            job, directory.plan(), role, directory=directory, settings=settings, observers=(), notes_shown=True, known=known
        ) as training,
    ):
        try_steps(training, settings.trial_seconds, is_first=role.rank == 0)
    return 0


if __name__ == "__main__":
    show_what_the_terminal_can()
    sys.exit(main(sys.argv[1:]))
