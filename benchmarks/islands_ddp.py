"""A rank of DDP for `islands.py`: the same job in a loop as anybody writes it, over Gloo.

    islands_ddp.py HOOK TARGET STEPS BATCH LEARNING_RATE SEED EVALUATE_EVERY      # HOOK: none or fp16

Rank 0 prints a line of JSON for every evaluation: seconds since the first step began, step, loss. All end at the target. With the target
0 nothing is evaluated, and a line has the seconds after each step.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from atoll.script import load_job


def main() -> None:
    """Train until the target is reached."""
    hook, target, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    job = load_job(Path(__file__).with_name("islands_job.py"), arguments)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(job.build_model("cpu"))
    if hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = job.build_optimizer(model.parameters())
    share = job.batch_size // ranks
    assert job.eval_samples is not None
    held_out = job.eval_samples.at(range(job.eval_samples.length))
    dist.barrier()
    began = time.perf_counter()
    for step in range(1, job.total_steps + 1):
        optimizer.zero_grad()
        job.loss(model, job.samples.batch(step - 1, rank * share, (rank + 1) * share)).backward()
        optimizer.step()
        if float(target) == 0.0:
            if rank == 0:
                print(json.dumps({"seconds": time.perf_counter() - began, "step": step, "loss": 0.0}), flush=True)
            continue
        if step % (job.eval_every or 1):
            continue
        loss = torch.zeros(1)
        if rank == 0:
            with torch.no_grad():
                loss[0] = job.loss(model.module, held_out)
            print(json.dumps({"seconds": time.perf_counter() - began, "step": step, "loss": float(loss)}), flush=True)
        dist.broadcast(loss, 0)
        if float(loss) <= float(target):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
