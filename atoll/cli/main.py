"""`atoll`: the commands, and how each way to fail ends.

Exit code 0: done. 1: the job failed. 2: what the user gave was wrong, with a sentence on stderr. 130: interrupted.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup
from typer.exceptions import TyperException

from atoll.cli.audit import audit
from atoll.cli.authority import authority
from atoll.cli.diff import diff
from atoll.cli.export import export
from atoll.cli.join import join
from atoll.cli.lab import lab
from atoll.cli.mode_options import with_modes
from atoll.cli.output import show_what_the_terminal_can
from atoll.cli.plan import plan
from atoll.cli.presets import presets
from atoll.cli.probe import probe
from atoll.cli.report import report
from atoll.cli.run import run as run_command
from atoll.cli.standby import standby
from atoll.errors import AtollError

__all__ = ["build_app", "main", "run"]

_TAKES_SCRIPTS = ("plan", "run", "lab")
_CANNOT_PRINT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)  # a full or broken disk behind stdout


class _Commands(TyperGroup):
    """All commands; what is wrong with a value is told without the words that stand for the kind of check."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise
        except TyperException as error:
            if getattr(error, "option_name", None) and ctx.invoked_subcommand in ("plan", "run"):
                error.message += ". The script's own arguments come last, after `--`"
            raise


def build_app() -> typer.Typer:
    """The command line as a typer application."""
    app = typer.Typer(
        name="atoll",
        cls=_Commands,
        help="Plan and run PyTorch training on whatever devices there are.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command()(probe)
    app.command()(with_modes(plan))
    app.command("run")(with_modes(run_command))
    app.command()(report)
    app.command()(audit)
    app.command()(export)
    app.command()(presets)
    app.command()(diff)
    app.command()(join)
    app.command()(standby)
    app.command(hidden=True)(authority)
    app.command()(lab)
    return app


def _options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on))
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error in Atoll itself.")] = False,
) -> None:
    """Plan and run PyTorch training on whatever devices there are."""
    if context.obj and context.invoked_subcommand not in _TAKES_SCRIPTS:
        raise AtollError(f"{' '.join(context.obj)}: `atoll {context.invoked_subcommand}` runs no script that could take what follows `--`")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"atoll {version('atoll')}")
        raise typer.Exit()


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors become sentences on stderr."""
    if sys.stdout is None:  # how Python starts when it is closed
        _complain("standard output is closed; give the command somewhere to print, such as /dev/null")
        return 1
    try:
        code = _call(arguments)
        sys.stdout.flush()
    except AtollError as error:
        if str(error):  # else a process it started has said it
            _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _CANNOT_PRINT and error.filename is None:
            _drop_output()
            _complain(f"cannot write to standard output: {error.strerror}")
            return 1
        if "--debug" in _split(list(arguments))[0]:
            traceback.print_exc()
        _complain(f"{type(error).__name__}: {error}\nThis is a fault in Atoll, not in what you gave it; `atoll --debug …` shows where.")
        return 1
    return code


def _drop_output() -> None:
    """Python would complain when it flushes stdout at exit, so give it somewhere to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _call(arguments: Sequence[str]) -> int:
    own, scripts = _split(list(arguments))
    try:
        build_app()(args=own, prog_name="atoll", obj=scripts)
    except SystemExit as end:  # how typer ends, well or not
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Atoll's own arguments, and those after the first `--`, which are the script's."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def _complain(message: str) -> None:
    if sys.stderr is None:
        return
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))


def main() -> None:
    """The entry point of the `atoll` command."""
    show_what_the_terminal_can()
    sys.exit(run(sys.argv[1:]))
