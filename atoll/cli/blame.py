"""Whose line it was: errors that a user's script causes say where in the script."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import AtollError, JobError

__all__ = ["located", "users_code"]

_PACKAGE = Path(__file__).resolve().parents[1]  # Atoll itself, which may lie beside the script


@contextmanager
def located(script: str) -> Iterator[None]:
    """What Atoll has to say against the script begins with the script's name, and with the line when its code was running."""
    try:
        yield
    except AtollError as error:
        raise type(error)(f"{_where(script, error)}: {error}") from error
    except SystemExit as error:
        raise JobError(f"{_where(script, error)}: the script exits ({error.code}) while it is planned; move that out of its Job") from error


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Around calls into the user's code and nothing else: whatever it raises is a JobError, not a fault in Atoll."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        raise JobError(f"{doing} failed: {': '.join(filter(None, (type(error).__name__, str(error).strip())))}") from error


def _where(script: str, error: BaseException) -> str:
    """`script.py:12`: the innermost line of the user's own that led to the error, or to what caused it; else just the script."""
    file = Path(script).resolve()
    reason: BaseException | None = error
    while reason is not None:
        frames = [frame for frame in traceback.extract_tb(reason.__traceback__) if _is_own(Path(frame.filename), file)]
        if frames:
            shown = script if Path(frames[-1].filename) == file else frames[-1].filename
            return f"{shown}:{frames[-1].lineno}"
        reason = reason.__cause__
    return script


def _is_own(code: Path, script: Path) -> bool:
    """The script, or a file beside or below it that is no library's."""
    return script.parent in code.parents and "site-packages" not in code.parts and _PACKAGE not in code.parents
