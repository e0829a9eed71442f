"""Sequence to sequence: an encoder–decoder of PyTorch's own layers learns to sort digits.

Rows differ in length, so the loss is a mean over digits, not over rows: it returns `(total, weight)`, and Atoll divides by the weight of
the whole batch however many devices or micro-batches share it.

python examples/sort_digits.py                 trains here, alone, in about a minute
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import atoll
from atoll.data import SortedDigits


class Sorter(nn.Module):
    """Reads a row of digits, writes it in order."""

    def __init__(self, *, width: int = 64, longest: int = 12) -> None:
        super().__init__()
        self.digits = nn.Embedding(SortedDigits.vocabulary, width)
        self.places = nn.Parameter(torch.randn(longest, width) * 0.1)
        shape: dict[str, Any] = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2)
        self.head = nn.Linear(width, SortedDigits.vocabulary)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        padding = source == SortedDigits.padding  # [batch, places]
        later = nn.Transformer.generate_square_subsequent_mask(written.shape[1], dtype=torch.bool)  # a place sees those before it
        read = self.encoder(self.digits(source) + self.places, src_key_padding_mask=padding)
        place = self.digits(written) + self.places  # [batch, places, width]
        output = self.decoder(place, read, tgt_mask=later.to(source.device), memory_key_padding_mask=padding)
        return self.head(output)  # [batch, places, vocabulary]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    source, target = batch
    written = pad(target[:, :-1], (1, 0), value=SortedDigits.begin)
    logits = model(source, written).flatten(0, 1)
    total = cross_entropy(logits, target.flatten(), ignore_index=SortedDigits.padding, reduction="sum")
    return total, (target != SortedDigits.padding).sum()


job = atoll.Job(
    name="sort digits",
    model=Sorter,
    loss=loss,
    data=SortedDigits(count=100_000),
    eval_data=SortedDigits(count=500, first=100_000),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    max_grad_norm=1.0,
    batch_size=64,
    micro_batch_size=32,
    steps=300,
)

if __name__ == "__main__":
    job.run()
