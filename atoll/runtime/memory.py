"""Memory of a process that trains: what one step frees the next one uses again.

glibc gives large blocks back to the kernel at once, and every step then pays for clearing the same pages: for a stage of ten million
parameters about 0.1 s a step in page faults, as long as three of its tensor operations take.
"""

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt(3)
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Has malloc keep what is freed, in one arena for all threads. Does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _LARGEST), (_ARENA_MAX, 1)):
        mallopt(option, value)
