"""Atoll: adaptive training over low-bandwidth links.

`atoll.Job` is what a training script defines; `atoll.replica`, `split`, `stage`, `pipeline`, `default` are demands on the plan.
Everything is loaded when it is first asked for, so that `import atoll` is cheap and planning needs no more than it uses.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.callbacks import BestCheckpoint, EarlyStopping, RunHandle, Snapshot
    from atoll.cluster import Cluster, load_cluster
    from atoll.collaboration import Part, Receive, collaborate, top_k
    from atoll.errors import AtollError
    from atoll.events import StopTraining
    from atoll.graph import Graph, default, pipeline, replica, split, stage
    from atoll.graph.capture import capture
    from atoll.hugging_face.trainer import from_trainer
    from atoll.job import Job, RunResult
    from atoll.loop import step
    from atoll.plan import Plan
    from atoll.script import load_job

__all__ = [
    "AtollError",
    "BestCheckpoint",
    "Cluster",
    "EarlyStopping",
    "Graph",
    "Job",
    "Part",
    "Plan",
    "Receive",
    "RunHandle",
    "RunResult",
    "Snapshot",
    "StopTraining",
    "capture",
    "collaborate",
    "default",
    "from_trainer",
    "load_cluster",
    "load_job",
    "pipeline",
    "replica",
    "split",
    "stage",
    "step",
    "top_k",
]

_HOME = {
    "AtollError": "atoll.errors",
    "BestCheckpoint": "atoll.callbacks",
    "Cluster": "atoll.cluster",
    "EarlyStopping": "atoll.callbacks",
    "Graph": "atoll.graph",
    "Job": "atoll.job",
    "Part": "atoll.collaboration",
    "Plan": "atoll.plan",
    "Receive": "atoll.collaboration",
    "RunHandle": "atoll.callbacks",
    "RunResult": "atoll.job",
    "Snapshot": "atoll.callbacks",
    "StopTraining": "atoll.events",
    "capture": "atoll.graph.capture",
    "collaborate": "atoll.collaboration",
    "default": "atoll.graph",
    "from_trainer": "atoll.hugging_face.trainer",
    "load_cluster": "atoll.cluster",
    "load_job": "atoll.script",
    "pipeline": "atoll.graph",
    "replica": "atoll.graph",
    "split": "atoll.graph",
    "stage": "atoll.graph",
    "step": "atoll.loop",
    "top_k": "atoll.collaboration",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
