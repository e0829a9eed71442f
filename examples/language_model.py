"""A small language model: a decoder-only transformer in plain PyTorch that learns to write Python, byte by byte.

python examples/language_model.py              trains here, alone, in about a minute
atoll plan examples/language_model.py --cluster examples/clusters/two_sites.toml
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import OneCycleLR

import atoll
from atoll.data import StandardLibraryText

SEQUENCE = 128
STEPS = 240


class Attention(nn.Module):
    """Every byte looks back at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).chunk(3, dim=-1)  # [batch, sequence, width] each
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [batch, heads, sequence, depth]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a small network on every byte; each adds to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class LanguageModel(nn.Module):
    """From bytes to a guess at each next byte."""

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(StandardLibraryText.vocabulary, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, StandardLibraryText.vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))  # [batch, sequence, width]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [batch, sequence, vocabulary]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


job = atoll.Job(
    name="language model",
    model=LanguageModel,
    loss=loss,
    data=partial(StandardLibraryText, sequence_length=SEQUENCE),
    optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
    scheduler=partial(OneCycleLR, max_lr=3e-3, total_steps=STEPS, pct_start=0.1),
    max_grad_norm=1.0,
    batch_size=16,
    steps=STEPS,
)

if __name__ == "__main__":
    job.run()
