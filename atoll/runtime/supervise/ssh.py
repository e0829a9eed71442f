"""Hosts that are reached over ssh: the system's own `ssh` with the user's own configuration, one connection a host.

At its far end an agent (`agent.py`) starts processes, passes on what they print and kills them when the connection ends, however it ends.
Everything that can go wrong is one sentence that names the host. `ATOLL_SSH` replaces the command `ssh`, as `GIT_SSH_COMMAND` does for git.
"""

import contextlib
import json
import os
import re
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from atoll.cluster.cluster import Host as ClusterHost
from atoll.errors import AtollError
from atoll.runtime.supervise.hosts import Lines, OutputSource, ProcessSpec, StartedProcess, exit_in_words, tied

__all__ = ["SSH", "OverSsh", "ssh_command"]

SSH = "ATOLL_SSH"  # in the environment: the command to use instead of `ssh`
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"),
    *("-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes", "-o", "EscapeChar=none", "-o", "LogLevel=ERROR"),
)
_HELLO_SECONDS = 60.0  # for the agent to answer once ssh has begun to connect
_LOST = 255  # ssh's own exit code where the connection did not last
_NOT_FOUND = (126, 127)  # a shell's, where there is no such program
_AGENT = Path(__file__).with_name("agent.py")
# Reads the agent's text from its first line. Without quotes that a shell might see otherwise; unbuffered, since the agent reads on.
_BOOT = 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))'

_SENTENCES = (  # what ssh says, and what that means
    (r"^atoll: cannot start", "there is no program ssh on this machine; install an ssh client (or set ATOLL_SSH)"),
    (r"Could not resolve hostname", "its address {address} is not known; check `address` in the cluster file"),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED|No .* host key is known",
        "ssh does not trust its host key; connect once by hand (`{ssh}`) and check the fingerprint",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "permission denied; ssh must log in without a password: check `user`, and that `{ssh}` works without asking",
    ),
    (r"Connection refused", "the connection is refused; is an ssh server running there?"),
    (r"No route to host|Network is unreachable", "there is no route to {address}; is it on, and on this network?"),
    (r"timed out|Timeout", "{address} does not answer; is it on, and reachable from here?"),
)


def ssh_command(host: ClusterHost, environ: Mapping[str, str]) -> list[str]:
    """What reaches a host; a command may follow."""
    user = ["-l", host.user] if host.user else []
    return [*shlex.split(environ.get(SSH) or "ssh"), *_OPTIONS, *user, host.address]


class HostFacts(NamedTuple):
    """What the agent says of its host."""

    python: str
    cores: int
    client_address: str  # this machine's, as it is seen from there; empty where sshd does not say


class OverSsh:
    """Processes of a host that is reached over ssh. The connection is there while it has any, and as long as it is held."""

    def __init__(self, host: ClusterHost, environ: Mapping[str, str], directory: str) -> None:
        self.name = self.machine = host.name
        self.host, self.directory = host, directory  # where its processes are started
        self.ssh = ssh_command(host, environ)
        self._channel: _Channel | None = None

    @cached_property
    def facts(self) -> HostFacts:
        """What its agent said first. AtollError where it cannot be reached."""
        return self.connect().facts

    @property
    def python(self) -> str:
        """Its interpreter."""
        return self.facts.python

    @property
    def cores(self) -> int:
        """That its processes may use."""
        return self.facts.cores

    def start(self, spec: ProcessSpec) -> tuple[StartedProcess, Sequence[OutputSource]]:
        """Asks the agent for it."""
        channel = self.connect()
        lines = {"out": Lines(spec.prefix, sys.stdout), "err": Lines(spec.prefix, sys.stderr)}
        return channel.start(spec.command, spec.environment, spec.defaults, self.directory, lines), [channel]

    def ask(self, program: str, *arguments: str, directory: str = "~") -> str:
        """What a small program prints there, run by its Python. AtollError where it fails."""
        channel = self.connect()
        printed, complaint = _Kept(), _Kept()
        process = channel.start(("", "-c", program, *arguments), {}, {}, directory, {"out": printed, "err": complaint})
        channel.wait(process)
        if process.poll() != 0:
            last = complaint.text().strip().splitlines()[-1:] or [process.how()]
            raise AtollError(f"host {self.name!r}: {last[0]}")
        return printed.text()

    def connect(self) -> "_Channel":
        """The connection; where there is none it is begun, and may turn out later not to succeed."""
        if self._channel is None or self._channel.closed:
            self._channel = _Channel(self.host, self.ssh)
        return self._channel

    def close(self) -> None:
        """Ends the connection, and everything there with it."""
        if self._channel is not None:
            self._channel.close()


class _Kept(Lines):
    """What a program prints, kept."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, chunk: bytes) -> None:
        self._data += chunk

    def text(self) -> str:
        return self._data.decode(errors="replace")


class _Far:
    """A process at the far end."""

    def __init__(self, channel: "_Channel", number: int, lines: Mapping[str, Lines]) -> None:
        self.number, self.lines = number, lines
        self.code: int | None = None
        self.why = ""  # it ended so, where a code does not say it
        self._channel = channel

    def poll(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        if self.code is None:
            self._channel.send(id=self.number, signal=number)

    def how(self) -> str:
        return self.why or exit_in_words(self.code or 0)


class _Channel:
    """An ssh connection with an agent at its far end."""

    def __init__(self, host: ClusterHost, ssh: Sequence[str]) -> None:
        self.host, self.closed = host, False
        self._python = host.python or sys.executable
        self._mark = secrets.token_hex(8)
        self._rest, self._processes, self._count = b"", dict[int, _Far](), 0
        far = f"exec {_quoted(self._python)} -I -S -c {shlex.quote(_BOOT)} {self._mark}"
        piped = subprocess.PIPE
        self._process = subprocess.Popen(tied([*ssh, far]), stdin=piped, stdout=piped, stderr=piped, start_new_session=True, bufsize=0)
        self._send_line(_AGENT.read_text("utf-8"))

    def fileno(self) -> int:
        """Of what arrives."""
        return self._out.fileno()

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        defaults: Mapping[str, str],
        directory: str,
        lines: Mapping[str, Lines],
    ) -> _Far:
        """A process there; it may turn out later that it could not be started."""
        assert self.facts
        self._count += 1
        process = self._processes[self._count] = _Far(self, self._count, lines)
        self.send(start=self._count, command=list(command), environment=dict(environment), defaults=dict(defaults), directory=directory)
        return process

    def wait(self, process: _Far) -> None:
        """Until it has ended."""
        while process.poll() is None:
            if not self.read():
                return

    def read(self) -> bool:
        """Pass on what has arrived; False when the connection has ended, or nothing runs there any more."""
        chunk = os.read(self.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if not chunk:
            self._lost()
        return bool(chunk) and bool(self._processes)

    def close(self) -> None:
        """Ends the connection, and everything there with it."""
        if self.closed:
            return
        self.closed = True
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
            return
        self._process.kill()
        self._process.wait()

    def send(self, **message: Any) -> None:
        """To the agent; that it does not arrive is seen when the connection ends."""
        self._send_line(message)

    def _send_line(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _take(self, message: dict[str, Any]) -> None:
        if "tick" in message:
            self.send(tock=True)
            return
        process = self._processes.get(message.get("id", 0))
        if process is None:
            return
        if "data" in message:
            process.lines[message["stream"]].feed(message["data"].encode("latin-1"))
            return
        for lines in process.lines.values():
            lines.feed(b"")
        del self._processes[process.number]
        process.code = message.get("code", _NOT_FOUND[1])
        if "failed" in message:
            process.why = f"cannot be started on {self.host.name}: {message['path']}: {message['failed']}"

    def _lost(self) -> None:
        """The connection ended with everything there."""
        why = self._complaint()
        for process in self._processes.values():
            process.code, process.why = _LOST, f"the ssh connection to {self.host.name} was lost{': ' if why else ''}{why}"
        self._processes.clear()

    def _complaint(self) -> str:
        """The last that ssh said."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = self._process.stderr.read() or b""
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    @cached_property
    def facts(self) -> HostFacts:
        """What the agent said first; what a shell's own files print before it is passed over. AtollError where there is none."""
        until = time.monotonic() + _HELLO_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                chunk = os.read(self.fileno(), 1 << 16)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for number, line in enumerate(lines):
                    if self._mark.encode() in line:
                        self._rest = b"\n".join([*lines[number + 1 :], self._rest])
                        hello = json.loads(line)
                        return HostFacts(hello["python"], hello["cores"], hello["connection"].partition(" ")[0])
                if not chunk:
                    break
        raise AtollError(f"host {self.host.name!r}: {self._why_not()}")

    def _why_not(self) -> str:
        """Why nobody answers there."""
        assert self._process.stderr is not None
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.close()
            return f"no answer within {_HELLO_SECONDS:g} s, though ssh has connected; what does `{self._by_hand()}` do?"
        said = self._process.stderr.read().decode(errors="replace")
        self.close()
        if code in _NOT_FOUND:
            return f"there is no Python at {self._python}; set `python` in the cluster file to the interpreter with Atoll there"
        for pattern, sentence in _SENTENCES:
            if re.search(pattern, said):
                return sentence.format(address=self.host.address, ssh=self._by_hand())
        last = [line for line in said.splitlines() if line.strip()][-1:] or [f"exit code {code}"]
        return f"ssh fails: {last[0].strip()}; what does `{self._by_hand()}` say?"

    def _by_hand(self) -> str:
        """The command a person would type."""
        return f"ssh {self.host.user + '@' if self.host.user else ''}{self.host.address}"


def _quoted(python: str) -> str:
    """For a shell, which still knows whose home `~/` is."""
    return f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
