"""`Trainer.compute_loss` as a Job's loss: what it is divided by, and whether blanks are left out of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.hugging_face.data import IGNORED_LABEL, Collator, without_labels
from atoll.job import LossFunction
from atoll.randomness import own_randomness

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["ItemCount", "counts_items", "own_compute_loss", "probe_items", "training_loss"]

_MOST_BYTES = 1 << 30  # of a model that is run on a sample to see what its loss does


def own_compute_loss(trainer: "Trainer") -> bool:
    """Whether a subclass computes the loss."""
    from transformers import Trainer

    return type(trainer).compute_loss is not Trainer.compute_loss


def counts_items(trainer: "Trainer") -> bool:
    """Whether the Trainer counts the labels of all the batches of a step and says so to whoever computes the loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _items(trainer: "Trainer", batch: Mapping[str, Any]) -> Tensor | None:
    """How many labels the Trainer would count in the batch; None where it counts none."""
    labels = batch.get("shift_labels", batch.get("labels")) if "labels" in batch and counts_items(trainer) else None
    if not isinstance(labels, Tensor):
        return None
    if "shift_labels" not in batch and trainer._loss_shifts_labels:
        labels = labels[..., 1:]
    return labels.ne(IGNORED_LABEL).sum()


def _computed(trainer: "Trainer", model: nn.Module, batch: Mapping[str, Any], items: Tensor | None) -> Tensor:
    value = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
    return value[0] if isinstance(value, tuple) else value


def training_loss(trainer: "Trainer", found: "ItemCount | None") -> LossFunction:
    """`compute_loss` as a function of model and batch: a sum over labels with their number; what a subclass has of its own, as it is,
    unless it is known to divide by that number."""
    as_it_is = own_compute_loss(trainer) and not (found is not None and found.divides)

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        items = _items(trainer, batch)
        if items is None or as_it_is:
            return _computed(trainer, model, batch, items)
        # A piece of a batch may have no label at all: it gets some, for a loss that is a number, and no weight.
        labels = torch.where(items > 0, batch["labels"], torch.zeros_like(batch["labels"]))
        return _computed(trainer, model, {**batch, "labels": labels}, items.clamp(min=1)) * items, items

    return loss


class ItemCount(NamedTuple):
    """What a loss makes of the labels and of their number, which it is told."""

    divides: bool  # by that number, not by one of its own
    leaves_out: bool  # samples whose labels are all to be ignored


def probe_items(trainer: "Trainer", collator: Collator, samples: list[Any]) -> ItemCount | None:
    """Found with some samples, run forward three times without dropout. None: nothing is counted, or the model is too large for that."""
    model = trainer.model
    assert isinstance(model, nn.Module)
    if not counts_items(trainer) or sum(parameter.nbytes for parameter in model.parameters()) > _MOST_BYTES:
        return None
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad(), own_randomness(0):
            batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in collator(samples).items()}
            items, rows = _items(trainer, batch), len(samples)
            if items is None:
                return None
            doubled = {name: torch.cat([value, value]) if _has_rows(value, rows) else value for name, value in batch.items()}
            blank = without_labels(doubled, range(rows, 2 * rows))
            value, half, with_blanks = (
                float(_computed(trainer, model, *row)) for row in ((batch, items), (batch, 2 * items), (blank, items))
            )
    finally:
        model.train(training)
    return ItemCount(divides=_close(2 * half, value), leaves_out=_close(with_blanks, value) and not _has_batch_norm(model))


def _has_rows(value: object, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def _close(a: float, b: float) -> bool:
    """Also where one is not a number, which nothing is close to."""
    return abs(a - b) <= 1e-4 * abs(b)


def _has_batch_norm(model: nn.Module) -> bool:
    """Its statistics would be of blanks too."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
