"""Whose line it was: errors that the user's own code causes say so, and say where; and how a script ends when nobody catches them.

`python train.py` should not answer a wrong argument with a traceback through Atoll. A program that uses Atoll as a library should: it
may catch the error, and if it does not, it wants to know where it came from. So the error itself is always raised; it only *prints* as a
sentence, and only when the main script itself called Atoll and nothing else has said how uncaught errors are shown.
"""

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from atoll.errors import AtollError, JobError

__all__ = ["SentenceIfUncaught", "in_words", "located", "own_frames", "showing_lines", "users_code", "with_frames"]

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
    """The user's own lines that led to the error, or to what caused it, innermost last; in another process, where it was raised there."""
    reason: BaseException | None = error
    while reason is not None:
        frames = getattr(reason, "_atoll_frames", None) or [f for f in traceback.extract_tb(reason.__traceback__) if _is_own(f)]
        if frames:
            return frames
        reason = reason.__cause__
    return []


def with_frames(error: BaseException, frames: Sequence[tuple[str, int, str, str]]) -> BaseException:
    """An error of another process, with its lines of the user's own there: file, line, function, text."""
    summaries = [traceback.FrameSummary(file, number, function, line=text) for file, number, function, text in frames]
    error._atoll_frames = summaries  # type: ignore[attr-defined]
    return error


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


class SentenceIfUncaught:
    """Around what a script calls: an AtollError that leaves the block and is never caught ends the script with a sentence.

    Nothing happens before that, nor in notebooks, interactive sessions, tests, and programs whose calls come from another module than the
    main script.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, AtollError) and _nobody_else_shows() and _called_by_script(sys._getframe(1)):
            sys.excepthook = _say


def _nobody_else_shows() -> bool:
    """Whether uncaught errors are shown by Python itself, or by PyTorch, which only puts the rank before each line."""
    return sys.excepthook is sys.__excepthook__ or getattr(sys.excepthook, "__module__", "").startswith("torch.distributed")


def _called_by_script(frame: FrameType | None) -> bool:
    """Whether the nearest code that is not Atoll's is the file Python was started with."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "atoll":
        frame = frame.f_back
    if frame is None or sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    return frame.f_globals.get("__name__") == "__main__" and "__file__" in frame.f_globals


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own hook for all that is not ours."""
    if not isinstance(error, AtollError):
        sys.__excepthook__(kind, error, trace)
        return
    frames = own_frames(error) if "\n" not in str(error) else []  # else it shows the lines already
    where = f"{shown_place(frames[-1])}: " if frames else ""
    print(f"error: {where}{error}", file=sys.stderr)
    sys.exit(error.exit_code)
