"""Waiting for processes to end, of which any may be gone at any moment."""

import time

import psutil

__all__ = ["is_gone", "wait_until_gone"]


def is_gone(pid: int) -> bool:
    """Whether nothing runs there."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    """Fails by the test's time-out."""
    while not all(map(is_gone, pids)):
        time.sleep(0.02)
