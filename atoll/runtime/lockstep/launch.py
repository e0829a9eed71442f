"""Launch: one process per device of this host, looked after from the first to the last.

The launcher hosts the store, so that any rank may die; it sees how each process ends, tells the others at once, and leaves nobody behind.
One thread does everything: it reads what the ranks print, reaps them and obeys signals.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import IO, TextIO, TypeAlias

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.errors import AtollError
from atoll.events import Observer, Restarted, WorkerFailed
from atoll.runtime.lockstep.beats import Beat, read_beats
from atoll.runtime.lockstep.failure import STOP, Failure, condemn, prepare
from atoll.runtime.lockstep.rendezvous import DEFAULT_TIMEOUT_SECONDS
from atoll.runtime.lockstep.role import GENERATION
from atoll.runtime.lockstep.stalling import DEFAULT_STALL_SECONDS, Stalling

__all__ = ["CommandOfRank", "LaunchResult", "launch"]

CommandOfRank: TypeAlias = Callable[[int, int], Sequence[str]]

_LOOK_SECONDS = 0.05  # between two looks at the processes
_LISTEN_SECONDS = 1.0  # between two looks at what they say they do
_DRAIN_SECONDS = 1.0  # for what a dead rank has printed to arrive
_INTERRUPTED = 130  # exit code after a second Ctrl-C, as a shell would say it
_WRONG_INPUT = 2  # exit code of a user's mistake: trying again would not help

# Run by each new process before it becomes the rank: the kernel kills it when the launcher dies, however that happens. A program of its own
# because running Python between fork and exec is not safe beside threads.
_TIED_TO_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"atoll: cannot start {sys.argv[2]}: {error.strerror}")
"""


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a launched run ended."""

    exit_code: int  # 0: every rank ended well
    failure: Failure | None = None  # the one that ended it
    restarts: int = 0
    interrupted: bool = False  # somebody asked it to stop, by Ctrl-C or a signal


def launch(
    command_of_rank: CommandOfRank,
    world_size: int,
    *,
    devices: Sequence[str] = (),
    max_restarts: int = 0,
    observers: Sequence[Observer] = (),
    environ: Mapping[str, str] | None = None,
    terminal_for_rank_0: bool = True,
    grace_seconds: float = 3.0,
    stall_seconds: float = DEFAULT_STALL_SECONDS,
    host: str = "127.0.0.1",
    newest_checkpoint: Callable[[], int | None] = lambda: None,
) -> LaunchResult:
    """Run `command_of_rank(rank, generation)` for every rank and wait for all of them.

    When one dies, the others learn it through the store and are killed after `grace_seconds`; then everybody is started anew under the
    next generation number, at most `max_restarts` times (the command of a generation above 0 should resume). However this function ends,
    and even if the launcher itself is killed, no rank outlives it. When nobody gets on for `stall_seconds` (or ten steps, if they are
    longer), a line a minute says who keeps the others waiting. `newest_checkpoint` says what there is to go on from when a rank fails.
    """
    environ = dict(os.environ if environ is None else environ)
    launcher = _Launcher(command_of_rank, world_size, devices, environ, terminal_for_rank_0, grace_seconds, stall_seconds, host)
    launcher.newest_checkpoint = newest_checkpoint
    began = time.monotonic()
    generation = 0
    with launcher.obeying_signals():
        while (failure := launcher.run(generation)) is not None:
            _tell(observers, _worker_failed(failure, generation, time.monotonic() - began))
            if generation == max_restarts or launcher.asked or failure.exit_code == _WRONG_INPUT:
                return LaunchResult(exit_code=failure.exit_code, failure=failure, restarts=generation, interrupted=launcher.asked > 0)
            generation += 1
            print(f"atoll: starting every rank anew ({generation} of at most {max_restarts})", file=sys.stderr, flush=True)
            seconds = time.monotonic() - began
            _tell(observers, Restarted(at_seconds=seconds, generation=generation, max_restarts=max_restarts, reason=failure.sentence))
    return LaunchResult(exit_code=_INTERRUPTED if launcher.killed else 0, restarts=generation, interrupted=launcher.asked > 0)


def _tell(observers: Sequence[Observer], event: WorkerFailed | Restarted) -> None:
    for observer in observers:
        observer(event)


def _worker_failed(failure: Failure, generation: int, at_seconds: float) -> WorkerFailed:
    return WorkerFailed(
        at_seconds=at_seconds,
        rank=failure.rank,
        device=failure.device,
        stage=failure.stage,
        step=failure.step,
        doing=failure.doing,
        message=failure.sentence,
        generation=generation,
    )


class _Output:
    """One stream of one rank, passed on line by line."""

    def __init__(self, stream: IO[bytes], prefix: str, into: TextIO) -> None:
        self.stream, self._prefix, self._into = stream, prefix.encode(), into
        self._rest = b""
        os.set_blocking(stream.fileno(), False)

    def read(self) -> bool:
        """Pass on what is there; False at the end."""
        try:
            chunk = os.read(self.stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if not chunk and self._rest:
            lines, self._rest = [self._rest], b""
        whole = b"".join(self._prefix + line + b"\n" for line in lines if line)
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the run goes on
            self._into.write(whole.decode(errors="replace"))
            self._into.flush()
        return bool(chunk)


class _Worker:
    """One rank's process, the leader of its own session."""

    def __init__(self, rank: int, device: str, process: "subprocess.Popen[bytes]") -> None:
        self.rank, self.device, self.process = rank, device, process

    def ended(self) -> bool:
        """Whether it has just ended. What it left running in its session is killed before its number can be anybody else's."""
        if self.process.returncode is not None or os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.signal(signal.SIGKILL)
        self.process.wait()
        return True

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Launcher:
    """The ranks of this host, one generation after the other."""

    def __init__(
        self,
        command_of_rank: CommandOfRank,
        world_size: int,
        devices: Sequence[str],
        environ: dict[str, str],
        terminal: bool,
        grace: float,
        stall: float,
        host: str,
    ) -> None:
        if world_size < 1:
            raise AtollError(f"launch: there must be at least one rank, got {world_size}")
        if devices and len(devices) != world_size:
            raise AtollError(f"launch: {len(devices)} devices named for {world_size} ranks")
        self.command_of_rank, self.world_size, self.environ = command_of_rank, world_size, environ
        self.devices = list(devices) or [""] * world_size
        self.terminal, self.grace_seconds, self.stall_seconds, self.host = terminal, grace, stall, host
        self.asked = 0  # how often somebody asked to stop
        self.killed = False
        self.newest_checkpoint: Callable[[], int | None] = lambda: None  # asked when a rank fails: what ranks last said of it may be old
        self._server, self.port = _host_store(host)
        self._store: Store = self._server
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def run(self, generation: int) -> Failure | None:
        """All ranks from start to end; the failure that ended them, if one did."""
        self._store = PrefixStore(f"generation-{generation}", self._server)
        prepare(self._store, range(self.world_size))
        try:
            self._workers = []
            for rank in range(self.world_size):
                self._workers.append(self._start(rank, generation))
            return self._look_after()
        finally:
            self._kill()
            self._drain()

    def _start(self, rank: int, generation: int) -> _Worker:
        command = list(self.command_of_rank(rank, generation))
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIED_TO_LAUNCHER, str(os.getpid()), *command]
        owns_terminal = rank == 0 and self.terminal
        try:
            process = subprocess.Popen(
                command,
                env=self._environment(rank, generation),
                stdin=subprocess.DEVNULL,
                stdout=None if owns_terminal else subprocess.PIPE,
                stderr=None if owns_terminal else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AtollError(f"launch: cannot start rank {rank}: {error.strerror or error}") from error
        prefix = f"[{' '.join(filter(None, (str(rank), self.devices[rank])))}] "
        for stream, into in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                output = _Output(stream, prefix, into)
                self._selector.register(output.stream, selectors.EVENT_READ, output)
        return _Worker(rank, self.devices[rank], process)

    def _environment(self, rank: int, generation: int) -> dict[str, str]:
        """What `find_role` reads, what torch's own `env://` reads, and settings the user has not made."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        unset = {
            "OMP_NUM_THREADS": str(max(1, cores // self.world_size)),
            "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # what broken connections mean is said in one sentence
        }
        if _is_loopback(self.host):
            unset["GLOO_SOCKET_IFNAME"] = _loopback_interface()
        role = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            GENERATION: str(generation),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(generation),
        }
        return unset | self.environ | role

    def _look_after(self) -> Failure | None:
        """Until the last rank has ended. After a failure the others have a moment to end by themselves."""
        failure: Failure | None = None
        kill_at = float("inf")
        stalling = Stalling(
            self.world_size,
            least_seconds=self.stall_seconds,
            give_up_seconds=DEFAULT_TIMEOUT_SECONDS,
            devices=dict(enumerate(self.devices)),
        )
        listened = time.monotonic()
        while any(worker.running for worker in self._workers):
            self._read(_LOOK_SECONDS)
            for worker in self._workers:
                if worker.ended() and failure is None and not self.killed:
                    failure = self._judge(worker)
                    if failure is not None:
                        failure = self._with_checkpoint(failure)
                        kill_at = time.monotonic() + self.grace_seconds
                        _show(failure)
                        if failure.kind == "silent":  # it cannot end by itself
                            self._workers[failure.rank].signal(signal.SIGKILL)
            if time.monotonic() > kill_at:
                self._kill()
            if failure is None and time.monotonic() - listened > _LISTEN_SECONDS:
                listened = time.monotonic()
                self._tell_of(stalling, listened)
            self._pass_on_request()
        return failure

    def _with_checkpoint(self, failure: Failure) -> Failure:
        newest = self.newest_checkpoint()
        return failure if newest is None else msgspec.structs.replace(failure, checkpoint=newest)

    def _tell_of(self, stalling: Stalling, now: float) -> None:
        line = stalling.line(read_beats(self._store, range(self.world_size)), now)
        if line is not None:
            print(f"atoll: {line}", file=sys.stderr, flush=True)

    def _judge(self, worker: _Worker) -> Failure | None:
        """What the end of a process means. Whoever wrote a failure first is believed: the rank itself knows its own error best."""
        beats = read_beats(self._store, range(self.world_size))
        how = _how_it_ended(worker.process.returncode, beats.get(worker.rank))
        if how is None:
            return None
        beats.setdefault(worker.rank, Beat(rank=worker.rank, device=worker.device, stage="", place="", pid=worker.process.pid, count=0))
        return condemn(self._store, Failure.of(worker.rank, beats, "died", how, max(1, worker.process.returncode)))

    def _pass_on_request(self) -> None:
        """The first request to stop lets the step end; the second kills."""
        if self.asked == 1:
            self._store.set(STOP, "1")
        elif self.asked > 1 and not self.killed:
            self.killed = True
            self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.running:
                worker.signal(signal.SIGKILL)

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._selector.unregister(key.fileobj)
                key.data.stream.close()
        if not self._selector.get_map():
            time.sleep(seconds)  # select returns at once when there is nothing to read from

    def _drain(self) -> None:
        """Everybody is dead or dying: wait for them, and for their last words."""
        for worker in self._workers:
            if worker.running:
                worker.process.wait()
        until = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < until:
            self._read(_LOOK_SECONDS)
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.data.stream.close()

    @contextmanager
    def obeying_signals(self) -> Iterator[None]:
        """Requests to stop are counted; a stop from the terminal (Ctrl-Z) stops the ranks too, and so does going on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked += 1

        def pause(number: int, frame: FrameType | None) -> None:
            for worker in self._workers:
                worker.signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for worker in self._workers:
                worker.signal(signal.SIGCONT)

        handlers = {signal.SIGINT: ask, signal.SIGTERM: ask, signal.SIGHUP: ask, signal.SIGTSTP: pause}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _how_it_ended(code: int, beat: Beat | None) -> str | None:
    """In words; None when it ended well."""
    if code == 0:
        return None if beat is None or beat.left else "it ended before the run did, with exit code 0"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _show(failure: Failure) -> None:
    """The sentence, once; and the cursor, which a progress line may have hidden."""
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{cursor}atoll: {failure.sentence}", file=sys.stderr, flush=True)


def _host_store(host: str) -> tuple[Store, int]:
    """A store of this process. It listens on the loopback interface only, unless ranks of other hosts have to reach it."""
    listener = socket.create_server((host if _is_loopback(host) else "", 0), backlog=1024)
    port = int(listener.getsockname()[1])
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
