"""Losses that are not means over samples: pieces of a batch add up to the whole as one process computes it, or the job is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job
from atoll.errors import CaptureError, DividedLossError
from atoll.graph.eager import capture_or_run
from atoll.graph.export import ExportedJob, export_job
from atoll.graph.loss_check import _Calm

CLASSES = 5
DIVISION = ((0, 1), (1, 3), (3, 8))
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


def scaled_in_place(model: nn.Module, batch: Any) -> Tensor:
    loss = (model(batch["x"]) - batch["y"]).pow(2).sum()
    loss *= 0.25
    return loss


def added_in_place(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(*flat(model, batch))
    loss += 0.5 * model(batch["x"]).pow(2).mean()
    return loss


COUNTED: dict[str, Loss] = {
    "ignored": lambda model, batch: F.cross_entropy(*flat(model, batch)),
    "weighted": lambda model, batch: F.cross_entropy(*flat(model, batch), weight=model.classes, label_smoothing=0.1),  # type: ignore[arg-type]
    "masked": masked,
    "two heads": two_heads,
    "nll": lambda model, batch: F.nll_loss(F.log_softmax(flat(model, batch)[0], -1), flat(model, batch)[1]),
}
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
CLASSES_SEEN = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])
TERMS: dict[str, Loss] = {
    "sum": lambda model, batch: (model(batch["x"]) - batch["y"]).pow(2).sum(),
    "summed": lambda model, batch: F.cross_entropy(*flat(model, batch), reduction="sum"),
    "sum and mean": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * model(batch["x"]).abs().sum(),
    "two counts": lambda model, batch: F.cross_entropy(*flat(model, batch)) + F.mse_loss(model(batch["x"]), batch["y"]),
    "two labels": lambda model, batch: (
        F.cross_entropy(*flat(model, batch)) - 2 * F.cross_entropy(model(batch["x"])[:, 0], batch["labels"][:, 3], weight=CLASSES_SEEN)
    ),
    "counted, summed and a penalty": lambda model, batch: (
        masked(model, batch) + 0.01 * model(batch["x"]).abs().sum() + 0.1 * model.first.weight.pow(2).sum()  # type: ignore[union-attr, operator]
    ),
    "in place": scaled_in_place,
    "added in place": added_in_place,
}
REFUSED: dict[str, Loss] = {
    "contrastive": lambda model, batch: F.cross_entropy(
        model(batch["x"])[:, 0] @ model(batch["y"][..., :1].expand(-1, -1, 6))[:, 0].T, torch.arange(batch["x"].shape[0])
    ),
    "contrastive, of a fixed size": lambda model, batch: F.cross_entropy(
        model(batch["x"])[:, 0] @ model(batch["y"][..., :1].expand(-1, -1, 6))[:, 0].T, torch.arange(len(batch["x"]))
    ),
    "root": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]).sqrt(),
    "a balance": lambda model, batch: (
        F.mse_loss(model(batch["x"]), batch["y"])
        + (model(batch["x"]).softmax(-1).mean((0, 1)) * F.one_hot(model(batch["x"]).argmax(-1), CLASSES).float().mean((0, 1))).sum()
    ),
    "roots of what counts": lambda model, batch: masked(model, batch).sqrt(),
}


def job(loss: Loss) -> Job:
    return Job(
        model=Model,
        loss=loss,
        data=DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.002, momentum=0.9),
        batch_size=8,
        steps=3,
    )


@pytest.mark.parametrize("name", [*COUNTED, *MEANS, *TERMS])
def test_pieces_of_the_program_add_up_to_the_users_own_loss(name: str) -> None:
    loss = (COUNTED | MEANS | TERMS)[name]
    exported = export_job(job(loss), divided=True, check=True)
    assert exported.loss_form.kind == ("counted" if name in COUNTED else "mean" if name in MEANS else "terms")
    assert not exported.notes
    model = Model(0.0)
    batch = torch.utils.data.default_collate(DATA[:8])
    value, gradient = pieces(exported, model, batch)
    whole = loss(model, batch)
    torch.testing.assert_close(value, float(whole.detach()), rtol=2e-6, atol=0)
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    torch.testing.assert_close(gradient, torch.cat([one.flatten().double() for one in wanted]), rtol=1e-4, atol=1e-5)


def pieces(exported: ExportedJob, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    """The loss and gradient of a batch, from pieces of 1, 2 and 5 samples."""
    calm = _Calm(exported.program, exported.program.graph_module, model)
    total, weights, gradient = 0.0, 0.0, torch.zeros(())
    given, divided = exported.loss_form.weights, [[batch[key][start:stop] for key in batch] for start, stop in DIVISION]
    whole = [] if given is None else [given.per_sample([given.of(dict(zip(calm.names, leaves, strict=False))) for leaves in divided], 8)]
    for leaves, (start, stop) in zip(divided, DIVISION, strict=True):
        found = calm.loss([*leaves, *whole])
        share = stop - start if found.weight is None else 1
        total, gradient = total + found.value * share, gradient + found.gradient * share
        weights += found.weight if found.weight is not None else share
    return total / weights, gradient / weights


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(DividedLossError, match=r"test_loss_weight.py:\d+: .* Return \(total, weight\)"):
        export_job(job(REFUSED[name]), divided=True, check=True)


def test_a_piece_in_which_nothing_counts_adds_nothing() -> None:
    exported = export_job(job(COUNTED["ignored"]), divided=True)
    ignored = [torch.full_like(value, -100) if key == "labels" else value for key, value in DATA[0].items()]
    found = _Calm(exported.program, exported.program.graph_module, Model()).loss([value[None] for value in ignored])
    assert (found.value, found.weight, float(found.gradient.abs().max())) == (0.0, 0.0, 0.0)


def test_programs_for_whole_batches_are_as_the_user_wrote_them() -> None:
    assert export_job(job(COUNTED["ignored"])).program.call_spec.out_spec.num_leaves == 1


def added_through_a_view(model: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(*flat(model, batch)).clone()
    loss.view(1).add_(0.5 * F.cross_entropy(-flat(model, batch)[0], flat(model, batch)[1]))
    return loss


def small_weights(model: nn.Module, batch: Any) -> Tensor:
    weights = batch["y"][..., 0].sigmoid() * 0.01
    return ((model(batch["x"]) - batch["y"]).pow(2).sum(-1) * weights).sum() / weights.sum().clamp(min=1)


TRAPS: dict[str, Loss] = {
    "a factor of 0": lambda model, batch: torch.add(
        F.cross_entropy(*flat(model, batch)), F.cross_entropy(-flat(model, batch)[0], flat(model, batch)[1]), alpha=0
    ),
    "through a view": added_through_a_view,
    "a floor that counts": small_weights,
    "a ceiling": lambda model, batch: (
        model(batch["x"]).pow(2).sum() / (batch["labels"] >= 0).sum().clamp(1, 8)  # more than 8 count
    ),
    "rounded": lambda model, batch: torch.div(model(batch["x"]).sum(), 8.0, rounding_mode="trunc") + model(batch["x"]).pow(2).sum(),
    "of itself": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]) / F.mse_loss(model(batch["x"]), batch["y"]).detach(),
    "two masks": lambda model, batch: (
        (model(batch["x"])[..., 0] * batch["y"][..., 0].sigmoid()).sum() / batch["y"][..., 0].sigmoid().sum()
        + (model(batch["x"])[..., 1] * (batch["labels"] >= 0)).sum() / (batch["labels"] >= 0).sum()
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_read_wrongly_is_not_believed(name: str) -> None:
    """Either the pieces are right, or the job is refused."""
    try:
        exported = export_job(job(TRAPS[name]), divided=True, check=True)
    except DividedLossError:
        return
    batch, model = torch.utils.data.default_collate(DATA[:8]), Model(0.0)
    assert pieces(exported, model, batch)[0] == pytest.approx(float(TRAPS[name](model, batch).detach()), rel=1e-5)


def test_sizes_in_odd_places_are_no_fault_of_ours() -> None:
    """A label that is ignored by a size, a mean over one less than the samples, and over what a mask selects."""
    for loss in (
        lambda model, batch: F.cross_entropy(*flat(model, batch), ignore_index=batch["x"].size(0)),
        lambda model, batch: (model(batch["x"]) - batch["y"]).pow(2).sum() / (batch["x"].shape[0] - 1),
        lambda model, batch: (model(batch["x"])[batch["labels"] >= 0]).pow(2).sum() / (batch["labels"] >= 0).sum(),
    ):
        try:
            export_job(job(loss), divided=True, check=True)
        except CaptureError:
            continue


def test_tensors_without_the_samples_first_are_not_taken_for_samples() -> None:
    def ragged(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        kept = [sample["labels"] >= 0 for sample in samples]
        rows = torch.cat([sample["x"][keep] for sample, keep in zip(samples, kept, strict=True)])
        return {"x": rows, "n": torch.tensor([int(keep.sum()) for keep in kept])}

    ragged_job = replace(job(lambda model, batch: model(batch["x"]).pow(2).sum() + 0 * batch["n"].sum()), collate_fn=ragged)
    with pytest.raises(DividedLossError):
        export_job(ragged_job, divided=True, check=True)
    assert export_job(ragged_job, divided=True).loss_form.kind == "unknown"


class Moving(nn.Module):
    """Keeps a mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("mean").lerp_(x.detach().mean(0), 0.1)
        return x - self.get_buffer("mean")


NORMS = "batch normalisation takes the statistics of its own piece"


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    ("part", "notes"),
    [
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), ["the forward changes the buffer '0.parametrizations."]),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), ["the forward changes the buffer '0.weight_"]),
        (lambda: nn.Sequential(nn.BatchNorm1d(4), Moving()), [NORMS, "the forward changes the buffer '0.1.mean' once for each piece"]),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), [NORMS]),
        (lambda: nn.LayerNorm(4), []),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*spectral_norm.*:FutureWarning")
def test_what_each_piece_of_a_batch_changes_is_noted(part: Callable[[], nn.Module], notes: list[str], capture: bool) -> None:
    job = Job(
        model=lambda: nn.Sequential(part(), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        data=list(torch.randn(8, 4)),
        optimizer=torch.optim.SGD,
        batch_size=4,
        steps=1,
        capture=capture,
    )
    found = [note for note in capture_or_run(job, most_bytes=1e6).notes if note.startswith((NORMS, "the forward"))]
    assert [note[: len(begins)] for note, begins in zip(found, notes, strict=True)] == notes
