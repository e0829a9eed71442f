"""A trial: the first steps of a job by its plan, on the machine it will run on, before people are told what a step takes.

A probe knows operators; what Python, autograd, the exchange of gradients and busy neighbours add to this very job is found by making its
steps for a second or two. Ranks do what they do in a run, but nobody is told and nothing is kept: no callback, evaluation or checkpoint.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from atoll.cluster import Cluster, dump_cluster
from atoll.cost import Calibration
from atoll.events import StepFinished, read_events
from atoll.graph import Graph
from atoll.job import Job
from atoll.plan import Plan
from atoll.runtime.modes.lockstep.calibration import calibrate
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import read_measured
from atoll.runtime.modes.lockstep.supervisor import launch
from atoll.runtime.run_directory import SPEEDS, RunDirectory, RunSettings
from atoll.runtime.supervise.hosts import ProcessHost
from atoll.runtime.training import Training

__all__ = ["Trial", "job_to_try", "silenced", "try_plan", "try_steps"]

_WARM = 2  # steps that find memory and caches as no later one does; in the second, exchanges are counted
_LEAST, _MOST = 3, 100  # steps that count
_SURE = 0.04  # of the median: its standard error, above which a trial goes on
_LONGER = 8.0  # times as long as asked, at most: beside busy neighbours steps differ by half


class Trial(NamedTuple):
    """What steps took, and the constants with which the cost model says so."""

    step_seconds: float  # the median
    steps: int  # that counted
    calibration: Calibration


def try_plan(graph: Graph, plan: Plan, cluster: Cluster, *, script: Path, host: ProcessHost, seconds: float) -> Trial | None:
    """Make steps for about so many seconds with all of the plan's ranks on `host`; None where that failed.

    KeyboardInterrupt where somebody asked to stop meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-trial-") as folder:
        directory = RunDirectory(Path(folder) / "run")
        directory.create(RunSettings(script=str(script), speeds=os.environ.get(SPEEDS) or None, trial_seconds=seconds))
        directory.write_plan(plan)
        directory.write(directory.cluster.name, dump_cluster(cluster))
        devices = Layout(plan).devices
        command = [host.python, "-m", "atoll.cli.worker", str(directory.path)]
        result = launch(lambda rank, generation: command, len(devices), devices=devices, hosts=[host] * len(devices))
        if result.interrupted:
            raise KeyboardInterrupt
        ranks = read_measured(directory) if not result.exit_code else []
        if len(ranks) < len(devices):
            return None
        steps = [event.seconds for event in read_events(directory.events) if isinstance(event, StepFinished)][_WARM:]
    if not steps:
        return None
    usual = median(steps)  # ranks keep their last steps only
    ranks = [msgspec.structs.replace(rank, step_seconds=usual) for rank in ranks]
    return Trial(usual, len(steps), calibrate(graph, cluster, plan, ranks))


def job_to_try(job: Job) -> Job:
    """The same job with the same data, but without what others would notice of its steps."""
    tried: Job = object.__new__(type(job))  # what the job was built with was checked, and what it has loaded since is kept
    nothing = {"callbacks": (), "eval_data": None, "eval_every": None, "eval_dataset": None, "eval_samples": None}
    tried.__dict__.update({**job.__dict__, **nothing})
    return tried


def try_steps(training: Training, seconds: float, *, is_first: bool, clock: Callable[[], float] = time.perf_counter) -> None:
    """Steps for about so long, or longer where they differ much. The first rank says when it is over: once three count, or one where steps
    are long.
    """
    began, taken = clock(), list[float]()
    while training.reason is None:
        step = clock()
        training.step()
        now = clock()
        taken.append(now - step)
        made = len(training.losses) + 1 - _WARM  # with the one that follows the word
        then = 2 * now - step - began
        over = then > seconds * (1.0 if _is_known(taken[_WARM:]) else _LONGER) or made >= _MOST
        if is_first and over and made >= (_LEAST if now - began < 2 * seconds else 1):
            training.stop()


def _is_known(seconds: Sequence[float]) -> bool:
    """Whether the median of more steps would be about that of these."""
    if len(seconds) < _LEAST:
        return True  # long steps: three or fewer have to do
    low, middle, high = quantiles(seconds, n=4)
    return 0.93 * (high - low) / math.sqrt(len(seconds)) <= _SURE * middle


def silenced(descriptors: Sequence[int] = (1, 2)) -> None:
    """What this process prints from here on is not seen: the run itself prints it again."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
