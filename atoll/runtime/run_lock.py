"""The lock on a run's directory: held by the process that owns the run, so that two runs never write into one directory."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from atoll.errors import AtollError, JobError

__all__ = ["LOCK", "run_lock"]

LOCK = "lock"


class _Holder(msgspec.Struct):
    pid: int
    host: str


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the run's directory, which is made if need be. JobError where another process holds it; one that died holds nothing.

    The kernel keeps the lock with the open file, so it ends with the process, however that ends; what the file says is only for people.
    """
    path = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise AtollError(f"{directory}: cannot write the run there: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(
                f"{directory}: a run is under way in it{_holder(path)}; wait until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            raise AtollError(f"{path}: cannot lock it: {error.strerror or error}; choose a directory on another file system") from error
        _say(file)
        yield


def _say(file: BinaryIO) -> None:
    try:
        file.truncate(0)
        file.write(msgspec.json.encode(_Holder(os.getpid(), socket.gethostname())))
    except OSError:  # a full disk; the lock itself needs no room
        pass


def _holder(path: Path) -> str:
    try:
        holder = msgspec.json.decode(path.read_bytes(), type=_Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f" (process {holder.pid} on {holder.host})"
