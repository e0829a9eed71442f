"""Script: from the path of a training script to the Job it defines, or to an error that shows the user's own line."""

import argparse
import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from atoll.blame import in_words, own_frames
from atoll.errors import AtollError, JobError
from atoll.job import Job
from atoll.randomness import own_randomness

__all__ = ["load_job", "seen_arguments"]

_OTHER_FILES = {".toml": "a cluster with --cluster FILE", ".plan": "a plan with --plan FILE", ".json": "a plan with --plan FILE"}
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


def load_job(path: str | Path, arguments: Sequence[str] = ()) -> Job:
    """Import a training script (not as `__main__`, so it does not train) and return the one Job it defines.

    While it is imported, `sys.argv` is the script and its own arguments. It can import its neighbours. Its randomness starts from a fixed
    seed, so that a model built at import time has the same weights on every host.
    """
    file = Path(path)
    with seen_arguments(path, arguments):
        module = _import_script(file, _source(file))
    jobs = {name: value for name, value in vars(module).items() if isinstance(value, Job)}
    if isinstance(jobs.get("job"), Job):
        return jobs["job"]
    different = {id(value) for value in jobs.values()}
    if not different:
        raise JobError(f"{path}: defines no atoll.Job; add at module level: {_EXAMPLE}")
    if len(different) > 1:
        where = ", ".join(f"{name} (line {_assigned_at(file, name)})" for name in jobs)
        raise JobError(f"{path}: defines several Jobs: {where}; call the one to use 'job'")
    return next(iter(jobs.values()))


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


def _import_script(file: Path, source: str) -> ModuleType:
    """Run the script as a module. It stays importable (classes refer to their module by name), as does what lies beside it."""
    name = f"atoll_script_{file.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(file))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file.resolve())
    sys.modules[name] = module
    if str(file.resolve().parent) not in sys.path:
        sys.path.insert(0, str(file.resolve().parent))
    try:
        with own_randomness(0):
            exec(compile(source, module.__file__, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise JobError(_explain(file, error)) from error
    return module


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
