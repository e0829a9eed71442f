"""The ways a batch is computed: stages, replicas and a swarm's workers in one process; ranks that divide tensors or experts as two.

What is run are the programs that ranks and workers run, by the executor they run them with; only who sends what to whom is left out.
"""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from zoo_reference import Pieces, Trained

from atoll import Job
from atoll.errors import AtollError, PlanError
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured
from atoll.plan import parse_plan, validate
from atoll.runtime.activations import Activations
from atoll.runtime.executor import Accumulated, BuiltStage, Contributed, LossScale, StageExecutor, Update, Updater, WorkItem
from atoll.runtime.loss_weights import StepWeights
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import assemble
from atoll.runtime.modes.lockstep.trainer import Trainer
from atoll.runtime.stage.module import StageBuilder
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState

CPU = torch.device("cpu")
_SECONDS = 180.0  # for the two ranks of an architecture


def even_bounds(captured: Captured, stages: int) -> list[int]:
    """Layers at which stages begin and end, as many as the model can be cut into."""
    layers = captured.graph.layers
    cuts = [i for i in range(1, len(layers)) if layers[i - 1].cut]
    wanted = [min(cuts, key=lambda i, s=s: abs(i - s * len(layers) / stages)) for s in range(1, stages)] if cuts else []
    return sorted({0, *wanted, len(layers)})


class InOneProcess:
    """All stages of a model; `contributed` returns gradients as a swarm's workers do, otherwise they are added up as ranks do."""

    def __init__(self, job: Job, captured: Captured, bounds: Sequence[int], *, contributed: bool) -> None:
        self.sizes, self.key, self.batch_size = Sizes(captured), DrawKey(job.seed), job.batch_size
        model = job.build_model()
        builder = StageBuilder(InitialState(captured, model), device=CPU, key=self.key)
        self.programs = [cut_stage(captured, start, stop) for start, stop in pairwise(bounds)]
        modules = [builder.stage(program) for program in self.programs]
        order = [name for name, _ in model.named_parameters()]
        self.weights = {name: builder.parameters[name] for name in order if name in builder.parameters}
        self.rest = {name: value.detach() for name, value in model.named_parameters() if name not in self.weights}
        trained = [parameter for parameter in self.weights.values() if parameter.requires_grad]
        updater = Updater(trained, job.optimizer(trained), None, LossScale(False), steps=1)
        self.sink: Any = Contributed(job.batch_size, lambda: trained) if contributed else Accumulated(job.batch_size)
        self.sums: list[Tensor | None] = [None] * len(trained)
        stages = {n: BuiltStage(program=p, module=m) for n, (p, m) in enumerate(zip(self.programs, modules, strict=True))}
        self.executor = StageExecutor(
            stages,
            sizes=self.sizes,
            loss=captured.program.call_spec.out_spec,
            key=self.key,
            autocast=nullcontext,
            generators=self.key.lock,
            gradients=self.sink,
            updater=updater,
        )
        self.contributed = contributed

    def train(self, batches: Sequence[Any], pieces: Pieces) -> Trained:
        """A step for every batch."""
        losses = [self._step(step, batch, pieces) for step, batch in enumerate(batches, 1)]
        return Trained(losses, {name: value.detach() for name, value in self.weights.items()} | self.rest)

    def _step(self, step: int, batch: Any, pieces: Pieces) -> float:
        total, weight, mean = 0.0, 0.0, True
        self.sums = [None] * len(self.sums)
        if not self.contributed:
            self.executor.updater.optimizer.zero_grad()  # type: ignore[union-attr]
        weights = StepWeights(self.sizes, pieces, lambda _, start, stop: _cut(batch, start, stop)).of(step)
        works = [(step, number, start, stop - start) for number, (start, stop) in enumerate(pieces)]
        for work, (start, stop) in zip(works, pieces, strict=True):
            found = self._forward(work, self.sizes.leaves(_cut(batch, start, stop), weights))
            total, weight, mean = total + float(found.total), weight + float(found.weight), found.is_mean
        for work in works:
            self._backward(work)
        divisor = weight if self.contributed or not mean else 1.0
        self.executor.apply(Update(step, factor=1.0 / divisor, gradients=self.sums if self.contributed else None))
        return total / divisor

    def _forward(self, work: tuple[int, int, int, int], leaves: dict[str, Any]) -> Any:
        made = Activations(self.sizes.bind(leaves), leaves, [])
        for stage in range(len(self.programs)):
            made = self.executor.forward(WorkItem(stage, *work), made)
        return self.executor.loss(WorkItem(len(self.programs) - 1, *work))

    def _backward(self, work: tuple[int, int, int, int]) -> None:
        gradients: list[Tensor] = []
        for stage in reversed(range(len(self.programs))):
            gradients, own = self.executor.backward(WorkItem(stage, *work), gradients)
            for place, gradient in enumerate(own):
                if gradient is not None:
                    known = self.sums[place]
                    self.sums[place] = gradient if known is None else known + gradient


def _cut(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop].clone() for name, value in batch.items()}


def check_pieces_fit(captured: Captured, pieces: Pieces) -> None:
    """What a plan with these pieces is refused for."""
    fixed = Sizes(captured).fixed
    if fixed is not None and any(stop - start != fixed for start, stop in pieces):
        raise PlanError(f"{captured.graph.name} could be captured for {fixed} samples only")


def in_two_ranks(jobs: dict[str, Job], captured: Captured | Uncaptured, plans: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Every plan for every job, by "plan job": what it came to, a refusal or an error. Ranks are forked: nothing is captured again."""
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(rank, folder, jobs, captured, plans)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + _SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return {f"{plan} {job}": _found(folder, f"{plan} {job}") for plan in plans for job in jobs}
    finally:
        shutil.rmtree(folder)


def _found(folder: Path, name: str) -> dict[str, Any]:
    paths = [folder / f"{name}.{rank}.json" for rank in range(2)]
    if not all(path.exists() for path in paths):
        return {"error": "a rank died or did not end"}
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for kind in ("error", "refused"):
        for rank in ranks:
            if kind in rank:
                return {kind: rank[kind]}
    weights: dict[str, Tensor] = {}
    for rank in range(2):
        for key, part in torch.load(folder / f"{name}.{rank}.pt", weights_only=True).items():
            weights[key] = torch.where(part.isnan(), weights[key], part) if key in weights else part
    return {"trained": Trained(ranks[0]["losses"], weights), "divided": ranks[0]["divided"]}


def _rank(rank: int, folder: Path, jobs: dict[str, Job], captured: Captured | Uncaptured, plans: dict[str, str]) -> None:
    for plan, text in plans.items():
        for job_name, job in jobs.items():
            name = f"{plan} {job_name}"
            try:
                found = _train(rank, folder, name, job, captured, text)
            except AtollError as error:
                found = {"refused": str(error)}
            except Exception:
                found = {"error": traceback.format_exc()}
            (folder / f"{name}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def _train(rank: int, folder: Path, name: str, job: Job, captured: Captured | Uncaptured, text: str) -> dict[str, Any]:
    plan = msgspec.structs.replace(parse_plan(text), graph=captured.graph.name)
    validate(plan, captured.graph)
    layout = Layout(plan)
    store = dist.FileStore(str(folder / f"{name}.store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        dist.barrier()
        work = assemble(job, layout, captured, device=CPU, evaluated={})
        trainer = Trainer(job, work, CPU)
        try:
            trainer.train()
        finally:
            work.feed.close()
        held = {}
        for owned in work.owned:
            whole = torch.full(owned.holding.shape, torch.nan, dtype=owned.leaf.dtype)
            owned.holding.put(whole, owned.leaf.detach())
            held[owned.name] = whole
        held |= {part.name: part.tensor for part in work.executor.shards() if part.name not in held}  # what no operator reads
        torch.save(held, folder / f"{name}.{rank}.pt")
        return {"losses": trainer.losses, "divided": any(tuple(o.leaf.shape) != tuple(o.holding.shape) for o in work.owned)}
    finally:
        dist.destroy_process_group()
