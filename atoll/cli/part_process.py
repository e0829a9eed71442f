"""`python -m atoll.cli.part_process RUN ADDRESS NAME`: the process of a part, as `atoll run` starts it. Not for people."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.output import show_what_the_terminal_can
from atoll.errors import AtollError

__all__ = ["main"]

_PATIENCE_SECONDS = 60.0


def main(arguments: Sequence[str]) -> int:
    """Compute a part until the run is over."""
    source, address, name = arguments
    try:
        _compute(Path(source), address, name)
    except KeyboardInterrupt:
        return 130
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _compute(source: Path, address: str, name: str) -> None:
    """`source` is the run's directory, or the script on a host that does not see it."""
    from atoll.blame import showing_lines
    from atoll.collaboration import Collaboration
    from atoll.fabric.security import RunMember, enrol
    from atoll.fabric.shaped import imposed_links
    from atoll.runtime.modes.parts.hub import PartsHub
    from atoll.runtime.modes.parts.messages import HubQuestion
    from atoll.runtime.modes.parts.part_process import run_part
    from atoll.runtime.modes.parts.supervisor import TOKEN
    from atoll.runtime.run_directory import RunDirectory
    from atoll.script import load_job

    credentials = enrol(address, os.environ.pop(TOKEN), name, patience_seconds=_PATIENCE_SECONDS)
    with RunMember(credentials) as member:
        hub = member.join(address)
        spec = hub.call_sync(PartsHub.describe, HubQuestion(), timeout_seconds=_PATIENCE_SECONDS)
    script, run = (source, Path(spec.directory)) if source.is_file() else (Path(RunDirectory(source).settings().script), source)
    with showing_lines():
        job = load_job(script, spec.arguments)
        assert isinstance(job, Collaboration)
        run_part(credentials, address, spec, job, run, imposed_links(os.environ))


if __name__ == "__main__":
    show_what_the_terminal_can()
    sys.exit(main(sys.argv[1:]))
