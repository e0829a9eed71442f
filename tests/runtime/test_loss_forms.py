"""Losses of every form, trained in pieces as plans divide them, against plain PyTorch on the whole batch: losses and weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job
from atoll.errors import DividedLossError
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.executor import Accumulated, Contributed, WorkItem
from atoll.runtime.loss_weights import StepWeights

from .stage.stage_chain import Chain

BATCH, STEPS, CLASSES = 8, 3, 6
Range = tuple[int, int]


@dataclass(frozen=True)
class Division:
    """How a batch is divided: micro-batches through stages, or replicas; gradients by their share, or summed and divided (a swarm's)."""

    pieces: tuple[Range, ...]
    stages: int
    swarm: bool = False


DIVISIONS = {
    "pipeline of 2, micro-batches of 3": Division(((0, 3), (3, 6), (6, 8)), 2),
    "data 5:3": Division(((0, 5), (5, 8)), 1),
    "swarm": Division(((0, 3), (3, 6), (6, 8)), 2, swarm=True),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(values)))  # type: ignore[no-any-return]


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(1, CLASSES, (5,), generator=generator)
    lengths = torch.tensor(1 + index % 3)
    labels[index % 4 :] = torch.where(torch.rand(5 - index % 4, generator=generator) < 0.4, -100, labels[index % 4 :])
    return {
        "x": torch.randn(5, 6, generator=generator),
        "labels": labels,
        "kind": torch.tensor(-100 if index % 3 == 0 else index % 2),
        "words": torch.randint(1, CLASSES, (3,), generator=generator),
        "lengths": lengths,
    }


def logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"])  # type: ignore[no-any-return]


def tokens(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(logits(model, batch).flatten(0, 1), batch["labels"].flatten(), **options)


def ctc(model: nn.Module, batch: Any, reduction: str) -> Tensor:
    log_probs = logits(model, batch).log_softmax(-1).transpose(0, 1)
    lengths = torch.full_like(batch["lengths"], 5)
    return F.ctc_loss(log_probs, batch["words"], lengths, batch["lengths"], reduction=reduction, zero_infinity=True)


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch["labels"] >= 0).float()
    return (logits(model, batch).pow(2).mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def binary(model: nn.Module, batch: Any) -> Tensor:
    wanted = F.one_hot(batch["labels"].clamp(min=0), CLASSES).float()
    return F.binary_cross_entropy_with_logits(logits(model, batch), wanted, pos_weight=torch.full((CLASSES,), 3.0))


def two_tasks(model: nn.Module, batch: Any) -> Tensor:
    return tokens(model, batch) + F.cross_entropy(logits(model, batch)[:, 0, :2], batch["kind"])


def everything(model: nn.Module, batch: Any) -> Tensor:
    loss = two_tasks(model, batch) + 0.3 * masked_mean(model, batch) + 0.05 * ctc(model, batch, "sum")
    loss += 0.01 * F.mse_loss(logits(model, batch), batch["x"])
    return loss


def root(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(logits(model, batch), batch["x"]).sqrt()


PLAIN: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "ignore_index": tokens,
    "class weights": lambda model, batch: tokens(model, batch, weight=torch.arange(1.0, CLASSES + 1)),
    "label smoothing": lambda model, batch: tokens(model, batch, label_smoothing=0.1),
    "summed": lambda model, batch: tokens(model, batch, reduction="sum"),
    "masked mean": masked_mean,
    "pos_weight": binary,
    "ctc": lambda model, batch: ctc(model, batch, "mean"),
    "summed ctc": lambda model, batch: ctc(model, batch, "sum"),
    "two tasks": two_tasks,
    "everything": everything,
    "refused: a root": root,
}


def job_of(model: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], data: Any) -> Job:
    return Job(
        model=model,
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        batch_size=BATCH,
        steps=STEPS,
    )


def whole_batch(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch."""
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        loss: Any = job.loss(model, job.samples.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def in_pieces(job: Job, captured: Captured, division: Division) -> tuple[list[float], dict[str, Tensor]]:
    """The captured program as a plan divides it, by the executor that every mode has."""
    layers = len(captured.graph.layers)
    cut = next(i + 1 for i, layer in enumerate(captured.graph.layers[: layers - 1]) if layer.cut and 2 * (i + 1) >= layers - 1)
    known: dict[str, nn.Parameter] = {}
    sink = Contributed(BATCH, lambda: list(known.values())) if division.swarm else Accumulated(BATCH)
    chain = Chain(captured, job.build_model(), [0, cut, layers] if division.stages == 2 else [0, layers], gradients=sink)
    known |= chain.parameters
    optimizer = job.build_optimizer(known.values())
    weights = StepWeights(chain.sizes, division.pieces, lambda step, start, stop: job.samples.batch(step, start, stop))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [_piece(chain, job, step, number, piece, weights) for number, piece in enumerate(division.pieces)]
        total, weight = (sum(one[place] for one in found) for place in (0, 1))
        divisor = weight if division.swarm or chain.executor.deferred else 1.0
        for place, parameter in enumerate(known.values()):
            sums = [stage[place] for _, _, gradients in found for stage in gradients.values() if stage and stage[place] is not None]
            parameter.grad = torch.stack(sums).sum(0) if sums else parameter.grad  # type: ignore[arg-type]
            if parameter.grad is not None:
                parameter.grad /= divisor
        optimizer.step()
        losses.append(total / divisor)
    return losses, {name: value.detach() for name, value in known.items()}


def _piece(chain: Chain, job: Job, step: int, number: int, piece: Range, weights: StepWeights) -> tuple[float, float, Any]:
    samples = piece[1] - piece[0]
    chain.forward(number, job.samples.batch(step, *piece), samples, weights.of(step))
    loss = chain.executor.loss(WorkItem(len(chain.programs) - 1, 1, number, number, samples))
    return float(loss.total), float(loss.weight), chain.backward(number, samples)


def check_equal(job: Job, divisions: Sequence[Division] = tuple(DIVISIONS.values())) -> None:
    captured = capture_program(job, divided=True, check=True)
    losses, weights = whole_batch(job)
    for division in divisions:
        found, trained = in_pieces(job, captured, division)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(trained, {name: weights[name] for name in trained}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_pieces_train_as_the_whole_batch_does_or_the_job_is_refused(name: str) -> None:
    job = job_of(Model, PLAIN[name], [sample(index) for index in range(BATCH * STEPS)])
    if name.startswith("refused"):
        with pytest.raises(DividedLossError, match=r"test_loss_forms\.py:\d+"):
            capture_program(job, divided=True, check=True)
    else:
        check_equal(job)
