"""Plans in real processes, compared with plain PyTorch in one.

python equality_ranks.py FOLDER TASKS.json: captures every job of the tasks and trains it once in a plain loop, goes on as four processes,
and runs each task's plan in the first so many of them. What every rank found of every task is written to FOLDER/found.json.
"""

import dataclasses
import gc
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[4]))

from atoll import Job
from atoll.errors import AtollError
from atoll.graph.capture import Captured, capture_program
from atoll.plan import Plan, validate
from atoll.runtime.evaluated_programs import capture_evaluated
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import RankWork, assemble
from atoll.runtime.modes.lockstep.sharding import OptimizerShard
from atoll.runtime.modes.lockstep.trainer import Trainer
from atoll.runtime.stage.compilation import compiler_for
from tests.process_group import fork_ranks, process_group
from tests.runtime.modes.lockstep.equality_cases import plan_of
from tests.runtime.modes.lockstep.equality_models import JOBS
from tests.runtime.modes.lockstep.equality_random import random_plan

PROCESSES = 4
DRAWN_STEPS = 3  # of plans that are drawn: there are many of them
CPU = torch.device("cpu")


@dataclass
class Reference:
    """What one process computes."""

    losses: list[float]
    weights: dict[str, Tensor]
    evaluations: list[tuple[float | None, dict[str, float | None]]]


@dataclass
class Subject:
    """A job, ready to be run under plans."""

    job: Job
    captured: Captured
    evaluated: dict[str, Captured]
    reference: Reference


def subject_of(job: Job, captured: Captured) -> Subject:
    plain = dataclasses.replace(job, compile=False)
    reference = by_atoll_alone(plain) if job.micro_batch_size or job.eval_data is not None else by_plain_loop(plain)
    return Subject(job, captured, capture_evaluated(job), reference)


def by_plain_loop(job: Job) -> Reference:
    """Training as anyone would write it, on the whole batch at once."""
    model = _with_simple_experts(job.build_model())
    optimizer = job.build_optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    context: Any = torch.autocast("cpu", job.compute_dtype) if job.precision != "fp32" else nullcontext()
    losses = []
    for step in range(job.total_steps):
        with context:
            result = job.loss(model, job.samples.batch(step))
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if job.max_grad_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return Reference(losses, {name: value.detach() for name, value in model.named_parameters()}, [])


def _with_simple_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Hugging Face's mixtures as a loop over experts: nothing like what is tested."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return model


def by_atoll_alone(job: Job) -> Reference:
    """Where dropout has to draw the same numbers, statistics depend on micro-batches, or evaluations are compared: `job.run()`."""
    result = job.run(progress=False)
    weights = {name: value.detach() for name, value in result.model.named_parameters()}
    return Reference(list(result.losses), weights, [(e.loss, dict(e.metrics)) for e in result.evaluations])


def compare(subject: Subject, layout: Layout) -> dict[str, float]:
    """Train this process's rank of the layout; how far it is from the reference."""
    job = subject.job
    work = assemble(job, layout, subject.captured, device=CPU, evaluated=subject.evaluated, compiler=compiler_for(job, CPU))
    trainer = Trainer(job, work, CPU)
    try:
        trainer.train()
    finally:
        work.feed.close()
    return differences(trainer, work, subject.reference)


def differences(trainer: Trainer, work: RankWork, reference: Reference) -> dict[str, float]:
    """How far a finished run is from the reference; all ranks ask together."""
    found = {
        "steps": float(len(trainer.losses)),
        "losses": max(_relative(own, true) for own, true in zip(trainer.losses, reference.losses, strict=True)),
        "weights": max((_weight_difference(owned, reference.weights[owned.name]) for owned in work.owned), default=0.0),
        "missing": float(_missing_elements(work, reference)),
    }
    own = [(e.loss, dict(e.metrics)) for e in trainer.evaluations]
    if reference.evaluations:
        found["evaluations"] = _evaluation_difference(own, reference.evaluations)
    return found


def _relative(own: float, true: float) -> float:
    return abs(own - true) / abs(true) if math.isfinite(own) else math.inf


def _evaluation_difference(own: Sequence[tuple[Any, dict[str, Any]]], true: Sequence[tuple[Any, dict[str, Any]]]) -> float:
    worst = 0.0
    for (own_loss, own_metrics), (true_loss, true_metrics) in zip(own, true, strict=True):
        assert own_metrics.keys() == true_metrics.keys()
        worst = max(worst, _relative(own_loss, true_loss), *(abs(own_metrics[name] - true_metrics[name]) for name in true_metrics), 0.0)
    return worst


def spread(owned: OptimizerShard) -> Tensor:
    """What a rank owns of a parameter in its place in the whole, NaN elsewhere."""
    whole = torch.full(owned.holding.shape, math.nan, dtype=owned.leaf.dtype)
    part = owned.leaf.detach()
    if owned.flat is not None:
        part = torch.full(owned.holding.local_shape, math.nan, dtype=owned.leaf.dtype)
        part.view(-1)[slice(*owned.flat)] = owned.leaf.detach().reshape(-1)
    owned.holding.put(whole, part)
    return whole


def _weight_difference(owned: OptimizerShard, true: Tensor) -> float:
    """The largest difference, relative to the largest weight of the tensor, or to a hundredth where all are smaller (biases near zero)."""
    own = spread(owned)
    here = ~own.isnan()
    if owned.leaf.numel() and not here.any():
        return math.inf
    return float((own - true)[here].abs().max() / true.abs().max().clamp(min=1e-2)) if here.any() else 0.0


def _missing_elements(work: RankWork, reference: Reference) -> int:
    """Numbers of trained parameters that no rank holds. What no operator reads is rank 0's to keep."""
    unread = {shard.name for shard in work.executor.shards()}
    parts = {owned.name: (~spread(owned).isnan()).flatten() for owned in work.owned}
    held = [parts.get(name, torch.full((w.numel(),), name in unread)) for name, w in reference.weights.items()]
    counts = torch.cat([part.reshape(-1) for part in held]).to(torch.uint8)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return int((counts == 0).sum())


def attempt(subject: Subject, plan: Plan, rank: int, store: Path) -> dict[str, Any]:
    """What came of it in a process group of its own: differences, a refusal's sentence, or an error's traceback.

    Nobody may leave while others still connect: a plan that is refused by itself never gets a group, and all meet once they have one.
    """
    try:
        layout, world = Layout(plan), _world_size(plan)
        with process_group(store, rank, world):
            dist.barrier()
            return compare(subject, layout)
    except AtollError as error:
        return {"refused": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}


def rank_process(rank: int, folder: Path, subjects: dict[str, Subject], plans: list[tuple[str, str, Plan]], first: int) -> None:
    """One process: every plan from the number `first` on that has so many ranks."""
    for number, (_, name, plan) in enumerate(plans):
        if rank >= _world_size(plan) or number < first:
            continue
        result = attempt(subjects[name], plan, rank, folder / f"{number}.{first}.store")
        (folder / f"{number}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)  # threads of FSDP and Gloo have nothing left to do


def run_all(folder: Path, subjects: dict[str, Subject], plans: list[tuple[str, str, Plan]]) -> None:
    """All plans; processes that were killed by one of them (Gloo aborts on messages of a wrong size) are started anew after it."""
    first = 0
    while fork_ranks(PROCESSES, rank_process, folder, subjects, plans, first):
        first = 1 + min(number for number in range(first, len(plans)) if not _is_complete(folder, number, plans[number][2]))


def _is_complete(folder: Path, number: int, plan: Plan) -> bool:
    return all((folder / f"{number}.{rank}.json").exists() for rank in range(_world_size(plan)))


def _world_size(plan: Plan) -> int:
    return len({device for stage in plan.stages for device in stage.devices})


def plan_for(task: str | int, subject: Subject) -> Plan:
    """A task's plan: written down, or drawn with a seed."""
    graph, batch = subject.captured.graph, subject.job.batch_size
    plan = random_plan(graph, batch, task) if isinstance(task, int) else plan_of(graph, task, batch)
    validate(plan, graph)
    return plan


def _planned(subjects: dict[str, Subject], name: str, task: str | int) -> tuple[str, str, Plan]:
    known = name if isinstance(task, str) else f"{name} briefly"
    return f"{name} {task}", known, plan_for(task, subjects[known])


def main(folder: Path, tasks: list[tuple[str, str | int]]) -> None:
    """Capture once, then go on as so many processes."""
    torch.set_num_threads(1)
    subjects: dict[str, Subject] = {}
    for name in dict.fromkeys(name for name, _ in tasks):
        job = JOBS[name]()
        captured = capture_program(job, divided=True)
        if any(isinstance(task, str) for known, task in tasks if known == name):
            subjects[name] = subject_of(job, captured)
        if any(isinstance(task, int) for known, task in tasks if known == name):
            subjects[f"{name} briefly"] = subject_of(dataclasses.replace(job, steps=DRAWN_STEPS), captured)
    plans = [_planned(subjects, name, task) for name, task in tasks]
    plans.sort(key=lambda row: -_world_size(row[2]))  # who is needed no more goes: nobody waits long for the others
    (folder / "plans.json").write_text(json.dumps({task: str(plan) for task, _, plan in plans}), encoding="utf-8")
    gc.collect()
    gc.freeze()  # what was captured stays: collecting garbage need not look at it again in every process
    run_all(folder, subjects, plans)
    found = {
        task: [_result(folder / f"{number}.{rank}.json") for rank in range(_world_size(plan))]
        for number, (task, _, plan) in enumerate(plans)
    }
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _result(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"error": "its process died"}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
