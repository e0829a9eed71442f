"""Losses that are not means over samples: pieces of a batch add up to the whole as one process computes it, or the job is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job
from atoll.errors import DividedLossError, JobError
from atoll.graph.export import export_job
from atoll.graph.loss_check import _Calm
from atoll.graph.loss_weight import PieceWeight

CLASSES = 5
Loss = Callable[[nn.Module, Any], Any]


class Model(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, CLASSES)
        self.register_buffer("classes", torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5]))

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(values))))  # type: ignore[no-any-return]


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(0, CLASSES, (4,), generator=generator)
    labels[: index % 4] = -100  # another number counts in every sample
    return {"x": torch.randn(4, 6, generator=generator), "labels": labels, "y": torch.randn(4, CLASSES, generator=generator)}


DATA = [sample(index) for index in range(32)]


def flat(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).flatten(0, 1), batch["labels"].flatten()


def masked(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch["labels"] >= 0)[..., None]
    return ((model(batch["x"]) - batch["y"]).pow(2) * mask).sum() / mask.sum().clamp(min=1)


def two_heads(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = flat(model, batch)
    return 0.7 * F.cross_entropy(logits, labels) - F.cross_entropy(-logits, labels) / 3


COUNTED: dict[str, Loss] = {
    "ignored": lambda model, batch: F.cross_entropy(*flat(model, batch)),
    "weighted": lambda model, batch: F.cross_entropy(*flat(model, batch), weight=model.classes, label_smoothing=0.1),  # type: ignore[arg-type]
    "masked": masked,
    "two heads": two_heads,
    "nll": lambda model, batch: F.nll_loss(F.log_softmax(flat(model, batch)[0], -1), flat(model, batch)[1]),
}
SUMS: dict[str, Loss] = {
    "sum": lambda model, batch: (model(batch["x"]) - batch["y"]).pow(2).sum(),
    "summed": lambda model, batch: F.cross_entropy(*flat(model, batch), reduction="sum"),
}
MIXED: Loss = lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * model(batch["x"]).abs().sum()  # noqa: E731
MEANS: dict[str, Loss] = {
    "mse": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]),
    "mean": lambda model, batch: (model(batch["x"]) - batch["y"]).abs().mean(dim=-1).mean(),
    "soft labels": lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].softmax(-1).flatten(0, 1)),
    "penalty": lambda model, batch: (
        F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
    ),
    "per sample": lambda model, batch: (
        ((model(batch["x"])[..., 0]).pow(2) * (batch["labels"] >= 0)).sum(1) / (batch["labels"] >= 0).sum(1)
    ).mean(),
}
REFUSED: dict[str, Loss] = {
    "contrastive": lambda model, batch: F.cross_entropy(
        model(batch["x"])[:, 0] @ model(batch["y"][..., :1].expand(-1, -1, 6))[:, 0].T, torch.arange(batch["x"].shape[0])
    ),
    "contrastive, of a fixed size": lambda model, batch: F.cross_entropy(
        model(batch["x"])[:, 0] @ model(batch["y"][..., :1].expand(-1, -1, 6))[:, 0].T, torch.arange(len(batch["x"]))
    ),
    "root": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]).sqrt(),
    "two counts": lambda model, batch: F.cross_entropy(*flat(model, batch)) + F.mse_loss(model(batch["x"]), batch["y"]),
}


def job(loss: Loss, *, micro: int | None = None, dropout: float = 0.5) -> Job:
    return Job(
        model=lambda: Model(dropout),
        loss=loss,
        data=DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.002, momentum=0.9),
        batch_size=8,
        micro_batch_size=micro,
        steps=3,
    )


@pytest.mark.parametrize("name", [*COUNTED, *SUMS, *MEANS, "mixed"])
def test_pieces_of_the_program_add_up_to_the_users_own_loss(name: str) -> None:
    loss = ({"mixed": MIXED} | COUNTED | SUMS | MEANS)[name]
    exported = export_job(job(loss), divided=True, check=True)
    expected = "counted" if name in COUNTED else "sum" if name in SUMS else "mixed" if name == "mixed" else "mean"
    assert exported.loss_form.kind == expected
    model = Model().eval()
    calm = _Calm(exported.program, model)
    batch = torch.utils.data.default_collate(DATA[:8])
    totals, weights = 0.0, 0.0
    for start, stop in ((0, 1), (1, 3), (3, 8)):
        leaves = [batch[key][start:stop] for key in batch]
        value, weight = calm.loss(leaves)
        totals += value if weight is not None else value * (stop - start)
        weights += weight if weight is not None else stop - start
        if name in COUNTED:
            piece = {key: batch[key][start:stop] for key in batch}
            assert float(PieceWeight(exported.program, model)(piece)) == pytest.approx(weight)
    with torch.no_grad():
        whole = float(loss(model, batch))
    assert totals / weights == pytest.approx(whole, rel=2e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(DividedLossError, match=r"return \(total, weight\)|Return \(total, weight\)"):
        export_job(job(REFUSED[name]), divided=True, check=True)


def test_a_piece_in_which_nothing_counts_adds_nothing() -> None:
    exported = export_job(job(COUNTED["ignored"]), divided=True)
    ignored = [torch.full_like(value, -100) if key == "labels" else value for key, value in DATA[0].items()]
    assert _Calm(exported.program, Model()).loss([value[None] for value in ignored]) == (0.0, 0.0)


@pytest.mark.parametrize("name", [*COUNTED, *SUMS, "mse"])
def test_micro_batches_train_what_the_whole_batch_trains(name: str) -> None:
    loss = (COUNTED | SUMS | MEANS)[name]
    whole = job(loss, dropout=0).run(progress=False)
    pieces = job(loss, micro=3, dropout=0).run(progress=False)
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.model is not None
    assert pieces.model is not None
    for first, second in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_micro_batches_of_what_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(JobError, match="adds sums and means"):
        job(MIXED, micro=3).run(progress=False)
    with pytest.raises(JobError, match="the loss of a batch is not that of its pieces"):
        job(REFUSED["root"], micro=3).run(progress=False)
