"""Hosts: how a process is started somewhere, signalled there, and made sure to end with the process that started it.

`ThisMachine` is here, `InLab` another host of the lab this process is in. Both are children of this process, in sessions of their own, and
the kernel kills them when it dies, however that happens. `ssh.py` has hosts that are reached over ssh.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, ClassVar, Protocol, TextIO

import msgspec

from atoll.errors import AtollError, LabError
from atoll.runtime.supervise.fork_server import ForkServer
from atoll.runtime.supervise.lab_request import namespaces_of

__all__ = [
    "ProcessHost",
    "InLab",
    "LabView",
    "LineSource",
    "Lines",
    "StartedProcess",
    "ProcessSpec",
    "OutputSource",
    "ThisMachine",
    "find_lab",
    "exit_in_words",
    "tied",
]

# Run by each new process before it becomes what was asked for: the kernel kills it when its parent dies. A program of its own because
# running Python between fork and exec is not safe beside threads.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"atoll: cannot start {sys.argv[2]}: {error.strerror}")
"""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run: what it is called, what it does there, and what it is started with."""

    name: str  # one process at a time has it
    role: str
    command: tuple[str, ...]
    host: "ProcessHost"
    environment: Mapping[str, str] = {}  # on top of what the host's processes have
    defaults: Mapping[str, str] = {}  # where that says nothing
    prefix: str = ""  # of every line that it prints
    terminal: bool = False  # it gets this process's own output instead, where its host allows that


class OutputSource(Protocol):
    """Something processes print into."""

    def fileno(self) -> int:
        """What to wait for."""

    def read(self) -> bool:
        """Pass on what is there; False at the end."""

    def close(self) -> None:
        """Nobody reads it any more."""


class StartedProcess(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """How it ended, as `subprocess` says it; None: it runs. What it left running in its session is killed."""

    def signal(self, number: int) -> None:
        """Sends it a signal, and everybody in its session."""

    def how(self) -> str:
        """In words, how it ended."""


class ProcessHost(Protocol):
    """Where processes are started."""

    @property
    def name(self) -> str:
        """As the cluster file has it; empty: this machine."""

    @property
    def machine(self) -> str:
        """What it shares cores and accelerators with: hosts of a lab are this machine, whose name is empty."""

    @property
    def cores(self) -> int:
        """How many of them its processes may use."""

    @property
    def python(self) -> str:
        """The interpreter that has Atoll there."""

    def start(self, spec: ProcessSpec) -> tuple[StartedProcess, Sequence[OutputSource]]:
        """The process, and where it prints what has to be passed on. AtollError where it cannot be started."""


def exit_in_words(code: int) -> str:
    """How a process ended that ended with this code."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def tied(command: Sequence[str]) -> list[str]:
    """The command for a child of this process that the kernel kills when this process dies."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]


class Lines:
    """What one process prints into one stream, passed on line by line."""

    def __init__(self, prefix: str, into: TextIO) -> None:
        self._prefix, self._into, self._rest = prefix.encode(), into, b""

    def feed(self, chunk: bytes) -> None:
        """Passes on whole lines; an empty chunk is the end."""
        *lines, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if not chunk and self._rest:
            lines, self._rest = [self._rest], b""
        whole = b"".join(self._prefix + line + b"\n" for line in lines if line)
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the run goes on
            self._into.write(whole.decode(errors="replace"))
            self._into.flush()


class LineSource:
    """A pipe that a process prints into."""

    def __init__(self, stream: IO[bytes], prefix: str, into: TextIO) -> None:
        self._stream, self._lines = stream, Lines(prefix, into)
        os.set_blocking(stream.fileno(), False)

    def fileno(self) -> int:
        """Of the pipe."""
        return self._stream.fileno()

    def read(self) -> bool:
        """Pass on what is there; False at the end."""
        try:
            chunk = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self._lines.feed(chunk)
        return bool(chunk)

    def close(self) -> None:
        """Closes the pipe."""
        self._stream.close()


class _Child:
    """A child of this process, the leader of its own session."""

    def __init__(self, process: "subprocess.Popen[bytes]", passes_on: Mapping[int, int]) -> None:
        self._process, self._passes_on = process, passes_on

    def poll(self) -> int | None:
        code = self._process.returncode
        if code is not None or os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return code
        self.signal(signal.SIGKILL)  # before its number can be anybody else's
        return self._process.wait()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, self._passes_on.get(number, number))

    def how(self) -> str:
        return exit_in_words(self._process.returncode)


class ThisMachine:
    """Processes of this machine, with this process's environment. Those that the fork server can make begin with what it has."""

    name = ""
    machine = ""
    python = sys.executable
    _passes_on: ClassVar[Mapping[int, int]] = {}  # what stands for signals that cannot be caught and passed on

    _server: ForkServer | None = None

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server

    @property
    def cores(self) -> int:
        """That this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def start(self, spec: ProcessSpec) -> tuple[StartedProcess, Sequence[OutputSource]]:
        """A child of this process."""
        environment = {**spec.defaults, **os.environ, **spec.environment}
        if self._server is not None and spec.command[:2] == (self.python, "-m") and spec.command[2] in self._server.programs:
            try:
                with self._elsewhere() as (own, namespaces):
                    return _fork(self._server, spec, {**environment, **own}, namespaces)
            except (OSError, EOFError):  # it has said why it ended
                self._server = None
            except LabError:  # it is asked for as any other, and told why not
                pass
        command = tied(self._command(spec.command))
        output = None if spec.terminal else subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise AtollError(f"cannot start {spec.name}: {error.strerror or error}") from error
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        return _Child(process, self._passes_on), [LineSource(stream, spec.prefix, into) for stream, into in streams if stream is not None]

    def _elsewhere(self) -> AbstractContextManager[tuple[Mapping[str, str], Sequence[int]]]:
        """What a forked process needs to be on another host: variables, and namespaces to enter."""
        return nullcontext(({}, ()))

    def _command(self, command: Sequence[str]) -> list[str]:
        return list(command)


def _fork(
    server: ForkServer, spec: ProcessSpec, environment: Mapping[str, str], namespaces: Sequence[int]
) -> tuple[StartedProcess, Sequence[OutputSource]]:
    pipes = [] if spec.terminal else [os.pipe(), os.pipe()]
    outputs = (pipes[0][1], pipes[1][1]) if pipes else (1, 2)
    try:
        process = server.start(spec.name, spec.command[2], spec.command[3:], environment, outputs, namespaces)
    finally:
        for _, end in pipes:
            os.close(end)
    into = (sys.stdout, sys.stderr)
    return process, [LineSource(os.fdopen(end, "rb"), spec.prefix, stream) for (end, _), stream in zip(pipes, into, strict=False)]


class InLab(ThisMachine):
    """Processes of a host of the lab this process is in: a child of this process asks for each, and passes signals on (`atoll/lab`).

    Where the fork server can make it, the process is forked here and moves into that host's network.
    """

    _passes_on: ClassVar = {signal.SIGSTOP: signal.SIGTSTP}

    def __init__(self, name: str, server: ForkServer | None = None) -> None:
        super().__init__(server)
        self.name = name

    def _elsewhere(self) -> AbstractContextManager[tuple[Mapping[str, str], Sequence[int]]]:
        view = find_lab(os.environ)
        assert view is not None
        return namespaces_of(view.socket, self.name)

    def _command(self, command: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "atoll.lab.on_host", self.name, *command]


class LabView(msgspec.Struct, frozen=True, kw_only=True):
    """A lab as seen from one of its processes."""

    name: str
    host: str
    addresses: dict[str, str]
    socket: str

    @property
    def address(self) -> str:
        """Of the host this process is on."""
        return self.addresses[self.host]


def find_lab(environ: Mapping[str, str]) -> LabView | None:
    """The lab this process runs in, if it runs in one."""
    if not environ.get("ATOLL_LAB"):
        return None
    try:
        addresses = dict(pair.split("=", 1) for pair in environ["ATOLL_LAB_HOSTS"].split(",") if pair)
        view = LabView(name=environ["ATOLL_LAB"], host=environ["ATOLL_LAB_HOST"], addresses=addresses, socket=environ["ATOLL_LAB_SOCKET"])
        view.addresses[view.host]
    except (KeyError, ValueError) as error:
        raise LabError(f"environment: ATOLL_LAB is set but {error} is not right; unset ATOLL_LAB outside of labs") from None
    return view
