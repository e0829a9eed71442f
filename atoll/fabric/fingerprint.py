"""The fingerprint of a job: what must be the same everywhere for its numbers to mean anything. Peers compare it when they meet."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from atoll.errors import JobError, RefusedError

__all__ = ["check_fingerprint", "job_fingerprint"]

_SHOWN = 16  # characters of a digest: enough to tell two apart


def job_fingerprint(files: Sequence[Path], config: Mapping[str, object]) -> dict[str, str]:
    """Of a job's code (each file by its name), its configuration (anything JSON can say), and the versions that compute it."""
    parts = {f"code {path.name}": _digest(_read(path)) for path in files}
    parts["config"] = _digest(msgspec.json.encode(config, order="deterministic"))
    parts["atoll"] = version("atoll")
    parts["torch"] = version("torch").split("+")[0]
    parts["python"] = ".".join(platform.python_version_tuple()[:2])
    return parts


def check_fingerprint(ours: Mapping[str, str], theirs: Mapping[str, str], peer: str) -> None:
    """RefusedError says what differs. Whoever has no job, such as an observer, is not compared."""
    if not ours or not theirs:
        return
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names:
        each = (f"{name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here" for name in names)
        raise RefusedError(f"{peer} runs another job or other versions: {'; '.join(each)}. Give every member the same files and versions")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"{path}: cannot read it: {error.strerror or error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_SHOWN]
