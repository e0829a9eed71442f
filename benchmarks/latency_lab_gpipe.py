"""A rank of the GPipe pipeline of `latency_lab.py`: PyTorch's own `ScheduleGPipe` over Gloo, at the imposed speed of its device.

    python latency_lab_gpipe.py RANK CLUSTER.toml DEVICE STEPS BATCH MICRO_BATCH CHUNKS[,CHUNKS…]

One step of every setting is not timed. The last rank prints a JSON line for each: chunks, seconds of the steps, losses of all steps.
"""

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from atoll.cluster.memory import keep_freed_memory
from atoll.graph.capture import capture_program
from atoll.job import Job
from atoll.runtime.imposed_speed import Imposed, Pace, pace_of_worker
from atoll.script import load_job

SCRIPT = Path(__file__).with_name("latency_lab_job.py")


class PacedStage(PipelineStage):
    """Computes a chunk no faster than the pace says."""

    pace: Pace

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.pace.imposed(self.stage_index, 0, False):
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.pace.imposed(self.stage_index, 0, True):
            return super().backward_one_chunk(*arguments, **named)


def train(job: Job, module: ModuleType, pace: Pace, chunks: int, steps: int) -> dict[str, object]:
    """Some steps from the first weights on, the first of them not timed."""
    rank = dist.get_rank()
    own = module.part(job.build_model("cpu"), rank)
    stage = PacedStage(own, rank, module.STAGES, torch.device("cpu"))
    stage.pace = pace
    schedule = ScheduleGPipe(stage, chunks, loss_fn=module.error)
    optimizer = module.optimizer(own.parameters())
    losses: list[float] = []
    began = 0.0
    for number in range(1 + steps):
        if number == 1:
            dist.barrier()
            began = time.perf_counter()
        inputs, wanted = job.samples.batch(number)
        optimizer.zero_grad()
        own_losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        elif rank == module.STAGES - 1:
            schedule.step(target=wanted, losses=own_losses, return_outputs=False)
            losses.append(float(torch.stack(own_losses).mean()))
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
    dist.barrier()
    return {"chunks": chunks, "seconds": time.perf_counter() - began, "steps": steps, "losses": losses}


def main() -> None:
    """All settings, one after the other."""
    rank, file, device, steps, batch, micro_batch, settings = sys.argv[1:8]
    torch.set_num_threads(1)
    keep_freed_memory(2**31 - 1, one_arena=True)
    job = load_job(SCRIPT, (steps, batch, micro_batch))
    module = sys.modules[type(job.dataset).__module__]
    graph = capture_program(job).graph
    dist.init_process_group("gloo", rank=int(rank), world_size=module.STAGES)
    for chunks in map(int, settings.split(",")):
        pace = pace_of_worker(Imposed(file, device), graph, module.bounds(len(graph.layers)), [(0, int(batch) // chunks)])
        found = train(job, module, pace, chunks, int(steps))
        if dist.get_rank() == module.STAGES - 1:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
