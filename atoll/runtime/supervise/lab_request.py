"""What processes of a lab ask of it, over the socket that `LabView` names: a process on another host, or where a host's network is, for a
process that is forked here and moves there. `atoll/lab/remote.py` answers.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from atoll.errors import LabError

__all__ = ["REQUEST_LENGTH", "Reply", "Request", "namespaces_of"]

REQUEST_LENGTH = struct.Struct("<I")
_MOST_NAMESPACES = 4


class Request(msgspec.Struct, frozen=True):
    """A process to be started; without a command, a question for the host's namespaces."""

    host: str
    command: list[str] = []
    environ: dict[str, str] = {}
    directory: str = ""


class Reply(msgspec.Struct, frozen=True):
    """How it ended, or why it did not begin; with namespaces, what their host's processes find in their environment."""

    code: int
    complaint: str = ""
    environ: dict[str, str] = {}


@contextmanager
def namespaces_of(path: str, host: str) -> Iterator[tuple[dict[str, str], list[int]]]:
    """What of the environment is a host's own, and its namespaces as open files, for as long as the block lasts: none where the lab has
    none. LabError where the host is dead, or the lab does not answer at this path."""
    data, files = msgspec.json.encode(Request(host)), list[int]()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            connection.sendall(REQUEST_LENGTH.pack(len(data)) + data)
            answer, files, _, _ = socket.recv_fds(connection, 1, _MOST_NAMESPACES)
            while chunk := connection.recv(65536):
                answer += chunk
        reply = msgspec.json.decode(answer, type=Reply)
    except (OSError, msgspec.DecodeError) as error:
        _close(files)
        raise LabError(f"the lab does not answer: {error}") from None
    try:
        if reply.complaint:
            raise LabError(reply.complaint)
        yield reply.environ, files
    finally:
        _close(files)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
