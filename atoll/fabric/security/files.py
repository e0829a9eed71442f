"""Files that only their owner may read, written whole or not at all."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from atoll.errors import FabricError

__all__ = ["make_private_directory", "read_private", "write_private"]


def make_private_directory(path: Path) -> None:
    """A directory that only its owner may enter; it may exist already, but then its permissions are narrowed."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        raise FabricError(f"{path}: cannot keep keys there: {error.strerror or error}") from error


def write_private(path: Path, data: bytes) -> None:
    """Puts a file in place in one move, readable by its owner only from its first byte on (mkstemp makes it so)."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise FabricError(f"{path}: cannot write it: {error.strerror or error}") from error


def read_private(path: Path) -> bytes:
    """Reads a file that holds a secret; FabricError if it is not there, or if others may read it."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise FabricError(f"{path}: cannot read it: {error.strerror or error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FabricError(f"{path}: others than its owner may read it, so it is no secret any more; `chmod 600 {path}` if nobody did")
    return data
