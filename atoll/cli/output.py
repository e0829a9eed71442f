"""Where a command's output goes and which characters it may use: JSON stays JSON, and a terminal without Unicode gets ASCII. What a command
is doing right now stands on stderr: a spinner on a terminal, one plain line after two seconds elsewhere."""

import codecs
import ctypes
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.errors import AtollError
from atoll.events import AnyEvent
from atoll.watch.describe import describe_event

__all__ = [
    "check_writable", "headed_table", "notes_view", "print_json", "say", "show_event", "show_what_the_terminal_can",
    "stdout_to_stderr", "titled", "working",
]  # fmt: skip

_PLAIN = dict(zip("█▏·–—─━│›▶◀•×µμ≈", "#|-----|>><*xuu~", strict=True)) | {
    "…": "...",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "²": "^2",
    "³": "^3",
}
_ERRORS = "atoll-plain"


def show_what_the_terminal_can() -> None:
    """Characters that the encoding of stdout and stderr lacks are printed as ASCII that means the same, and all of them under `LC_ALL=C`.

    Python itself speaks UTF-8 there, whatever the terminal was said to understand.
    """
    codecs.register_error(_ERRORS, _plain)
    locale = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    asked_otherwise = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = locale in ("C", "POSIX") and not asked_otherwise
            stream.reconfigure(encoding="ascii" if ascii_only else None, errors=_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "asked only of streams that are written"
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def print_json(value: object) -> None:
    """Print a value as JSON, with escapes for what the encoding of stdout might lack: they are the same document. A string is JSON."""
    document = value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        document = re.sub(r"[^\x00-\x7f]", lambda character: json.dumps(character[0])[1:-1], document)
    print(document)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, whatever prints — Python, a library's C code, a child process — prints to stderr, so that stdout holds the answer alone."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no such file: nothing can be printed there either
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        _point_stdout_at(2)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush_c()
        _point_stdout_at(kept)
        os.close(kept)


def _point_stdout_at(descriptor: int) -> None:
    try:
        os.dup2(descriptor, 1)
    except OSError:  # stderr is closed
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)


def _flush_c() -> None:
    """What C code printed may still be in its own buffer."""
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def notes_view(notes: Iterable[str]) -> RenderableType:
    """What was assumed or estimated on the way to a plan."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for note in notes:
        table.add_row("·", Text(note))
    return titled("Notes", table)


def titled(title: str | Text, table: Table) -> RenderableType:
    """A table below its title, a little to the right, and an empty line."""
    return Group(Text(title, style="bold") if isinstance(title, str) else title, Padding(table, (0, 0, 1, 2)))


def headed_table() -> Table:
    """An empty table whose columns have bold headings with a line below."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def check_writable(path: Path, error: type[AtollError]) -> None:
    """Refuses a file that cannot be there; asked before a long search or measurement, not after it."""
    if path.is_dir():
        raise error(f"-o {path}: is a directory; give a file")
    if not path.resolve().parent.is_dir():
        raise error(f"-o {path}: there is no directory {path.resolve().parent}")


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
    print(message, file=sys.stderr, flush=True)


def show_event(event: AnyEvent) -> None:
    """What happened, and when, in a line on stderr."""
    say(f"  {time.strftime('%H:%M:%S', time.gmtime())} {describe_event(event)}")
