"""A Trainer's data as a Job's: its samples in the order of its own sampler, epoch by epoch, collated by its own collator."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atoll.errors import JobError
from atoll.randomness import own_randomness, seed_everything

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["IGNORED_LABEL", "Collator", "Epochs", "WithBlanks", "tell_of_randomness", "without_labels"]

IGNORED_LABEL = -100


class Blank(NamedTuple):
    """Fills a batch up: a sample as there are others, whose labels are left out of the loss."""

    like: Any


class Seeded(NamedTuple):
    """A sample with a seed of its own, for a collator that draws."""

    sample: Any
    seed: int


class WithBlanks:
    """Data, and behind its last index as many blanks: that of a sample is `len` further than the sample. `seeded`: samples have seeds."""

    def __init__(self, dataset: Any, seeded: bool = False) -> None:
        self.dataset, self.seeded = dataset, seeded

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        count = len(self.dataset)
        # The generator is seeded for every sample by its place in the run, before it is loaded.
        seed = int(torch.randint(1 << 62, ())) if self.seeded else 0
        sample = self.dataset[index % count]
        sample = Seeded(sample, seed) if self.seeded else sample
        return sample if index < count else Blank(sample)


def without_labels(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """A batch in which these rows have no labels that count."""
    labels: Tensor = batch["labels"].clone()
    labels[list(rows)] = IGNORED_LABEL
    return {**batch, "labels": labels}


class Collator:
    """The Trainer's collator; what it makes is a plain dict, and blanks have no labels."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        blanks = [row for row, sample in enumerate(samples) if isinstance(sample, Blank)]
        found = [sample.like if isinstance(sample, Blank) else sample for sample in samples]
        batch = self._one_by_one(found) if isinstance(found[0], Seeded) else dict(self.collate(found))
        return without_labels(batch, blanks) if blanks else batch

    @property
    def own(self) -> Any:
        """The collator itself, without what removes columns."""
        return getattr(self.collate, "data_collator", self.collate)

    @property
    def masks(self) -> bool:
        """Whether it masks tokens at random: then each sample is collated by itself, so that what is masked in it hangs on nothing else."""
        from transformers import DataCollatorForLanguageModeling

        return isinstance(self.own, DataCollatorForLanguageModeling) and self.own.mlm

    def _one_by_one(self, samples: Sequence[Seeded]) -> dict[str, Any]:
        rows = []
        with own_randomness(devices=False):
            for sample, seed in samples:
                seed_everything(seed, devices=False)
                rows.append(dict(self.collate([sample])))
        tokenizer = self.own.tokenizer
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id, "labels": IGNORED_LABEL}
        return {name: _stacked([row[name] for row in rows], padding.get(name, 0), tokenizer.padding_side) for name in rows[0]}


def _stacked(rows: Sequence[Tensor], padding: int, side: str) -> Tensor:
    """Rows [1, length], each as long as the longest."""
    longest = max(row.shape[1] for row in rows)
    missing = [longest - row.shape[1] for row in rows]
    sides = [(left, 0) if side == "left" else (0, left) for left in missing]
    return torch.cat([functional.pad(row, by, value=padding) for row, by in zip(rows, sides, strict=True)])


class Epochs:
    """The indices of each epoch as the Trainer's own sampler draws them; steps that the Trainer makes with fewer samples have blanks."""

    def __init__(self, trainer: "Trainer", loader: Any) -> None:
        args = trainer.args
        self._batches, self._set_epoch = loader.batch_sampler, getattr(loader, "set_epoch", None)
        self._count, self._drop_last = len(loader.dataset), args.dataloader_drop_last
        self._batch: int = args.per_device_train_batch_size
        self.batch_size = self._batch * args.gradient_accumulation_steps
        self.fill_with_blanks = False
        samples = len(self._drawn(0))
        batches = samples // self._batch if self._drop_last else math.ceil(samples / self._batch)
        if not batches:
            raise JobError(f"from_trainer: train_dataset: {samples} samples make no batch of {self._batch}")
        self.samples = min(samples, batches * self._batch)  # of an epoch
        self.steps = math.ceil(batches / args.gradient_accumulation_steps)
        self.fills = self.samples == self.steps * self.batch_size  # whether steps of an epoch are all whole

    def __call__(self, epoch: int) -> list[int]:
        """The indices of an epoch, counted from 0."""
        drawn = self._drawn(epoch)[: self.samples]
        if not self.fill_with_blanks:
            return drawn
        return drawn + [self._count + drawn[-1]] * (self.steps * self.batch_size - len(drawn))

    def _drawn(self, epoch: int) -> list[int]:
        if self._set_epoch is not None:
            self._set_epoch(epoch)
        sampler = getattr(self._batches, "sampler", None)
        return list(sampler) if sampler is not None else [index for batch in self._batches for index in batch]

    def tell_if_uneven(self) -> None:
        """Where steps cannot have blanks, Atoll's differ from the Trainer's."""
        if not self.fills and not self.fill_with_blanks:
            warnings.warn(
                f"from_trainer: an epoch has {self.samples} samples, no multiple of {self.batch_size}, the samples of a step: the Trainer "
                "makes the last step of each epoch with fewer, Atoll fills it up from the next epoch, so that losses differ from there on",
                stacklevel=3,
            )

    def is_random(self) -> bool:
        """Whether the order hangs on PyTorch's global generator, which no two programs leave the same."""
        orders = []
        for seed in (1, 2):
            with own_randomness(seed, devices=False):
                orders.append(self._drawn(0))
        return orders[0] != orders[1]


def tell_of_randomness(epochs: Epochs | None, collator: Collator, samples: list[Any]) -> None:
    """What is drawn from the global generator cannot be as in the Trainer: it is seeded anew, so that runs can be repeated."""
    if epochs is not None and epochs.is_random():
        warnings.warn(
            "from_trainer: the sampler draws from PyTorch's global generator, so that samples come in another order than the Trainer's; "
            "it is seeded by `seed` and the epoch",
            stacklevel=3,
        )
    with own_randomness(0, devices=False):
        before = torch.get_rng_state()
        collator(samples)
        draws = not torch.equal(before, torch.get_rng_state())
    if draws:
        otherwise = "" if collator.masks else ", and others where a plan divides the batch otherwise"
        warnings.warn(
            f"from_trainer: data_collator: {type(collator.own).__name__} draws random numbers: others than in the Trainer{otherwise}",
            stacklevel=3,
        )
