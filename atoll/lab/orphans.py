"""What a lab that died without a chance to tidy up may have left: processes that hold it alive, and files of a lab without namespaces.

Normally there is nothing: a lab's processes see it end and end with it. But one of them may have been stopped just then, or another program
may hold the pipe. So the next lab, and `atoll lab --clean`, look for whatever belongs to a dead lab. Only what this user may touch is
looked at.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

__all__ = ["LAB_FILES", "OWNER", "mark", "remove_orphans"]

LAB_FILES = "atoll-lab-"
OWNER = "ATOLL_LAB_OWNER"  # in the environment of every process of a lab


def mark(pid: int) -> str:
    """A process of this boot and PID namespace, by which it can be told whether it still lives: `1234.98765.4026531836`."""
    return f"{pid}.{_started(pid)}.{os.stat('/proc/self/ns/pid').st_ino}"


def remove_orphans() -> list[str]:
    """Removes what dead labs left; says what that was."""
    if not os.path.isdir("/proc/self/ns"):
        return []
    removed = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (owner := _owner(int(name))) and _dead(owner):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(name), signal.SIGKILL)
                removed.append(f"process {name}")
    for folder in Path(tempfile.gettempdir()).glob(f"{LAB_FILES}*"):
        if _dead(folder.name.removeprefix(LAB_FILES).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


def _owner(pid: int) -> str | None:
    """The mark of the lab a process belongs to."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{OWNER}=".encode()
    return next((entry.removeprefix(prefix).decode(errors="replace") for entry in environ if entry.startswith(prefix)), None)


def _dead(owner: str) -> bool:
    """Whether that process has ended. Marks of other PID namespaces cannot be judged from here."""
    pid, _, rest = owner.partition(".")
    started, _, namespace = rest.partition(".")
    if not pid.isdigit() or namespace != str(os.stat("/proc/self/ns/pid").st_ino):
        return False
    return _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
