"""Whose speed a worker has where a lab imposes speeds. The environment is read by those who start a process and given here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.lab.environment import find_lab

if TYPE_CHECKING:
    from atoll.runtime.swarm.pacing import Imposed

__all__ = ["imposed_speed"]

_SPEEDS = "ATOLL_SPEEDS"  # as `atoll.runtime.lockstep.pacing` calls it; importing that would load PyTorch


def imposed_speed(environ: Mapping[str, str]) -> "Imposed | None":
    """That of the first device of the lab's host this process is on; None where nothing is imposed."""
    lab = find_lab(environ)
    if lab is None or not environ.get(_SPEEDS):
        return None
    from atoll.runtime.swarm.pacing import Imposed

    return Imposed(environ[_SPEEDS], f"{lab.host}/0")
