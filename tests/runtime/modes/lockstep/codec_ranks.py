"""A pipeline over two sites with each codec, in real processes.

python codec_ranks.py FOLDER: writes there what one process found and what every rank did with each codec.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[4]))

from atoll import Job
from atoll.cluster import make_cluster, make_site
from atoll.graph.capture import Captured, capture_program
from atoll.plan import CodecName, Plan, parse_plan
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import assemble
from atoll.runtime.modes.lockstep.trainer import Trainer
from tests.process_group import fork_ranks, process_group
from tests.runtime.modes.lockstep.equality_cases import even_cuts
from tests.runtime.modes.lockstep.equality_models import JOBS
from tests.runtime.modes.lockstep.equality_ranks import by_plain_loop

CODECS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4")
CLUSTER = make_cluster("c", [make_site(name, kind="A100-40GB", devices=2) for name in ("a", "b")], default_link=("1 Gbit/s", "1 ms"))


def plan_with(captured: Captured, batch_size: int, codec: CodecName) -> Plan:
    """One device in one site, two that split tensors in the other."""
    _, cut, stop = even_cuts(captured.graph, 2)
    stages = f"stage 0: layers 0-{cut - 1}: a-0/0={batch_size}\nstage 1: layers {cut}-{stop - 1} tensor=2: b-0/[0-1]={batch_size}\n"
    plan = parse_plan(f"plan v1 graph=g cluster=c batch={batch_size} micro_batch=2\n{stages}")
    return replace(plan, graph=captured.graph.name, codecs={"a–b": codec})


def rank_process(rank: int, folder: Path, job: Job, captured: Captured) -> None:
    """Every codec in turn; writes the rank's losses, the bytes it sent between stages, and a digest of each weight it holds whole."""
    found: dict[str, Any] = {}
    sent: list[int] = []
    isend = dist.isend

    def counting(tensor: torch.Tensor, dst: int, tag: int = 0) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, dst, tag=tag)

    dist.isend = counting
    for codec in CODECS:
        with process_group(folder / f"{codec}.store", rank, 3, timeout_seconds=120):
            layout = Layout(plan_with(captured, job.batch_size, codec), cluster=CLUSTER)
            work = assemble(job, layout, captured, device=torch.device("cpu"))
            trainer = Trainer(job, work, torch.device("cpu"))
            try:
                trainer.train()
            finally:
                work.feed.close()
            whole = {owned.name: owned.leaf.detach().double().sum().item() for owned in work.owned if owned.holding.dim is None}
            found[codec] = {"losses": trainer.losses, "sent": sum(sent), "whole": whole}
            sent.clear()
            dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main(folder: Path) -> None:
    """Capture once, then go on as three processes."""
    torch.set_num_threads(1)
    job = dataclasses.replace(JOBS["gpt2"](), steps=5)
    captured = capture_program(job)
    (folder / "alone.json").write_text(json.dumps(by_plain_loop(job).losses), encoding="utf-8")
    sys.exit(fork_ranks(3, rank_process, folder, job, captured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
