"""Whose line it was: errors that the user's own code causes say so, and say where."""

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import AtollError, JobError

__all__ = ["in_words", "located", "own_frames", "showing_lines", "shown_place", "users_code"]

_PACKAGE = Path(__file__).resolve().parent  # Atoll itself, which may lie beside the script
_LIBRARIES = {"site-packages", "dist-packages"}
_MOST_LINES = 4


@contextmanager
def users_code(doing: str, failure: type[JobError] = JobError) -> Iterator[None]:
    """Around calls into the user's code and nothing else: whatever it raises is a JobError, not a fault in Atoll."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        raise failure(f"{doing} failed: {in_words(error)}") from error


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
def showing_lines() -> Iterator[None]:
    """What the user's own code caused ends with the lines it went through, outermost first, without Atoll's and the libraries'."""
    try:
        yield
    except AtollError as error:
        lines = [f"  {shown_place(frame)} in {frame.name}: {frame.line}" for frame in own_frames(error)[-_MOST_LINES:]]
        error.args = ("\n".join([str(error), *lines]),)
        raise


def in_words(error: BaseException) -> str:
    """`KeyError: 'x' (sample 17)`: kind, message, and the notes that were added on the way."""
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([": ".join(filter(None, (type(error).__name__, str(error).strip()))), *notes])


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's own lines that led to the error, or to what caused it, innermost last."""
    reason: BaseException | None = error
    while reason is not None:
        frames = [frame for frame in traceback.extract_tb(reason.__traceback__) if _is_own(frame)]
        if frames:
            return frames
        reason = reason.__cause__
    return []


def _is_own(frame: traceback.FrameSummary) -> bool:
    """Neither Atoll, nor Python, nor an installed library; a notebook's cell has no file but has lines."""
    code = Path(frame.filename)
    library = _LIBRARIES.intersection(code.parts) or Path(sysconfig.get_path("stdlib")) in code.parents
    return not library and _PACKAGE not in code.parents and bool(linecache.getline(frame.filename, frame.lineno or 0))


def _where(script: str, error: BaseException) -> str:
    """`script.py:12`: the innermost line of the user's own; else just the script."""
    frames = own_frames(error)
    if not frames:
        return script
    shown = script if Path(frames[-1].filename) == Path(script).resolve() else frames[-1].filename
    return f"{shown}:{frames[-1].lineno}"


def shown_place(frame: traceback.FrameSummary) -> str:
    """`train.py:12`, from the working directory where the file lies below it."""
    file = Path(frame.filename)
    return f"{file.relative_to(Path.cwd()) if Path.cwd() in file.parents else file}:{frame.lineno}"
