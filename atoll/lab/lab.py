"""Lab: the hosts, sites and links of a cluster on this machine, processes on them, and faults.

```python
with Lab(cluster) as lab:
    server = lab.start("rome-0", ["python", "serve.py"])
    client = lab.start("oslo-0", ["python", "train.py"])
    lab.slow(("oslo", "rome"), 10)
    lab.cut("rome-0")
    lab.restore()
```
"""

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.cluster import Cluster, dump_cluster
from atoll.cluster.cluster import site_index
from atoll.errors import AtollError, LabError
from atoll.events import FaultEnded, FaultInjected, Observer
from atoll.lab.environment import PER_HOST, host_environment
from atoll.lab.faults import Conditions, LabFault, check_fault
from atoll.lab.loopback import LoopbackWorld
from atoll.lab.remote import RemoteServer
from atoll.lab.world import OWNER, NamespaceWorld, Stream, World, mark, remove_orphans, why_no_namespaces
from atoll.runtime.supervise.hosts import LabView, exit_in_words
from atoll.runtime.supervise.lab_request import Request

__all__ = ["Lab", "LabProcess", "Place"]

Place = str | tuple[str, str]
_ROLE_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class LabProcess:
    """A process on a host of a lab."""

    def __init__(self, host: str, process: "subprocess.Popen[bytes]", session: bool) -> None:
        self.host, self._process, self._session = host, process, session
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr  # those that are pipes
        self.host_killed = False  # a fault ended it, and everything on its host

    @property
    def returncode(self) -> int | None:
        """How it ended, as `subprocess` says it; None: it runs."""
        return self._process.poll()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits for its end; `subprocess.TimeoutExpired` if that takes longer."""
        return self._process.wait(timeout_seconds)

    def communicate(self, timeout_seconds: float | None = None) -> tuple[bytes, bytes]:
        """All it prints and complains, once it has ended."""
        out, complaints = self._process.communicate(timeout=timeout_seconds)
        return out or b"", complaints or b""

    def poll(self) -> int | None:
        """As `returncode`: what a supervisor asks."""
        return self.returncode

    def how(self) -> str:
        """In words, how it ended."""
        return exit_in_words(self.returncode or 0)

    def signal(self, number: int) -> None:
        """Sends it a signal; to its whole process group if it is one that nobody can catch and pass on, or that ends such a stop."""
        with contextlib.suppress(ProcessLookupError):
            if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT) and self._session and self._process.poll() is None:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it, and what is in its process group."""
        self.signal(signal.SIGKILL)


class Lab:
    """A cluster on this machine: network namespaces where they can be had, else loopback (`namespaces`; `shaped` says what that means).

    Leaving the `with` block, or the end of this process, however it ends, removes everything: processes, namespaces, interfaces, mounts.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        observer: Observer = lambda event: None,
        impose_speeds: bool = False,
        namespaces: bool | None = None,
        cluster_file: str | Path | None = None,
    ) -> None:
        self.cluster, self.name = cluster, f"lab-{secrets.token_hex(3)}"
        self.booted: Callable[[str], None] | None = None  # called when a killed host is there again
        self._observer, self._impose_speeds = observer, impose_speeds
        remove_orphans()
        self._mark = mark(os.getpid())
        self.why_not = None if namespaces else why_no_namespaces() if namespaces is None else "loopback was asked for"
        self.namespaces = self.why_not is None
        self.world: World = NamespaceWorld(cluster, self.name) if self.namespaces else LoopbackWorld(cluster, self.name)
        self._lock = threading.RLock()
        self._conditions = Conditions()
        self._dead: set[str] = set()
        self._processes: list[LabProcess] = []
        self._timers: dict[threading.Timer, bool] = {}  # whether each brings a killed host back
        self._closed = False
        self.problems: list[str] = []  # of faults that were due and not possible
        self._cluster_file = str(Path(cluster_file).resolve()) if cluster_file is not None else self._write_cluster()
        self._remote = RemoteServer(str(self.world.files / "socket"), self._start_for, self._namespaces_of)
        self._began = time.monotonic()

    # ---- what there is

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(host.name for host in self.cluster.hosts)

    @property
    def shaped(self) -> str:
        """What of the cluster file holds here, in a sentence."""
        return self.world.shaped

    def address(self, host: str) -> str:
        """A host's address, as its peers reach it."""
        self._known(host)
        return self.world.address(host)

    @property
    def in_force(self) -> Conditions:
        """Faults of the network that are in force."""
        return self._conditions

    def elapsed_seconds(self) -> float:
        """Since the lab was ready."""
        return time.monotonic() - self._began

    # ---- processes

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        session: bool = True,
    ) -> LabProcess:
        """Starts a command on a host. `environ` comes on top of this process's environment; `session` False leaves it the terminal."""
        self._known(host)
        kept = {key: value for key, value in os.environ.items() if key not in _ROLE_VARIABLES}
        return self._start(host, command, {**self.environment(host, kept), **(environ or {})}, None, (stdin, stdout, stderr), session)

    def run(self, host: str, command: Sequence[str], *, timeout_seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> str:
        """What a command prints; LabError if it fails or takes longer."""
        process = self.start(host, command, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, complaints = process.communicate(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise LabError(f"{host}: {command[0]} takes longer than {timeout_seconds:g} s") from None
        if process.returncode:
            raise LabError(f"{host}: {command[0]} ended with {process.returncode}: {complaints.decode(errors='replace').strip()}")
        return out.decode(errors="replace")

    def environment(self, host: str, base: Mapping[str, str]) -> dict[str, str]:
        """What a process on a host finds in its environment."""
        addresses = {name: self.world.address(name) for name in self.hosts}
        view = LabView(name=self.name, host=host, addresses=addresses, socket=f"{self.world.files_inside}/socket")
        return host_environment(
            view,
            self.world.interface,
            self.cluster,
            self._cluster_file,
            impose_speeds=self._impose_speeds,
            base={**base, **self.world.extra(host), OWNER: self._mark},
        )

    # ---- faults

    @property
    def reviving(self) -> bool:
        """Whether a killed host is going to be there again by itself."""
        return any(revives and timer.is_alive() for timer, revives in self._timers.items())

    def inject(self, fault: LabFault) -> None:
        """Makes a fault happen now, whatever its time. With a duration it ends by itself."""
        check_fault(fault, self.cluster)
        with self._lock:
            self._open()
            self._act(fault)
            self._observer(
                FaultInjected(
                    at_seconds=self.elapsed_seconds(),
                    fault=fault.kind,
                    places=fault.places,
                    amount=fault.amount,
                    duration_seconds=fault.duration_seconds,
                )
            )
            if fault.duration_seconds is not None:
                self._later(fault.duration_seconds, lambda: self._over(fault), revives=fault.kind == "kill")

    def play(self, faults: Sequence[LabFault]) -> None:
        """Has every fault happen at its time from now; returns at once. LabError, before any does, if one never can."""
        for fault in faults:
            if self.why_not is not None and fault.kind in ("cut", "one-way-cut", "slow", "loss"):
                raise LabError(
                    f"{fault.kind} {' '.join(fault.places)}: faults of the network need network namespaces ({self.why_not}); "
                    "here only kill, stop and continue work"
                )
        for fault in faults:
            self._later(fault.at_seconds, lambda fault=fault: self.inject(fault))  # type: ignore[misc]

    def kill(self, host: str, duration_seconds: float | None = None) -> None:
        """Kills every process of a host (or of a site's hosts). Its kernel lives: peers see their connections end at once."""
        self.inject(LabFault(kind="kill", places=(host,), duration_seconds=duration_seconds))

    def stop(self, host: str, duration_seconds: float | None = None) -> None:
        """Stops every process of a host (SIGSTOP): connections stay, nobody answers."""
        self.inject(LabFault(kind="stop", places=(host,), duration_seconds=duration_seconds))

    def go_on(self, host: str) -> None:
        """Lets stopped processes of a host go on."""
        self.inject(LabFault(kind="continue", places=(host,)))

    def cut(self, place: Place, duration_seconds: float | None = None) -> None:
        """Pulls a host's cable, cuts a site off, or two places from each other: packets are lost without a word."""
        self.inject(LabFault(kind="cut", places=_places(place), duration_seconds=duration_seconds))

    def cut_one_way(self, source: str, target: str, duration_seconds: float | None = None) -> None:
        """Nothing from `source` arrives at `target`."""
        self.inject(LabFault(kind="one-way-cut", places=(source, target), duration_seconds=duration_seconds))

    def slow(self, link: Place, factor: float, duration_seconds: float | None = None) -> None:
        """Divides the bandwidth of a host's interface, or of the link of two sites."""
        self.inject(LabFault(kind="slow", places=_places(link), amount=factor, duration_seconds=duration_seconds))

    def loss(self, link: Place, share: float, duration_seconds: float | None = None) -> None:
        """Loses a share of the packets at a host's interface, or on the link of two sites."""
        self.inject(LabFault(kind="loss", places=_places(link), amount=share, duration_seconds=duration_seconds))

    def restore(self, place: Place | None = None) -> None:
        """Ends what is in force at a place, or everywhere: links are whole, dead hosts boot, stopped ones go on."""
        self.inject(LabFault(kind="restore", places=() if place is None else _places(place)))

    # ---- the end

    def close(self) -> None:
        """Ends everything and leaves nothing; more than once is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for timer in self._timers:
                timer.cancel()
        self._remote.close()
        self.world.close()
        for process in self._processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside

    def _start(
        self,
        host: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        directory: str | None,
        streams: tuple[Stream, Stream, Stream],
        session: bool,
    ) -> LabProcess:
        with self._lock:
            self._open()
            self._processes = [process for process in self._processes if process.returncode is None]
            wrapped, files = self.world.wrapped(host, command)
            stdin, stdout, stderr = streams
            process = subprocess.Popen(
                wrapped,
                env=dict(environ),
                cwd=directory,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=session,
                pass_fds=files,
            )
            started = LabProcess(host, process, session)
            self._processes.append(started)
            return started

    def _start_for(self, request: Request, streams: tuple[int, int, int]) -> LabProcess:
        """For a process of the lab that wants one on another host."""
        self._known(request.host)
        own = self.environment(request.host, {})
        environ = {**own, **request.environ, **{name: own[name] for name in PER_HOST if name in own}}
        return self._start(request.host, request.command, environ, request.directory, streams, True)

    def _namespaces_of(self, host: str) -> tuple[dict[str, str], Sequence[str]]:
        """For a process of the lab that forks one and lets it move to another host."""
        self._known(host)
        own = self.environment(host, {})
        with self._lock:
            self._open()
            return {name: own[name] for name in PER_HOST if name in own}, self.world.namespaces(host)

    def _act(self, fault: LabFault) -> None:
        hosts = [host for place in fault.places for host in self._hosts_of(place)] or list(self.hosts)
        if fault.kind == "kill":
            self._kill(hosts)
        elif fault.kind == "stop":
            self._stop(hosts)
        elif fault.kind == "continue":
            self._continue(hosts)
        else:
            if fault.kind == "restore":
                self._revive(hosts)
            self._change(self._conditions.after(fault))

    def _over(self, fault: LabFault) -> None:
        """A fault has lasted its time."""
        hosts = [host for place in fault.places for host in self._hosts_of(place)]
        with self._lock:
            if self._closed:
                return
            if fault.kind == "kill":
                self._revive(hosts)
            elif fault.kind == "stop":
                self._continue(hosts)
            self._change(self._conditions.without(fault))
            self._observer(FaultEnded(at_seconds=self.elapsed_seconds(), fault=fault.kind, places=fault.places))

    def _change(self, after: Conditions) -> None:
        if after != self._conditions:
            self.world.change(self._conditions, after)
            self._conditions = after

    def _kill(self, hosts: Sequence[str]) -> None:
        for process in self._processes:
            if process.host in hosts and process.returncode is None:
                process.host_killed = True
        for host in hosts:
            self.world.kill(host)
            self._dead.add(host)

    def _stop(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            stopped: set[int] = set()
            while fresh := set(self.world.processes(host)) - stopped:  # those that were being born meanwhile, too
                _send(fresh, signal.SIGSTOP)
                stopped |= fresh

    def _continue(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            _send(self.world.processes(host), signal.SIGCONT)

    def _revive(self, hosts: Sequence[str]) -> None:
        self._continue(hosts)
        for host in hosts:
            if host in self._dead:
                self.world.boot(host)
                self._dead.discard(host)
                if self.booted is not None:
                    self.booted(host)

    def _later(self, seconds: float, action: Callable[[], None], *, revives: bool = False) -> None:
        def act() -> None:
            try:
                action()
            except Exception as error:  # in a timer's thread nobody else would hear of it
                if not self._closed:
                    self.problems.append(str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}")

        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers = {other: revived for other, revived in self._timers.items() if other.is_alive()} | {timer: revives}
        timer.start()

    def _hosts_of(self, place: str) -> list[str]:
        sites = site_index(self.cluster)
        return [host.name for host in sites[place].hosts] if place in sites else [place]

    def _known(self, host: str) -> None:
        if host not in self.hosts:
            raise LabError(f"the cluster has no host {host!r}; there are {', '.join(self.hosts[:8])}")

    def _open(self) -> None:
        if self._closed:
            raise LabError(f"{self.name} is closed")

    def _write_cluster(self) -> str:
        (self.world.files / "cluster.toml").write_text(dump_cluster(self.cluster), "utf-8")
        return f"{self.world.files_inside}/cluster.toml"


def _places(place: Place) -> tuple[str, ...]:
    return (place,) if isinstance(place, str) else place


def _send(pids: "set[int] | list[int]", number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
