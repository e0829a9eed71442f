"""`atoll lab FILE -- COMMAND …`: run a command in a cluster made of this machine, with the file's links and with faults."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import say
from atoll.cluster import Cluster, load_cluster
from atoll.errors import LabError
from atoll.events import EventLog, FaultEnded, FaultInjected

if TYPE_CHECKING:
    from atoll.events import AnyEvent
    from atoll.lab import LabFault

__all__ = ["lab"]


def lab(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Argument(help="The cluster file.", metavar="FILE")] = None,
    host: Annotated[str | None, typer.Option(help="Run the command on this host; by default the first.", metavar="NAME")] = None,
    every_host: Annotated[bool, typer.Option("--all", help="Run the command on every host.")] = False,
    every_device: Annotated[bool, typer.Option("--devices", help="Run it for every device, with the ranks torchrun would give.")] = False,
    faults: Annotated[Path | None, typer.Option(help="What goes wrong and when, as TOML.", metavar="FILE")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="One thing that goes wrong: '30s cut rome-0 for 5s'.", metavar="TEXT")] = None,
    impose_speeds: Annotated[bool, typer.Option("--impose-speeds", help="Ranks compute no faster than the file's devices would.")] = False,
    loopback: Annotated[bool, typer.Option("--loopback", help="Do without network namespaces even if they can be had.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the lab's events there.", metavar="DIR")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Only remove what a dead lab left.")] = False,
) -> None:
    """Run a command among the hosts, sites and links of a cluster file, all on this machine. The command follows `--`."""
    if clean:
        _clean()
        return
    command = tuple(context.obj or ())
    if cluster is None or not command:
        raise LabError("give a cluster file and a command: atoll lab cluster.toml -- COMMAND …")
    if every_host + every_device + (host is not None) > 1:
        raise LabError("--host, --all and --devices exclude one another; give one")
    devices = load_cluster(cluster)
    names = [one.name for one in devices.hosts]
    if host is not None and host not in names:
        raise LabError(f"--host {host}: {cluster} has no such host; there are {', '.join(names[:8])}")
    script = _faults(devices, faults, fault or [])
    spread = "devices" if every_device else "hosts" if every_host else "host"
    from atoll.lab import Lab
    from atoll.lab.running import run_in_lab

    namespaces = False if loopback else None
    with ExitStack() as stack:
        observer = _Told(stack.enter_context(EventLog(out)) if out is not None else None)
        running = stack.enter_context(
            Lab(devices, observer=observer, impose_speeds=impose_speeds, namespaces=namespaces, cluster_file=cluster)
        )
        because = "" if running.why_not is None or loopback else f" ({running.why_not})"
        say(f"atoll lab: {running.name}: {running.shaped}{because}")
        running.play(script)
        code: int = run_in_lab(running, command, spread=spread, host=host or names[0])  # type: ignore[arg-type]
        for problem in running.problems:
            say(f"atoll lab: a fault was not possible: {problem}")
        code = code or int(bool(running.problems))
    raise typer.Exit(code)


class _Told:
    """Says when faults begin and end, and logs every event."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log

    def __call__(self, event: "AnyEvent") -> None:
        if isinstance(event, FaultInjected | FaultEnded):
            over = " is over" if isinstance(event, FaultEnded) else ""
            amount = f" {event.amount:g}" if isinstance(event, FaultInjected) and event.amount is not None else ""
            say(f"atoll lab: {event.at_seconds:.1f} s: {event.fault} {' '.join(event.places)}{amount}{over}")
        if self._log is not None:
            self._log(event)


def _faults(cluster: Cluster, file: Path | None, texts: list[str]) -> "tuple[LabFault, ...]":
    from atoll.lab import load_faults, parse_fault

    return (*(load_faults(file, cluster) if file is not None else ()), *(parse_fault(text, cluster) for text in texts))


def _clean() -> None:
    from atoll.lab.world import remove_orphans

    removed = remove_orphans()
    print("\n".join(f"removed {what}" for what in removed) or "nothing is left of dead labs", file=sys.stdout)
