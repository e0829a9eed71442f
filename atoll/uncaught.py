"""How a training script ends when nobody catches Atoll's error: with the sentence and the exit code the command line has for it.

`python train.py` should not answer a wrong argument with a traceback through Atoll. A program that uses Atoll as a library should: it
may catch the error, and if it does not, it wants to know where it came from. So the error itself is always raised; it only *prints* as a
sentence, and only when the main script itself called Atoll and nothing else has said how uncaught errors are shown.
"""

import sys
from types import FrameType, TracebackType
from typing import Self

from atoll.blame import own_frames, shown_place
from atoll.errors import AtollError

__all__ = ["SentenceIfUncaught"]


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
