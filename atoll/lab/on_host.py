"""`python -m atoll.lab.on_host HOST COMMAND …`: a command on another host of the lab this process is in. See `remote.py`, which answers."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import msgspec

from atoll.runtime.supervise.hosts import LabView, find_lab
from atoll.runtime.supervise.lab_request import REQUEST_LENGTH, Reply, Request

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """The asking side."""
    view = find_lab(os.environ)
    if view is None or len(arguments) < 2:
        print("atoll lab: `python -m atoll.lab.on_host HOST COMMAND …` works inside a lab only", file=sys.stderr)
        return 2
    reply = _ask(view, Request(arguments[0], list(arguments[1:]), dict(os.environ), os.getcwd()))
    if reply.complaint:
        print(f"atoll lab: {reply.complaint}", file=sys.stderr, flush=True)
    if reply.code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-reply.code, signal.SIG_DFL)
        os.kill(os.getpid(), -reply.code)
    return reply.code


def _ask(view: LabView, request: Request) -> Reply:
    data = msgspec.json.encode(request)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(view.socket)
            socket.send_fds(connection, [REQUEST_LENGTH.pack(len(data))], [0, 1, 2])
            connection.sendall(data)
        except OSError as error:
            return Reply(1, f"lab {view.name} does not answer: {error.strerror}")

        def pass_on(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([signal.SIGSTOP if number == signal.SIGTSTP else number]))

        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGTSTP,
            signal.SIGCONT,
        ):
            signal.signal(number, pass_on)
        answer = bytearray()
        while chunk := connection.recv(65536):
            answer += chunk
    return msgspec.json.decode(answer, type=Reply) if answer else Reply(1, f"lab {view.name} ended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
