"""What `atoll plan TARGET` speaks of: a training script, or a published model by name."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.blame import located, users_code
from atoll.cli.output import stdout_to_stderr, working
from atoll.cluster.memory import memory_to_try
from atoll.cost import OPTIMIZERS
from atoll.errors import JobError
from atoll.graph import PRESETS, Graph, preset

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job

__all__ = ["Target", "load_target"]


@dataclass(frozen=True)
class Target:
    """A model to plan, with the batch and the optimizer it is trained with."""

    graph: Graph
    batch_size: int
    optimizer: str
    capture_seconds: float  # of a script, its import included
    script_seconds: float = 0.0  # of importing the script alone
    loading_seconds: float = 0.0  # processor time of a batch, where the data is at hand
    micro_batch_size: int | None = None  # that the job asks for
    notes: tuple[str, ...] = ()  # what was assumed or estimated, in sentences
    captured: "Captured | Uncaptured | None" = None  # of a script
    job: "Job | None" = None  # of a script
    own_loop: bool = False  # the script makes the steps itself


def load_target(name: str, batch_size: int | None = None, arguments: Sequence[str] = ()) -> Target:
    """The model that `name` means: a script when it looks like a path or is a file and no preset, else a preset.

    The arguments are the script's own; presets take none.
    """
    looks_like_path = name.endswith(".py") or os.sep in name
    is_preset = any(entry.name == name.lower() for entry in PRESETS)
    if looks_like_path or (not is_preset and Path(name).is_file()):
        return _from_script(name, batch_size, arguments)
    if arguments:
        raise JobError(f"{' '.join(arguments)}: what follows `--` is for a training script, and {name} is no path of one")
    started = time.perf_counter()
    try:
        found = preset(name, batch_size=batch_size)
    except JobError as error:
        if is_preset:
            raise
        raise JobError(f"{error} `atoll presets` lists them; a training script is given by its path, such as ./{name}.py") from None
    return Target(found.graph, found.batch_size, found.optimizer, time.perf_counter() - started)


def _from_script(path: str, batch_size: int | None, arguments: Sequence[str]) -> Target:
    """Import the script and capture its job. What the script prints goes to stderr, so that `--json` stays JSON."""
    with working(f"capturing {path}"), stdout_to_stderr():
        from atoll.collaboration import check_not_divided  # PyTorch takes seconds to load, and presets do without it
        from atoll.graph.eager import capture_or_run
        from atoll.script import load_script, seen_arguments

        started = time.perf_counter()
        found = load_script(path, arguments)
        script_seconds = time.perf_counter() - started
        job = found.job
        with located(path), seen_arguments(path, arguments):
            check_not_divided(job)
            captured = capture_or_run(job, check=True, most_bytes=memory_to_try())
            seconds = time.perf_counter() - started
            size = batch_size or job.batch_size
            with users_code("loading a batch"):  # workers load while the device computes
                loading_seconds = 0.0 if job.num_workers else job.samples.loading_seconds() * size / job.batch_size
            with users_code("making the optimizer and stepping it"):
                optimizer, notes = _optimizer(job)
        return Target(
            captured.graph,
            size,
            optimizer,
            seconds,
            script_seconds=script_seconds,
            loading_seconds=loading_seconds,
            micro_batch_size=job.micro_batch_size,
            notes=(*captured.notes, *notes),
            captured=captured,
            job=job,
            own_loop=found.own_loop,
        )


def _optimizer(job: "Job") -> tuple[str, tuple[str, ...]]:
    """The cost model's name for the job's optimizer; one it does not know is taken for one that keeps as much state, with a note."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = next(iter(job.turns.values())).build_optimizer([parameter])
    name = type(optimizer).__name__.lower()
    if name in OPTIMIZERS and name != "sgd":
        return name, ()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = sum(value.numel() for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
    alike = ("sgd", "momentum", "adamw")[min(2, round(state / parameter.numel()))]
    return alike, () if name == "sgd" else (f"the cost model does not know {type(optimizer).__name__}; it is priced as {alike}",)
