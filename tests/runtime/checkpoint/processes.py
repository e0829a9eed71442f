"""What a rank of the tests with real processes does: `python -m tests.runtime.checkpoint.processes RANK RANKS DIRECTORY`."""

import json
import os
import random
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.errors import AtollError, JobFailedError
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.stage.shard_spec import ShardSpec
from tests.process_group import process_group

from .layouts import divide, tensors

IDENTITY = RunIdentity(job="test", optimizer="AdamW", seed=1, batch_size=8)


def held_by(seed: int, rank: int, ranks: int, values: dict[str, Tensor], trained: bool = True) -> list[LocalShard]:
    """One rank's part of a random layout; floating parts are parameters."""
    generator = random.Random(seed)
    mine = [held for name, value in values.items() for held in divide(generator, value, name, ranks)[rank]]
    if trained:
        for held in mine:
            held.tensor.requires_grad_(held.tensor.is_floating_point())
    return mine


def step_optimizer(optimizer: torch.optim.Optimizer, held: list[LocalShard], step: int) -> None:
    """A step on gradients that depend on the name and the place of each number, hence not on the layout."""
    for part in held:
        if part.tensor.requires_grad:
            whole = _gradient(part.name, part.holding.shape, step)
            empty = part.holding.dim is not None and not part.holding.parts
            mine = whole.new_empty(part.holding.local_shape) if empty else part.holding.take(whole)
            mine = mine if part.flat is None else mine.reshape(-1)[slice(*part.flat)]
            part.tensor.grad = mine.reshape(part.tensor.shape).to(part.tensor.dtype).clone()
    optimizer.step()


def _gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + sum(name.encode())))


def optimizer_for(held: list[LocalShard]) -> torch.optim.Optimizer:
    parameters = [part.tensor for part in held if part.tensor.requires_grad] or [torch.zeros(0, requires_grad=True)]
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def reshard(rank: int, ranks: int, directory: Path) -> list[str]:
    """Random layouts over all, two or one of the ranks: saved by one, loaded by the next, always equal to the undivided training."""
    groups = {size: dist.new_group(list(range(size)), backend="gloo") for size in range(1, ranks + 1)}
    done = []
    for case in range(8):
        run = directory / f"case-{case}"
        values = tensors(case)
        reference = held_by(case, 0, 1, values)
        whole = optimizer_for(reference)
        for turn, size in enumerate(random.Random(case).choices(range(1, ranks + 1), k=3)):
            if rank < size:
                _turn(run, groups[size], rank, size, case, turn, values)
            step_optimizer(whole, reference, 2 * turn + 1)
            step_optimizer(whole, reference, 2 * turn + 2)
            dist.barrier()
        final = held_by(99, 0, 1, {name: torch.zeros_like(value) for name, value in values.items()}, trained=False)
        if rank == 0:
            Checkpointer(run, identity=IDENTITY).load(final)
            for part, right in zip(final, reference, strict=True):
                # the optimizer's arithmetic, not the checkpoint, depends a little on how a tensor is cut
                coarse = 2e-2 if part.tensor.dtype.itemsize == 2 else 1e-5
                assert torch.allclose(part.tensor.view(-1), right.tensor.view(-1), rtol=coarse, atol=coarse), f"case {case}: {part.name}"
        done.append(f"case {case}")
    return done


def _turn(run: Path, group: dist.ProcessGroup, rank: int, size: int, case: int, turn: int, values: dict[str, Tensor]) -> None:
    start = values if turn == 0 else {name: torch.zeros_like(value) for name, value in values.items()}
    held = held_by(case * 10 + turn, rank, size, start)
    optimizer = optimizer_for(held)
    with Checkpointer(run, group, identity=IDENTITY) as checkpoints:
        loaded = checkpoints.load(held, optimizers=[optimizer])
        assert (0 if loaded is None else loaded.step) == 2 * turn
        for step in (2 * turn + 1, 2 * turn + 2):
            step_optimizer(optimizer, held, step)
            checkpoints.save(step, held, optimizers=[optimizer], extra={"position": step})
        checkpoints.wait()
        assert [outcome.error for outcome in checkpoints.finished()] == [None, None]


def sharded(rank: int, ranks: int, directory: Path) -> list[str]:
    """FSDP2, saved by all ranks and read by one; and the other way."""
    everyone, alone = dist.new_group(backend="gloo"), dist.new_group([0], backend="gloo")
    torch.manual_seed(3)
    model, whole = nn.Linear(5, 7), nn.Linear(5, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    held = [_shard(name, parameter) for name, parameter in model.named_parameters()]
    with Checkpointer(directory, everyone, identity=IDENTITY) as checkpoints:
        checkpoints.save(1, held, optimizers=[optimizer], final=True)
        before = {part.name: (part.tensor.clone(), optimizer.state[part.known_as]["exp_avg"].to_local().clone()) for part in held}
        if rank == 0:
            plain = [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in whole.named_parameters()]
            other = torch.optim.AdamW(whole.parameters())
            with Checkpointer(directory, alone, identity=IDENTITY) as single:
                single.load(plain, optimizers=[other])
                single.save(2, plain, optimizers=[other], final=True)
        dist.barrier(everyone)
        with torch.no_grad():
            for part in held:
                part.tensor.zero_()
        fresh = torch.optim.AdamW(model.parameters(), foreach=False)
        loaded = checkpoints.load(held, optimizers=[fresh])
        assert loaded is not None
        for part in held:
            assert torch.equal(part.tensor, before[part.name][0])
            assert torch.equal(fresh.state[part.known_as]["exp_avg"].to_local(), before[part.name][1])
        fresh.step()
    return [f"step {loaded.step}"]


def _shard(name: str, parameter: Tensor) -> LocalShard:
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    _, (first, *_) = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    row = parameter.numel() // parameter.shape[0]
    start = min(first * row, parameter.numel())
    return LocalShard(ShardSpec(name=name, shape=tuple(parameter.shape)), local, (start, start + local.numel()), parameter)


def failures(rank: int, ranks: int, directory: Path) -> list[str]:
    """A rank that cannot write, or whose file is damaged: every rank hears the same."""
    group = dist.new_group(backend="gloo")
    holding = ShardSpec(name="large", shape=(500 * ranks, 100), dim=0, parts=((500 * rank, 500 * rank + 500),))
    held = [LocalShard(holding, torch.randn(500, 100))]
    said = []
    with Checkpointer(directory, group, identity=IDENTITY) as checkpoints:
        checkpoints.save(1, held, final=True)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        checkpoints.save(2, held)
        outcome = checkpoints.wait()
        assert outcome is not None
        said.append(outcome.error or "")
        try:
            checkpoints.save(3, held, final=True)
        except JobFailedError as error:
            said.append(str(error))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        loaded = checkpoints.load(held)
        assert loaded is not None
        said.append(f"loaded {loaded.step}")
        dist.barrier(group)
        if rank == 0:
            victim = sorted(loaded.path.glob("shard-*"))[-1]
            victim.write_bytes(victim.read_bytes()[:-1])
        dist.barrier(group)
        try:
            checkpoints.load(held)
        except AtollError as error:
            said.append(str(error))
    return said


def killed(rank: int, ranks: int, directory: Path) -> list[str]:
    """The last rank is killed while it writes: the others hear of it soon, and what was saved before is still there."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    held = held_by(5, rank, ranks, tensors(0))
    checkpoints = Checkpointer(directory, group, identity=IDENTITY)
    checkpoints.save(1, held, final=True)
    if rank == ranks - 1:
        sys.addaudithook(_kill_when_writing)
    checkpoints.save(2, held)
    began = time.monotonic()
    outcome = checkpoints.wait()
    assert outcome is not None
    return [outcome.error or "", "soon" if time.monotonic() - began < 15 else "only when the group's time was up"]


def _kill_when_writing(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and "step-00000002.partial" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    rank, ranks, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    with process_group(directory / "store", rank, ranks):
        for scenario in (reshard, sharded, failures, killed):  # the last one costs a rank its life
            said = scenario(rank, ranks, directory / scenario.__name__)
            print(json.dumps(said), flush=True)
        os._exit(0)  # a process group whose peer was killed may not end politely


if __name__ == "__main__":
    main()
