"""Script: from the path of a training script to the Job it defines, or to an error that shows the user's own line."""

import argparse
import ast
import atexit
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

from atoll.blame import in_words, own_frames, showing_lines
from atoll.errors import AtollError, JobError, JobFailedError
from atoll.job import Job
from atoll.randomness import own_randomness

__all__ = [
    "ImportedScript",
    "LoadedScript",
    "RunOpener",
    "execute",
    "import_again",
    "imported_scripts",
    "load_job",
    "load_script",
    "run_opener",
    "seen_arguments",
    "when_script_ends",
]

_OTHER_FILES = {".toml": "a cluster with --cluster FILE", ".plan": "a plan with --plan FILE", ".json": "a plan with --plan FILE"}
RunOpener: TypeAlias = Callable[[Job, bool], AbstractContextManager[Any]]
"""From a Job that a script runs, and whether the loop around its steps is the script's own, to its Training."""

_PREFIX = "atoll_script_"  # of the names that scripts have as modules
_Close: TypeAlias = Callable[[BaseException | None], None]
_closing: ContextVar[list[_Close] | None] = ContextVar("atoll_closing", default=None)
_opener: ContextVar[RunOpener | None] = ContextVar("atoll_run_opener", default=None)
_EXECUTED = ("step", "from_trainer")  # a script that asks `atoll` for one of these may be executed to find its Job
_EXAMPLE = "job = atoll.Job(model=…, loss=…, data=…, optimizer=…, batch_size=…, steps=…)"


@contextmanager
def seen_arguments(path: str | Path, arguments: Sequence[str] = ()) -> Iterator[None]:
    """Inside, `sys.argv` is what `python path arguments…` would make it, not the command line of Atoll."""
    before = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        yield
    finally:
        sys.argv = before


def run_opener() -> RunOpener | None:
    """What opens the runs of the script that is executed; None where nobody but the script itself says how."""
    return _opener.get()


class _Asked(BaseException):
    """A script that is only loaded asks for a run. It goes no further; no `except Exception` of its own holds it up."""

    def __init__(self, job: Job, own_loop: bool) -> None:
        super().__init__("the script asks for a run")
        self.job, self.own_loop = job, own_loop


def _ask(job: Job, own_loop: bool) -> NoReturn:
    raise _Asked(job, own_loop)


@contextmanager
def _opening(opener: RunOpener) -> Iterator[None]:
    token = _opener.set(opener)
    try:
        yield
    finally:
        _opener.reset(token)


@dataclass(frozen=True)
class LoadedScript:
    """What a script is found to train."""

    job: Job
    own_loop: bool = False  # its processes must execute it, since it makes the steps itself


def load_job(path: str | Path, arguments: Sequence[str] = ()) -> Job:
    """The one Job of a training script; the script does not train."""
    return load_script(path, arguments).job


def load_script(path: str | Path, arguments: Sequence[str] = ()) -> LoadedScript:
    """Find the Job of a training script without training.

    A script that uses `atoll.step` is executed, as `__main__`, until it asks for a run. Any other is imported (not as `__main__`) and
    defines one Job, or runs one; if it does neither but uses `atoll.from_trainer`, it is executed too. Meanwhile `sys.argv` is the script
    and its own arguments. It can import its neighbours. Its randomness starts from a fixed seed, so that a model built at import time has
    the same weights on every host.
    """
    file = Path(path)
    source = _source(file)
    try:
        with seen_arguments(path, arguments), _opening(_ask):
            if not _uses(source, ("step",)):
                defined = vars(_import_script(file, source))
                if not _uses(source, ("from_trainer",)) or any(isinstance(value, Job) for value in defined.values()):
                    return LoadedScript(_defined_job(path, file, defined))
            _let_import_neighbours(file)
            with own_randomness(0), _explained(file):
                defined = runpy.run_path(str(file.resolve()), run_name="__main__")
    except _Asked as asked:
        return LoadedScript(asked.job, asked.own_loop)
    if any(isinstance(value, Job) for value in defined.values()):
        return LoadedScript(_defined_job(path, file, defined))
    raise JobError(f"{path}: it ends without asking for a run, though it uses {' or '.join(f'atoll.{name}' for name in _EXECUTED)}")


def execute(path: str | Path, arguments: Sequence[str], opener: RunOpener) -> None:
    """Execute a script with a loop of its own as `python path arguments…` does; `opener` opens its run, which ends with the script."""
    file, closing = Path(path), list[_Close]()
    token = _closing.set(closing)
    try:
        with seen_arguments(path, arguments), _opening(opener), own_randomness(0), showing_lines():
            try:
                _run_to_its_end(file)
            except BaseException as error:
                _close_all(closing, error)
                raise
            _close_all(closing, None)
    finally:
        _closing.reset(token)


def _run_to_its_end(file: Path) -> None:
    _let_import_neighbours(file)
    try:
        runpy.run_path(str(file.resolve()), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except AtollError:
        raise
    except Exception as error:
        raise JobFailedError(f"{file.name}: {in_words(error)}") from error


def _close_all(closing: list[_Close], error: BaseException | None) -> None:
    while closing:
        closing.pop()(error)


def when_script_ends(close: _Close) -> Callable[[], None]:
    """Have `close` called at the end of the script, with the error that ended it if one did. Returns what takes that back."""
    closing = _closing.get()
    if closing is not None:
        closing.append(close)
        return lambda: closing.remove(close) if close in closing else None

    def at_exit() -> None:
        try:
            close(getattr(sys, "last_value", None))  # that nobody caught
        except AtollError as problem:  # Python would hide it
            print(f"error: {problem}", file=sys.stderr, flush=True)
            os._exit(problem.exit_code)

    atexit.register(at_exit)
    return lambda: atexit.unregister(at_exit)


def _uses(source: str, names: Sequence[str]) -> bool:
    """Whether the script asks `atoll` for one of these."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "atoll":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "atoll" and any(alias.name in names for alias in node.names):
            return True
    return False


def _defined_job(path: str | Path, file: Path, defined: Mapping[str, Any]) -> Job:
    jobs = {name: value for name, value in defined.items() if isinstance(value, Job)}
    if isinstance(jobs.get("job"), Job):
        return jobs["job"]
    different = {id(value) for value in jobs.values()}
    if not different:
        raise JobError(f"{path}: defines no atoll.Job; add at module level: {_EXAMPLE}")
    if len(different) > 1:
        where = ", ".join(f"{name} (line {_assigned_at(file, name)})" for name in jobs)
        raise JobError(f"{path}: defines several Jobs: {where}; call the one to use 'job'")
    return next(iter(jobs.values()))


class ImportedScript(NamedTuple):
    """A script that this process has imported, for another to import it too: data that is sent there may be of its classes."""

    name: str  # of its module
    file: str
    arguments: tuple[str, ...]


def imported_scripts() -> list[ImportedScript]:
    """The scripts that this process has imported, but for those whose file is gone since: nobody can import them again."""
    found = [(name, module) for name, module in sys.modules.items() if name.startswith(_PREFIX) and Path(str(module.__file__)).exists()]
    return [ImportedScript(name, str(module.__file__), module.__spec__.loader_state or ()) for name, module in found if module.__spec__]


def import_again(scripts: Sequence[ImportedScript]) -> None:
    """Import scripts that another process has imported, with the same arguments."""
    for script in scripts:
        if script.name not in sys.modules:
            file = Path(script.file)
            with seen_arguments(file, script.arguments):
                _import_script(file, _source(file))


def _source(file: Path) -> str:
    if file.is_dir():
        raise JobError(f"{file}: is a directory; give the training script itself")
    if not file.exists():
        near = sorted(file.parent.glob("*.py")) if file.parent.is_dir() else []
        hint = f"; there are {', '.join(str(path) for path in near[:5])}" if near else ""
        raise JobError(f"{file}: there is no such file{hint}")
    if file.suffix in _OTHER_FILES:
        raise JobError(f"{file}: is no training script; give the script first, and {_OTHER_FILES[file.suffix]}")
    try:
        source = file.read_text(encoding="utf-8")
        ast.parse(source, str(file))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise JobError(f"{file}:{error.lineno}: {error.msg}: {line}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the source
        raise JobError(f"{file}: cannot read it as a Python script: {error}") from error
    return source


def _let_import_neighbours(file: Path) -> None:
    """As `python path` does; for good, since what lies beside it may be imported late."""
    if str(file.resolve().parent) not in sys.path:
        sys.path.insert(0, str(file.resolve().parent))


def _import_script(file: Path, source: str) -> ModuleType:
    """Run the script as a module. It stays importable (classes refer to their module by name), as does what lies beside it."""
    name = f"{_PREFIX}{file.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(file))
    assert spec is not None
    spec.loader_state = tuple(sys.argv[1:])
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file.resolve())
    sys.modules[name] = module
    _let_import_neighbours(file)
    try:
        with own_randomness(0), _explained(file):
            exec(compile(source, module.__file__, "exec"), module.__dict__)
    except JobError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What a script raises while it is loaded is a JobError that shows its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise JobError(_explain(file, error)) from error


def _explain(file: Path, error: BaseException) -> str:
    """The error at the innermost line of the user's own code: in the script, or in a file beside it."""
    frames = own_frames(error)
    message = _exits(error) if isinstance(error, SystemExit) else str(error) if isinstance(error, AtollError) else in_words(error)
    if not frames:
        return f"{file}: {message}"
    frame = frames[-1]
    shown = file if Path(frame.filename).resolve() == file.resolve() else Path(frame.filename)
    return f"{shown}:{frame.lineno}: {message}\n    {frame.line}"


def _exits(error: SystemExit) -> str:
    """Why a script that exits cannot be imported; argparse has said on stderr what it wanted."""
    if any(frame.filename == argparse.__file__ for frame in traceback.extract_tb(error.__traceback__)):
        return f"it does not accept its arguments, {' '.join(sys.argv[1:]) or 'of which there are none'}; give them after `--`"
    return f'it exits ({error.code}) while being imported; move what runs under `if __name__ == "__main__":`'


def _assigned_at(file: Path, name: str) -> int | str:
    """The line where the script gives this name at module level."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                return node.lineno
    return "?"
