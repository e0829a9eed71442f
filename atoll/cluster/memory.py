"""Memory of this process: how much it may use (the machine's, or less where a control group limits it), and keeping what it freed."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ClusterError

__all__ = ["HostMemory", "host_memory", "keep_freed_memory", "memory_to_try"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)
_LARGEST_BLOCK = 32 * 2**20  # the most that older C libraries accept


@dataclass(frozen=True)
class HostMemory:
    """Memory in bytes: all there is for this process, and what of it is free now."""

    total_bytes: float
    available_bytes: float


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The memory of this machine, limits of control groups (version 1 and 2) honoured. `root` is for tests."""
    total, available = _meminfo(root) or _sysconf()
    for limit, used in _limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0.0))
    return HostMemory(total_bytes=total, available_bytes=available)


def _meminfo(root: Path) -> tuple[float, float] | None:
    try:
        lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
        sizes = {key: float(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines) if rest.split()}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return None


def _sysconf() -> tuple[float, float]:
    try:
        total = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        raise ClusterError("probe: this system does not tell how much memory it has; write a cluster file by hand") from None
    return total, total


def _limits(root: Path) -> list[tuple[float, float]]:
    """(limit, use) of this process's memory control group and of those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    found: list[tuple[float, float]] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            found += _group_limits(root / "sys/fs/cgroup", path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _group_limits(root / "sys/fs/cgroup/memory", path, names)
    return found


def _group_limits(mount: Path, path: str, names: tuple[str, str, str]) -> list[tuple[float, float]]:
    limit_name, used_name, cache_name = names
    group = mount / path.strip("/")
    found = []
    for directory in (group, *group.parents):
        limit = _number(directory / limit_name)
        if limit is not None:
            used = (_number(directory / used_name) or 0.0) - _statistic(directory / "memory.stat", cache_name)
            found.append((limit, max(used, 0.0)))
        if directory == mount:
            break
    return found


def _number(file: Path) -> float | None:
    """A file's number; none when it is not there or says "max"."""
    try:
        return float(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> float:
    """File pages that would be given back under pressure do not count as used."""
    try:
        fields = dict(line.split(maxsplit=1) for line in file.read_text("utf-8").splitlines())
        return float(fields.get(name, "0"))
    except (OSError, ValueError):
        return 0.0


def keep_freed_memory(largest_bytes: int = _LARGEST_BLOCK, one_arena: bool = False) -> bool:
    """Have this process keep the memory of freed tensors up to that size for the next ones; False where its C library has no such setting.

    Every training step frees its activations and asks for as many again. By default glibc hands them back to the system in between, and
    touching fresh pages costs as much as computing on them: steps on a CPU take 5 to 20% longer, by chance of what was freed before.
    `one_arena` is for processes whose threads free what others allocated: what is freed is then there for all of them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    if one_arena:
        mallopt(_M_ARENA_MAX, 1)
    return bool(mallopt(_M_MMAP_THRESHOLD, largest_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def memory_to_try() -> float:
    """Bytes that the weights of a model may have to be run once on this host: gradients and activations come to them."""
    return host_memory().available_bytes / 4
