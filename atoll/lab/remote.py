"""Processes on other hosts of a lab, asked for from inside it: what ssh is in a real cluster.

`python -m atoll.lab.on_host HOST COMMAND …` runs a command on another host with this process's standard streams, environment and directory,
passes signals on and ends as the command ends. If this process is killed, so is the command. The lab's own process answers, over a socket
that all hosts see.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from atoll.errors import AtollError, LabError
from atoll.runtime.supervise.hosts import StartedProcess
from atoll.runtime.supervise.lab_request import REQUEST_LENGTH, Reply, Request

__all__ = ["RemoteServer"]

_LARGEST_REQUEST = 8 << 20
_LOOK_SECONDS = 0.05


Starter: TypeAlias = Callable[[Request, tuple[int, int, int]], StartedProcess]
Finder: TypeAlias = Callable[[str], tuple[dict[str, str], Sequence[str]]]
"""From a host's name to what of the environment is its own, and the files that its namespaces are."""


class RemoteServer:
    """Answers such requests; one thread for each process it looks after."""

    def __init__(self, path: str, start: Starter, find: Finder) -> None:
        self._start, self._find, self._path = start, find, path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(256)
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="lab remote", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accepts no more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="lab remote process", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            reply, files = Reply(0), list[int]()
            try:
                answered = self._answer(connection)
                if isinstance(answered, tuple):
                    reply = Reply(0, environ=answered[0])
                    files = [os.open(file, os.O_RDONLY) for file in answered[1]]
                else:
                    reply = Reply(_look_after(answered, connection))
            except (AtollError, OSError, msgspec.DecodeError) as error:
                reply = Reply(1, str(error))
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [msgspec.json.encode(reply)], files)
            for file in files:
                os.close(file)

    def _answer(self, connection: socket.socket) -> StartedProcess | tuple[dict[str, str], Sequence[str]]:
        head, files, _, _ = socket.recv_fds(connection, REQUEST_LENGTH.size, 3)
        try:
            size = REQUEST_LENGTH.unpack(head)[0] if len(head) == REQUEST_LENGTH.size else _LARGEST_REQUEST + 1
            if size > _LARGEST_REQUEST or len(files) not in (0, 3):
                raise LabError("that is not a request for a process")
            request = msgspec.json.decode(_exactly(connection, size), type=Request)
            if not request.command or not files:
                return self._find(request.host)
            return self._start(request, (files[0], files[1], files[2]))
        finally:
            for file in files:
                os.close(file)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := connection.recv(size - len(data))):
        data += chunk
    return bytes(data)


def _look_after(process: StartedProcess, connection: socket.socket) -> int:
    """Until it ends: signals are passed on; if whoever asked for it is gone, it is killed."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while (code := process.poll()) is None:
            for _ in selector.select(_LOOK_SECONDS):
                asked = connection.recv(1)
                process.signal(asked[0] if asked else signal.SIGKILL)
                if not asked:
                    selector.unregister(connection)
    return code
