"""What a lab may leave behind on this machine: looked at from outside, before and after."""

import re
import subprocess
import time
from pathlib import Path

import psutil

__all__ = ["eventually", "left_of", "namespaces", "outside"]


def outside() -> dict[str, list[str]]:
    """Namespaces, links and mounts of a lab's kind as this machine sees them; what other programs make meanwhile does not count."""
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        "networks": sorted(path.name for path in Path("/run/netns").glob("*") if re.fullmatch(r"[hs]\d+|lab", path.name)),
        "links": sorted(line.split()[0] for line in links if re.match(r"(br0|tun0|p\d+|eth0)[@ ]", line)),
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if line.startswith("atoll ")],
    }


def left_of(lab: str) -> list[str]:
    """Processes that belong to a lab: in their arguments or environment is its name."""
    found = []
    for process in psutil.process_iter():
        try:
            if lab in " ".join(process.cmdline()) or process.environ().get("ATOLL_LAB") == lab:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def namespaces(pids: list[int]) -> set[str]:
    """The network namespaces of processes, so that it can be asked later whether anybody still is in one."""
    return {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid in pids}


def eventually(condition: object) -> None:
    """Waits until something is so; a test that waits here too long fails."""
    assert callable(condition)
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "this did not happen within a minute"
        time.sleep(0.02)
