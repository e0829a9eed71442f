"""What a lab's hosts are made of, and what a dead lab may have left of them. Here the interface and the real one, network namespaces;
`loopback.py` needs no rights.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

import msgspec

from atoll.cluster import Cluster
from atoll.errors import LabError
from atoll.lab.faults import Conditions
from atoll.lab.network import INTERFACE, Command, LabNetwork

__all__ = [
    "LAB_FILES",
    "OWNER",
    "NamespaceWorld",
    "Stream",
    "World",
    "all_processes",
    "inside_command",
    "mark",
    "remove_orphans",
    "why_no_namespaces",
]

Stream: TypeAlias = int | IO[Any] | None
LAB_FILES = "atoll-lab-"
OWNER = "ATOLL_LAB_OWNER"  # in the environment of every process of a lab
_INSIDE = str(Path(__file__).with_name("inside.py"))
_OF_HOST = "user,mnt,net,uts,pid"
_OF_LAB = "user,mnt,net"
_START_SECONDS = 60.0


class World(Protocol):
    """Hosts with addresses, on which processes can be started, and between which conditions can change."""

    interface: str
    files: Path  # a directory of the lab's own, as this process sees it
    files_inside: str  # and as its hosts see it

    @property
    def shaped(self) -> str:
        """What of the cluster is imposed, in a sentence."""

    def address(self, host: str) -> str:
        """A host's address."""

    def extra(self, host: str) -> dict[str, str]:
        """What a host's processes find in their environment because of this world."""

    def wrapped(self, host: str, command: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """What runs a command on a host so that it does not outlive the lab, and the files that has to inherit."""

    def namespaces(self, host: str) -> Sequence[str]:
        """Files of the network and the name that a process of the lab enters to be on another host; LabError where that is dead."""

    def change(self, before: Conditions, after: Conditions) -> None:
        """Other conditions from now on; LabError where this world has no such thing."""

    def processes(self, host: str) -> list[int]:
        """Everything that runs on a host."""

    def kill(self, host: str) -> None:
        """Ends everything that runs on a host."""

    def boot(self, host: str) -> None:
        """A killed host is there again."""

    def close(self) -> None:
        """Ends everything and leaves nothing."""


def why_no_namespaces() -> str | None:
    """Why this machine, or this user, cannot have a lab of namespaces; None: it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    for tool in ("ip", "tc"):
        if not any(os.access(os.path.join(folder, tool), os.X_OK) for folder in _path().split(os.pathsep)):
            return f"`{tool}` is not installed (package iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    try:
        holder = _Inside("hold")
    except LabError as error:
        return str(error)
    holder.close()
    return None


def _path() -> str:
    """`ip` and `tc` are in /usr/sbin, which is not on everybody's path."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))


class _Inside:
    """A process of `inside.py` (or another that ends with its standard input), which keeps something alive as long as it lives."""

    def __init__(self, *arguments: str, command: Sequence[str] | None = None) -> None:
        self.process = subprocess.Popen(
            command or inside_command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
            env={**os.environ, "PATH": _path(), OWNER: mark(os.getpid())},
        )
        try:
            self.first = self.line()
        except BaseException:
            self.close()
            raise

    def line(self) -> str:
        """The next line it says; LabError with its complaint if it ends instead."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            self.process.wait()
            complaint = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            raise LabError(complaint[-1] if complaint else "it ended at once")
        return line.decode().strip()

    def expect_ready(self) -> None:
        """Waits until it says so."""
        said = self.line()
        assert said == "ready", said

    def ask(self, line: bytes) -> str:
        """Says a line and hears one."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise LabError(f"the lab's forwarder has ended: {error.strerror}") from None
        return self.line()

    def close(self) -> None:
        """Ends it."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def inside_command(*arguments: str) -> list[str]:
    """That runs `inside.py`."""
    return [sys.executable, "-I", "-S", _INSIDE, *arguments]


class _HostSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What `inside.py host` is told."""

    lab: str
    holder: int
    network: str
    name: str
    files: dict[str, str]
    settings: dict[str, str]


class NamespaceWorld:
    """Network namespaces with shaped interfaces, a bridge a site and a forwarder between sites."""

    interface = INTERFACE
    files_inside = "/run/netns/lab"

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.network, self._name = LabNetwork(cluster), name
        self._hosts: dict[str, _Inside] = {}
        self._forwarder: _Inside | None = None
        self._holder = _Inside("hold", name)
        self.files = Path(f"/proc/{self._holder.first}/root{self.files_inside}")
        try:
            self._build(cluster)
        except BaseException:
            self.close()
            raise

    def _build(self, cluster: Cluster) -> None:
        self._do(self.network.build())
        forwarder = [sys.executable, "-m", "atoll.lab.forwarder", *self.network.site_networks]
        self._forwarder = _Inside(command=inside_command("enter", self._holder.first, _OF_LAB, *forwarder))
        self.priority = self._forwarder.first.removeprefix("ready ")
        self._do(self.network.connect_sites())
        self._tell_forwarder(Conditions())
        for host in cluster.hosts:  # all at once, then wait for each
            self._hosts[host.name] = self._begin(host.name)
        for host in cluster.hosts:
            self._hosts[host.name].expect_ready()

    @property
    def shaped(self) -> str:
        """What is imposed."""
        return (
            "network namespaces: every host's interface and every link between sites has the file's bandwidth, links between sites "
            f"their latency (forwarder's priority: {self.priority}); links inside a host are not imposed"
        )

    @property
    def forwarder_pid(self) -> int:
        """The forwarder's process, for whoever wants to know what it costs."""
        assert self._forwarder is not None
        return _only_child(self._forwarder.process.pid)

    def address(self, host: str) -> str:
        """A host's address."""
        return self.network.address(host)

    def extra(self, host: str) -> dict[str, str]:
        """Nothing."""
        return {}

    def boot(self, host: str) -> None:
        """Gives a host its first process; what a killed one had is gone."""
        self._hosts[host] = self._begin(host)
        self._hosts[host].expect_ready()

    def _begin(self, host: str) -> "_Inside":
        setup = _HostSetup(
            lab=self._name,
            holder=int(self._holder.first),
            network=self.network.host_network(host),
            name=host,
            files={"/etc/hosts": self.network.hosts_file(host), "/etc/resolv.conf": "", "/etc/hostname": f"{host}\n"},
            settings=self.network.host_settings(),
        )
        return _Inside("host", msgspec.json.encode(setup).decode())

    def wrapped(self, host: str, command: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """Among the host's processes."""
        return inside_command("enter", self._first(host), _OF_HOST, *command), ()

    def namespaces(self, host: str) -> Sequence[str]:
        """Only what others see of a host: a process cannot leave its own PID namespace, nor `/proc`, which shows that."""
        return [f"/proc/{self._first(host)}/ns/{name}" for name in ("net", "uts")]

    def _first(self, host: str) -> str:
        if host not in self._hosts:
            raise LabError(f"{host} is dead; restore it first")
        return self._hosts[host].first

    def change(self, before: Conditions, after: Conditions) -> None:
        """Interfaces, ports, routes; then the forwarder."""
        self._do(self.network.change(before, after))
        self._tell_forwarder(after)

    def processes(self, host: str) -> list[int]:
        """All of its PID namespace but the first, and those of other hosts' that have moved into its network; not those that left it."""
        if host not in self._hosts:
            return []
        firsts = {int(inside.first): name for name, inside in self._hosts.items()}
        spaces = {_namespace(first, "pid"): name for first, name in firsts.items()}
        networks = {_namespace(first, "net"): name for first, name in firsts.items()}
        spaces.pop("", None)
        born = {pid: spaces[space] for pid in all_processes() if pid not in firsts and (space := _namespace(pid, "pid")) in spaces}
        return [pid for pid, place in born.items() if networks.get(_namespace(pid, "net"), place) == host]

    def kill(self, host: str) -> None:
        """The kernel ends all processes of a PID namespace with its first."""
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        inside = self._hosts.pop(host, None)
        if inside is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(inside.first), signal.SIGKILL)
            inside.close()

    def close(self) -> None:
        """Hosts first, so that they do not see the network go."""
        for host in list(self._hosts):
            self.kill(host)
        for inside in (self._forwarder, self._holder):
            if inside is not None:
                inside.close()

    def _tell_forwarder(self, conditions: Conditions) -> None:
        assert self._forwarder is not None
        self._forwarder.ask(msgspec.json.encode(self.network.forwarder_state(conditions)))

    def _do(self, commands: Sequence[Command]) -> None:
        """Runs commands in the lab's own namespaces, until one fails."""
        if not commands:
            return
        lines = [
            f"{shlex.join(command)} || {{ echo {shlex.quote('failed: ' + shlex.join(command))} >&2; exit 1; }}" for command in commands
        ]
        result = subprocess.run(
            inside_command("enter", self._holder.first, _OF_LAB, "sh", "-s"),
            input="\n".join(lines).encode(),
            capture_output=True,
            env={**os.environ, "PATH": _path()},
            timeout=_START_SECONDS + len(commands),
        )
        if result.returncode:
            raise LabError(f"the lab's network cannot be built: {' '.join(result.stderr.decode(errors='replace').split())}")


def all_processes() -> list[int]:
    """Of this PID namespace and those in it."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _namespace(pid: int, kind: str) -> str:
    """Empty where it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def mark(pid: int) -> str:
    """A process of this boot and PID namespace, by which it can be told whether it still lives: `1234.98765.4026531836`."""
    return f"{pid}.{_started(pid)}.{os.stat('/proc/self/ns/pid').st_ino}"


def remove_orphans() -> list[str]:
    """Removes what labs left that died without a chance to tidy up; says what that was.

    Normally there is nothing: a lab's processes see it end and end with it. But one of them may have been stopped just then, or another
    program may hold the pipe. Only what this user may touch is looked at.
    """
    if not os.path.isdir("/proc/self/ns"):
        return []
    removed = []
    for pid in all_processes():
        if (owner := _owner(pid)) and _dead(owner):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                removed.append(f"process {pid}")
    for folder in Path(tempfile.gettempdir()).glob(f"{LAB_FILES}*"):
        if _dead(folder.name.removeprefix(LAB_FILES).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


def _owner(pid: int) -> str | None:
    """The mark of the lab a process belongs to."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{OWNER}=".encode()
    return next((entry.removeprefix(prefix).decode(errors="replace") for entry in environ if entry.startswith(prefix)), None)


def _dead(owner: str) -> bool:
    """Whether that process has ended. Marks of other PID namespaces cannot be judged from here."""
    pid, _, rest = owner.partition(".")
    started, _, namespace = rest.partition(".")
    if not pid.isdigit() or namespace != str(os.stat("/proc/self/ns/pid").st_ino):
        return False
    return _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
