"""Evaluating: what a swarm has learnt, from a checkpoint, in a process of its own while training goes on.

The process holds the whole model, on the machine where the run was started. Workers go on meanwhile, and whatever happens to it costs
them nothing; the numbers are those of one process that evaluates after the same step.
"""

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import torch

from atoll.errors import JobFailedError
from atoll.events import Evaluated
from atoll.job import Job
from atoll.runtime.alone import evaluate
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.files import CheckpointFiles, Key, States
from atoll.runtime.swarm.run_files import STATES
from atoll.runtime.swarm.weights import whole_state

__all__ = ["evaluate_elsewhere", "evaluate_state", "evaluates_after"]


def evaluates_after(job: Job, step: int, steps: int) -> bool:
    """Whether the job wants to know after this step."""
    if job.eval_data is None:
        return False
    return step == steps or (job.eval_every is not None and step % job.eval_every == 0)


def evaluate_state(directory: RunDirectory, job: Job, keys: Sequence[Key]) -> Evaluated:
    """In the process of its own."""
    torch.set_num_threads(1)
    tensors = asyncio.run(whole_state(CheckpointFiles(directory.path / STATES), keys))
    if tensors is None:
        raise JobFailedError(f"the states after step {keys[0].version} are not there any more")
    model = job.build_model("cpu")
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in tensors:
                value.copy_(tensors[name])
    dataset = job.eval_dataset
    assert dataset is not None
    return evaluate(job, model, torch.device("cpu"), keys[0].version, dataset)


async def evaluate_elsewhere(directory: RunDirectory, states: States, keys: Sequence[Key]) -> Evaluated:
    """Starts that process and waits for what it found; JobFailedError with its sentence if it found nothing.

    It reads files: states that are kept elsewhere are brought here, and those of evaluations before are removed.
    """
    await _bring(states, CheckpointFiles(directory.path / STATES), keys)
    command = [sys.executable, "-m", "atoll.cli.swarm_process", "evaluate", str(directory.path.resolve())]
    process = await asyncio.create_subprocess_exec(
        *command, msgspec.json.encode(keys).decode(), "evaluation", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaints = await process.communicate()
    if process.returncode:
        said = complaints.decode(errors="replace").strip().splitlines()
        raise JobFailedError(said[-1].removeprefix("error: evaluation: ") if said else f"it ended with {process.returncode}")
    return msgspec.json.decode(out.splitlines()[-1], type=Evaluated)


async def _bring(states: States, files: CheckpointFiles, keys: Sequence[Key]) -> None:
    if isinstance(states, CheckpointFiles):
        return
    await files.forget_before(keys[0].version)
    for key in keys:
        content = await states.read(key)
        if content is not None:
            await files.write(key, content)
