"""What startup.py compares with: the same model, data, optimizer and batch with plain DistributedDataParallel under `torchrun`.

torchrun --standalone --nproc-per-node=2 benchmarks/startup_ddp.py RUN      notes phases and steps in RUN/events.jsonl
"""

import json
import os
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()

import torch  # noqa: E402 - loading it is one of the phases
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

IMPORTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from language_model import SEQUENCE, LanguageModel, loss  # noqa: E402

from atoll.data import StandardLibraryText  # noqa: E402

BATCH, STEPS = 16, 3


def main(run: Path) -> None:
    """Train for some steps."""
    loaded = time.perf_counter()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    met = time.perf_counter()
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    data = StandardLibraryText(sequence_length=SEQUENCE)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=DistributedSampler(data))
    built = time.perf_counter()
    phases = {"PyTorch loaded": IMPORTED - BEGAN, "script loaded": loaded - IMPORTED, "ranks met": met - loaded, "model built": built - met}
    events = [{"event": "phase_finished", "phase": name, "seconds": seconds} for name, seconds in phases.items()]
    for step, batch in zip(range(STEPS), loader, strict=False):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        events.append({"event": "step_finished", "step": step + 1, "seconds": time.perf_counter() - began})
        if rank == 0:
            run.mkdir(exist_ok=True)
            written = run / "events.tmp"
            written.write_text("\n".join(json.dumps(event) for event in events) + "\n")
            os.replace(written, run / "events.jsonl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
