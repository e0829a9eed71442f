"""Whose speed a worker has where a lab imposes speeds. The environment is read by those who start a process and given here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.runtime.run_directory import SPEEDS
from atoll.runtime.supervise.hosts import find_lab

if TYPE_CHECKING:
    from atoll.runtime.imposed_speed import Imposed

__all__ = ["imposed_speed"]


def imposed_speed(environ: Mapping[str, str]) -> "Imposed | None":
    """That of the first device of the lab's host this process is on; None where nothing is imposed."""
    lab = find_lab(environ)
    if lab is None or not environ.get(SPEEDS):
        return None
    from atoll.runtime.imposed_speed import Imposed

    return Imposed(environ[SPEEDS], f"{lab.host}/0")
