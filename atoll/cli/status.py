"""What a command is doing right now, on stderr: a spinner on a terminal, one plain line after two seconds elsewhere."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

__all__ = ["say", "working"]

_PATIENCE_SECONDS = 2.0  # what is done sooner than this needs no word where no spinner can turn


@contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Show `message` until the block ends; the callable it yields replaces what follows the message."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        spinner = "dots" if console.encoding.startswith("utf") else "line"
        with console.status(Text(f"{message} …"), spinner=spinner) as status:
            yield lambda detail: status.update(Text(f"{message}: {detail} …"))
        return
    timer = threading.Timer(_PATIENCE_SECONDS, lambda: print(f"{message} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield lambda detail: None
    finally:
        timer.cancel()


def say(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr)
