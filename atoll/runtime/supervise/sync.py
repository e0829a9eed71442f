"""Sync: the directory of a run's script, copied to the working directory of a host that is reached over ssh.

By rsync if both sides have it, else as an archive that the host's Python unpacks. Files that are only there are left alone.
"""

import contextlib
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from atoll.errors import AtollError
from atoll.runtime.supervise.ssh import OverSsh

__all__ = ["copy_directory"]

_NOT_COPIED = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs")
_MAKE = "import os,shutil,sys;os.makedirs(os.path.expanduser(sys.argv[1]),exist_ok=True);print(bool(shutil.which('rsync')))"
_FREE = "import os,shutil,sys;print(shutil.disk_usage(os.path.expanduser(sys.argv[1])).free)"
_UNPACK = "import os,sys,tarfile;tarfile.open(fileobj=sys.stdin.buffer,mode='r|').extractall(os.path.expanduser(sys.argv[1]),filter='data')"


def copy_directory(host: OverSsh, folder: Path, run: Path, *, rsync: bool = True) -> None:
    """Copies a directory, without what is made from it or about it: environments, caches, repositories, runs. AtollError where it fails."""
    assert host.facts  # an error where it is not reached
    try:
        has_rsync = host.ask(_MAKE, host.directory).strip() == "True"
    except AtollError as error:
        why = str(error).removeprefix(f"host {host.name!r}: ")
        raise AtollError(f"host {host.name!r}: the directory {host.directory} cannot be made there: {why}") from None
    inside = run.resolve().is_relative_to(folder)
    omitted = (*_NOT_COPIED, *([f"/{run.resolve().relative_to(folder).as_posix()}"] if inside else []))
    by_rsync = rsync and has_rsync and shutil.which("rsync") is not None
    code, said = _by_rsync(host, folder, omitted) if by_rsync else _as_archive(host, folder, omitted)
    if code:
        full = "No space left" in said or "quota" in said.lower() or _has_no_room(host, folder)
        raise AtollError(f"host {host.name!r}: {_why_not(said, code, folder, host.directory, full)}")


def _has_no_room(host: OverSsh, folder: Path) -> bool:
    """Whether less is free there than the directory has: rsync may end without a word then."""
    try:
        return int(host.ask(_FREE, host.directory)) < sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except (AtollError, OSError, ValueError):
        return False


def _by_rsync(host: OverSsh, folder: Path, omitted: Sequence[str]) -> tuple[int, str]:
    *ssh, address = host.ssh
    there = host.directory.removeprefix("~/") or "."  # relative to the home directory there
    target = f"[{address}]:{there}/" if ":" in address else f"{address}:{there}/"
    command = ["rsync", "-a", "-s", *(f"--exclude={name}" for name in omitted), "-e", shlex.join(ssh), f"{folder}/", target]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return done.returncode, done.stderr


def _as_archive(host: OverSsh, folder: Path, omitted: Sequence[str]) -> tuple[int, str]:
    far = shlex.join(["exec", host.python, "-I", "-S", "-c", _UNPACK, host.directory])
    with subprocess.Popen([*host.ssh, far], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has said why
            with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
                archive.add(folder, ".", filter=lambda member: None if _is_omitted(member.name, omitted) else member)
            process.stdin.close()
        said = process.stderr.read().decode(errors="replace")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return process.returncode, said


def _is_omitted(name: str, omitted: Sequence[str]) -> bool:
    path = PurePosixPath(name)
    return path.name in omitted or f"/{path.as_posix()}" in omitted


def _why_not(said: str, code: int, folder: Path, directory: str, full: bool) -> str:
    if full:
        return f"copying {folder} to {directory}: the disk there is full; make room, or set `workdir` in the cluster file"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "denied" in line.lower()] or lines or [f"exit code {code}"]
    return f"copying {folder} to {directory} failed: {telling[0]}"
