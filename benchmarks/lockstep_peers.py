"""The peers of `lockstep_speed.py`: training as one writes it by hand with PyTorch, with what makes it fast, and Atoll beside it."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from lockstep_models import GPT, token_loss
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from atoll import Job
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured
from atoll.plan import Plan
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import assemble
from atoll.runtime.modes.lockstep.trainer import Trainer

__all__ = ["Atoll", "Ddp", "Fsdp", "Pipeline", "Runner"]

_CPU = torch.device("cpu")


class Runner(Protocol):
    """Something that trains."""

    name: str
    done: int  # steps

    def prepare(self, numbers: range) -> None:
        """The steps that come next."""
        ...

    def step(self, number: int) -> None:
        """Train on the global batch of step `number`, counted from 1."""
        ...

    def loss(self) -> float:
        """Of the last step's global batch; all ranks ask together."""
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...


class _Mine:
    """What the hand-written ones have in common: this rank's samples, ready in memory, and a loss that is only looked at afterwards."""

    def __init__(self, job: Job, start: int, stop: int) -> None:
        self._job, self._range = job, (start, stop)
        self.done = 0
        self._batches: dict[int, Any] = {}
        self._last: Tensor = torch.zeros(())
        self._share = (stop - start) / job.batch_size

    def prepare(self, numbers: range) -> None:
        """Load what the steps need, untimed: a hand-written loop would have its loader's workers do it."""
        self._batches = {number: self._job.samples.batch(number - 1, *self._range) for number in numbers}

    def loss(self) -> float:
        """Of the last step's global batch."""
        total = self._last.detach().double() * self._share
        dist.all_reduce(total)
        return float(total)

    def close(self) -> None:
        """Nothing to end."""


def _own_share(job: Job) -> tuple[int, int]:
    each = job.batch_size // dist.get_world_size()
    return dist.get_rank() * each, (dist.get_rank() + 1) * each


class Ddp(_Mine):
    """DistributedDataParallel with gradients that live in its buckets."""

    def __init__(self, job: Job, *, bucket_mb: int, static_graph: bool) -> None:
        super().__init__(job, *_own_share(job))
        self.name = f"DDP, buckets of {bucket_mb} MB{', static graph' if static_graph else ''}"
        self._model = DistributedDataParallel(
            job.build_model(), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb, static_graph=static_graph
        )
        self._optimizer = job.build_optimizer(self._model.parameters())

    def step(self, number: int) -> None:
        """As in DDP's tutorial."""
        inputs, targets = self._batches[number]
        self._optimizer.zero_grad()
        self._last = token_loss(self._model(inputs), targets)
        self._last.backward()
        self._optimizer.step()


class Fsdp(_Mine):
    """FSDP2 over every block and the rest, parameters freed between forward and backward."""

    def __init__(self, job: Job, *, root_resharded: bool) -> None:
        super().__init__(job, *_own_share(job))
        self.name = f"FSDP2, root {'resharded' if root_resharded else 'kept'} after forward"
        model = job.build_model()
        assert isinstance(model, GPT)
        for block in model.blocks:
            fully_shard(block)
        self._model = fully_shard(model, reshard_after_forward=root_resharded)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no averaging
        self._optimizer = job.build_optimizer(model.parameters())

    def step(self, number: int) -> None:
        """As in FSDP2's tutorial."""
        inputs, targets = self._batches[number]
        self._optimizer.zero_grad()
        self._last = token_loss(self._model(inputs), targets)
        self._last.backward()
        self._optimizer.step()


class _FirstHalf(nn.Module):
    def __init__(self, model: GPT, cut: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks = model.tokens, model.positions, model.blocks[:cut]

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class _SecondHalf(nn.Module):
    def __init__(self, model: GPT, cut: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[cut:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Pipeline(_Mine):
    """Two stages under torch's 1F1B, shapes given so that nothing is asked at run time."""

    def __init__(self, job: Job, *, micro_batches: int, cut: int) -> None:
        super().__init__(job, 0, job.batch_size)
        self.name = f"pipelining, 1F1B, {micro_batches} micro-batches"
        model = job.build_model()
        assert isinstance(model, GPT)
        self._first = dist.get_rank() == 0
        half: nn.Module = _FirstHalf(model, cut) if self._first else _SecondHalf(model, cut)
        stage = PipelineStage(half, dist.get_rank(), 2, _CPU)
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=token_loss)
        self._optimizer = job.build_optimizer(half.parameters())
        self._share = 1.0

    def step(self, number: int) -> None:
        """As in torch.distributed.pipelining's tutorial."""
        inputs, targets = self._batches[number]
        self._optimizer.zero_grad()
        if self._first:
            self._schedule.step(inputs, return_outputs=False)
        else:
            losses: list[Tensor] = []
            self._schedule.step(target=targets, losses=losses, return_outputs=False)
            self._last = torch.stack(losses).mean()
        self._optimizer.step()


class Atoll:
    """A plan of the same layout under Atoll's trainer."""

    def __init__(self, job: Job, captured: Captured | Uncaptured, plan: Plan, pace: Pace | None = None) -> None:
        self.name = "; ".join(str(plan).splitlines()[1:])
        self.work = assemble(job, Layout(plan), captured, device=_CPU, pace=pace)
        self.done = 0
        self._trainer = Trainer(job, self.work, _CPU)

    def prepare(self, numbers: range) -> None:
        """Atoll loads by itself, and in the time that is measured."""

    def step(self, number: int) -> None:
        """One step of the runtime."""
        self._trainer.step(number)

    def loss(self) -> float:
        """Every step adds it up."""
        return self._trainer.losses[-1]

    def close(self) -> None:
        """End the thread that loads."""
        self.work.feed.close()
