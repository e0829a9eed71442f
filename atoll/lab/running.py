"""Commands on hosts of a lab, looked after until the last has ended: one at the terminal, or all with the host's name before each line."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Literal, TypeAlias

from atoll.lab.environment import device_environments
from atoll.lab.lab import Lab, LabProcess
from atoll.runtime.supervise.hosts import LineSource, OutputSource, ProcessSpec, StartedProcess, ThisMachine
from atoll.runtime.supervise.supervisor import INTERRUPTED, Supervisor

__all__ = ["Spread", "run_in_lab"]

Spread: TypeAlias = Literal["host", "hosts", "devices"]


def run_in_lab(lab: Lab, command: Sequence[str], *, spread: Spread, host: str) -> int:
    """Runs a command on one host, on every host, or once for every device of every host; returns the exit code.

    That is 0 if all ended well, else the first failure's. Who was killed by a fault together with its host has not failed. The first Ctrl-C
    or SIGTERM is passed on to the commands; the second ends everything.
    """
    commands = _Commands(lab, tuple(command), spread)
    try:
        with commands.supervisor.obeying_signals():
            for name in [host] if spread == "host" else lab.hosts:
                commands.start(name)
            if spread != "host":
                lab.booted = commands.booted.put
            commands.supervisor.run(commands)
    finally:
        lab.booted = None
        commands.supervisor.end()
    return commands.code()


class _Commands:
    """The processes, and what their ends mean: a supervisor's policy."""

    def __init__(self, lab: Lab, command: tuple[str, ...], spread: Spread) -> None:
        self.supervisor = Supervisor()
        self.booted: SimpleQueue[str] = SimpleQueue()  # hosts that are there again, told by another thread
        self._lab, self._command, self._spread = lab, command, spread
        self._terminal = spread == "host" and sys.stdin is not None and sys.stdin.isatty()
        self._processes: dict[str, LabProcess] = {}
        self._codes: list[int] = []  # of those that failed

    def start(self, host: str) -> None:
        """What a host has to run."""
        environments = device_environments(self._lab.cluster, host) if self._spread == "devices" else [{}]
        for number, environ in enumerate(environments):
            name = f"{host}/{number}" if self._spread == "devices" else host
            spec = ProcessSpec(
                name=f"{name} {len(self._processes)}",
                role=self._spread,
                command=self._command,
                host=_LabHost(self._lab, host, self._processes),
                environment=environ,
                prefix=f"[{name}] ",
                terminal=self._terminal,
            )
            self.supervisor.start(spec)

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """Those that died with their host have not failed; if it was the only one, nothing is left that could have ended well."""
        if code and (self._spread == "host" or not self._processes[spec.name].host_killed):
            self._codes.append(code)

    def asked_to_stop(self, number: int) -> None:
        """Passes it on. At a terminal Ctrl-C reaches the command by itself."""
        if number != signal.SIGINT or not self._terminal:
            self.supervisor.signal(number)

    def look(self, now: float) -> None:
        """Starts what restored hosts have to run; the end is when nobody runs or will."""
        reviving = self._lab.reviving
        while not self.booted.empty():
            self.start(self.booted.get())
        if not self.supervisor.running and not reviving:
            self.supervisor.finish()

    def code(self) -> int:
        """Of the first that failed."""
        code = self._codes[0] if self._codes else INTERRUPTED if self.supervisor.killed else 0
        return 128 - code if code < 0 else code


class _LabHost(ThisMachine):
    """A host of a lab of this very process. With the terminal, its command also reads from it, and is in its session."""

    def __init__(self, lab: Lab, name: str, processes: dict[str, LabProcess]) -> None:
        self.name, self._lab, self._processes = name, lab, processes

    def start(self, spec: ProcessSpec) -> tuple[StartedProcess, Sequence[OutputSource]]:
        if spec.role == "host":
            process = self._lab.start(self.name, spec.command, stdin=None, session=not spec.terminal)
        else:
            piped = subprocess.PIPE
            process = self._lab.start(self.name, spec.command, environ=spec.environment, stdout=piped, stderr=piped)
        self._processes[spec.name] = process
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        return process, [LineSource(stream, spec.prefix, into) for stream, into in streams if stream is not None]
