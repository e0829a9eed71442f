"""Fork server: processes of this machine that begin with what another has imported and captured already, where forking is safe.

PyTorch, the script and its captured program cost seconds a process. The server is forked from the process that has them, before that one
has a second thread, and forks a process for whoever asks; it has no threads itself. `unsafe` says when forking could go wrong: then
processes are started as usual, and do that work each for itself.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import msgspec

__all__ = ["ForkServer", "Program", "open_files", "unsafe"]

Program = Callable[[Sequence[str]], int]
"""What a forked process runs: takes its arguments and returns its exit code."""

_SETTLE_SECONDS = 0.5  # for threads that are about to end
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SET_NAME = 15  # PR_SET_NAME: what `ps` and `top` call it, of which 15 bytes are kept


class _Start(msgspec.Struct, tag=True):
    """Asks for a process; its stdout and stderr follow, then the namespaces that it enters."""

    name: str
    program: str
    arguments: list[str]
    environment: dict[str, str]
    namespaces: int


class _Signal(msgspec.Struct, tag=True):
    pid: int
    number: int


class _Started(msgspec.Struct, tag=True):
    pid: int


class _Ended(msgspec.Struct, tag=True):
    pid: int
    code: int  # as `subprocess` says it


_Request = _Start | _Signal
_Answer = _Started | _Ended


def open_files() -> frozenset[str]:
    """What this process has open, but for what is mapped into memory: it would be shared, place in the file included."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the listing's own
            found.add(f"{entry.name} {os.readlink(entry)}")
    return frozenset(found)


def unsafe(opened_before: frozenset[str]) -> str:
    """Why this process must not be forked, in words; empty: it may. `opened_before` is what was open before the user's code ran."""
    if sys.platform != "linux":
        return "only Linux forks safely"
    import torch

    if torch.accelerator.current_accelerator() is not None:
        return "PyTorch is built for an accelerator, whose driver does not survive it"
    until = time.monotonic() + _SETTLE_SECONDS
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.005)
    if threads > 1:
        return f"the script's process has {threads} threads"
    opened = sorted(name.partition(" ")[2] for name in open_files() - opened_before)
    return f"the script has {opened[0]} open" if opened else ""


class ForkedProcess:
    """A process that the server forked, the leader of its own session."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server, self._pid = server, pid

    def poll(self) -> int | None:
        """How it ended, as `subprocess` says it; None: it runs."""
        return self._server.code_of(self._pid)

    def signal(self, number: int) -> None:
        """To it and everybody in its session."""
        self._server.signal(self._pid, number)

    def how(self) -> str:
        """In words, how it ended."""
        code = self.poll()
        assert code is not None
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class ForkServer:
    """Asked by the process that made it, and by nobody else. It ends with that process, and what it forked with it."""

    def __init__(self, programs: Mapping[str, Program], prepare: Callable[[], None] = lambda: None) -> None:
        """`programs` is what can be run, by the module that would be run elsewhere; `prepare` is run once, in the server."""
        self.programs = frozenset(programs)
        self._codes: dict[int, int | None] = {}
        self._connection, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._connection.close()
            _serve(theirs, parent, programs, prepare)
        theirs.close()
        self._alive = True

    def start(
        self,
        name: str,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: tuple[int, int],
        namespaces: Sequence[int] = (),
    ) -> ForkedProcess:
        """A process that the kernel knows by this name, with these files as stdout and stderr, in these namespaces instead of its own.

        OSError where the server is gone.
        """
        self._connection.send_bytes(msgspec.json.encode(_Start(name, program, list(arguments), dict(environment), len(namespaces))))
        for descriptor in (*outputs, *namespaces):
            reduction.send_handle(self._connection, descriptor, self._pid)
        while True:
            answer = self._hear()
            if isinstance(answer, _Started):
                self._codes[answer.pid] = None
                return ForkedProcess(self, answer.pid)

    def code_of(self, pid: int) -> int | None:
        """How a process ended; None: it runs."""
        with contextlib.suppress(OSError, EOFError):
            while self._connection.poll():
                self._hear()
        if self._alive and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._alive = False
        if self._codes[pid] is None and not self._alive:
            self._codes[pid] = -signal.SIGKILL  # the kernel kills them with the server
        return self._codes[pid]

    def signal(self, pid: int, number: int) -> None:
        """To a process and its session: by the server, who knows whether the number is still that process's."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.json.encode(_Signal(pid, number)))

    def close(self) -> None:
        """Ends the server, and what it forked."""
        self._connection.close()
        if self._alive:
            self._alive = False
            os.waitpid(self._pid, 0)

    def _hear(self) -> _Answer:
        answer: _Answer = msgspec.json.decode(self._connection.recv_bytes(), type=_Answer)
        if isinstance(answer, _Ended):
            self._codes[answer.pid] = answer.code
        return answer


def _serve(connection: Connection, parent: int, programs: Mapping[str, Program], prepare: Callable[[], None]) -> NoReturn:
    """The server's life. Whatever happens, it does not go on with what the process it was forked from was doing."""
    try:
        _tie_to(parent)
        os.setsid()  # Ctrl-C is for who asked
        prepare()
        gc.freeze()  # what all share stays shared
        _answer(connection, programs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(connection: Connection, programs: Mapping[str, Program]) -> None:
    """Until nobody can ask any more."""
    children: dict[int, BaseProcess] = {}
    with selectors.DefaultSelector() as selector, contextlib.suppress(EOFError, OSError):
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    _obey(connection, selector, programs, children)
                else:
                    assert isinstance(key.fileobj, int)
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    _bury(connection, children.pop(key.data))
    for pid in children:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    """To a child and everybody in its session, which it begins as soon as it runs."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def _obey(
    connection: Connection, selector: selectors.BaseSelector, programs: Mapping[str, Program], children: dict[int, BaseProcess]
) -> None:
    request: _Request = msgspec.json.decode(connection.recv_bytes(), type=_Request)
    if isinstance(request, _Signal):
        if request.pid in children:
            _signal(request.pid, request.number)
        return
    outputs = reduction.recv_handle(connection), reduction.recv_handle(connection)
    namespaces = [reduction.recv_handle(connection) for _ in range(request.namespaces)]
    child = multiprocessing.get_context("fork").Process(
        target=_run, args=(os.getpid(), programs[request.program], request, outputs, namespaces, selector)
    )
    child.start()
    assert child.pid is not None
    for descriptor in (*outputs, *namespaces):
        os.close(descriptor)
    children[child.pid] = child
    selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child.pid)
    connection.send_bytes(msgspec.json.encode(_Started(child.pid)))


def _bury(connection: Connection, child: BaseProcess) -> None:
    """What it left running in its session goes with it, before its number can be anybody else's."""
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        _signal(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode is not None
    connection.send_bytes(msgspec.json.encode(_Ended(child.pid, child.exitcode)))


def _run(
    server: int,
    program: Program,
    request: _Start,
    outputs: tuple[int, int],
    namespaces: Sequence[int],
    inherited: selectors.BaseSelector,
) -> None:
    """A forked process's life: it is made to look like one that was started, then runs its program."""
    _tie_to(server)
    ctypes.CDLL(None).prctl(_SET_NAME, request.name.encode())
    os.setsid()
    for key in inherited.get_map().values():  # the server's connection among them
        os.close(key.fd)
    inherited.close()
    for descriptor, standard in zip((os.open(os.devnull, os.O_RDONLY), *outputs), (0, 1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for descriptor in namespaces:
        _enter(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    import torch

    threads = request.environment.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0)))
    sys.exit(program(request.arguments))


def _enter(namespace: int) -> None:
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.setns(namespace, 0) != 0:
        sys.exit(f"cannot enter a namespace of the host: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)


def _tie_to(parent: int) -> None:
    """The kernel kills this process when that one dies."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
