"""Evaluating: what a swarm has learnt, from a checkpoint, in a process of its own while training goes on.

The process holds the whole model, on the machine where the run was started. Workers go on meanwhile, and whatever happens to it costs
them nothing; the numbers are those of one process that evaluates after the same step.
"""

import asyncio
import sys

import msgspec
import torch

from atoll.errors import CheckpointError, JobFailedError
from atoll.events import Evaluated
from atoll.job import Job
from atoll.runtime.checkpoint.directory import step_path
from atoll.runtime.checkpoint.manifest import MODEL
from atoll.runtime.checkpoint.state_file import BUFFER, StateReader, cut
from atoll.runtime.evaluation import evaluate
from atoll.runtime.run_directory import RunDirectory

__all__ = ["evaluate_elsewhere", "evaluate_state"]


def evaluate_state(directory: RunDirectory, job: Job, step: int) -> Evaluated:
    """In the process of its own."""
    torch.set_num_threads(1)
    model = job.build_model("cpu")
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        saved = StateReader(cut(step_path(directory.checkpoints, step), named))
    except CheckpointError as error:
        raise JobFailedError(f"the checkpoint of step {step} is not there any more ({error})") from error
    for name, value in named.items():
        for key in (MODEL + name, BUFFER + name):
            if key in saved:
                saved.fill(key, value)
    dataset = job.eval_dataset
    assert dataset is not None
    return evaluate(job, model, torch.device("cpu"), step, dataset)


async def evaluate_elsewhere(directory: RunDirectory, step: int) -> Evaluated:
    """Starts that process and waits for what it found; JobFailedError with its sentence if it found nothing."""
    command = [sys.executable, "-m", "atoll.cli.swarm_process", "evaluate", str(directory.path.resolve())]
    process = await asyncio.create_subprocess_exec(
        *command, str(step), "evaluation", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaints = await process.communicate()
    if process.returncode:
        said = complaints.decode(errors="replace").strip().splitlines()
        raise JobFailedError(said[-1].removeprefix("error: evaluation: ") if said else f"it ended with {process.returncode}")
    return msgspec.json.decode(out.splitlines()[-1], type=Evaluated)
