"""Atoll: adaptive training over low-bandwidth links.

`atoll.Job` is what a training script defines; everything else is loaded when it is first asked for, so that `import atoll` is cheap.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.events import StopTraining
    from atoll.graph.annotations import default, pipeline, replica, split, stage
    from atoll.job import Job, RunResult

__all__ = ["Job", "RunResult", "StopTraining", "default", "pipeline", "replica", "split", "stage"]

_HOME = {
    "Job": "atoll.job",
    "RunResult": "atoll.job",
    "StopTraining": "atoll.events",
    "default": "atoll.graph.annotations",
    "pipeline": "atoll.graph.annotations",
    "replica": "atoll.graph.annotations",
    "split": "atoll.graph.annotations",
    "stage": "atoll.graph.annotations",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
