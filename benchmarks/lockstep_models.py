"""The model that lockstep benchmarks train: a plain GPT, and the job of it. Nothing in it knows of Atoll or of how it is laid out."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from atoll import Job

__all__ = ["GPT", "SHAPES", "Block", "Shape", "gpt_job", "token_loss"]

_STEPS = 1_000_000  # the benchmark stops earlier
_SEQUENCES = 512


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of what it is trained on."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 4096
    sequence: int = 128
    batch: int = 8


SHAPES = {
    "narrow": Shape(layers=16, width=192, heads=4),
    "medium": Shape(layers=8, width=384, heads=6),
    "wide": Shape(layers=2, width=1024, heads=8),
}


class Block(nn.Module):
    """Attention, then a small network on every token; each adds to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)  # [batch, sequence, width] each
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)  # [batch, heads, sequence, depth]
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """From tokens to a guess at each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def embed(self, text: Tensor) -> Tensor:
        """[batch, sequence] → [batch, sequence, width]."""
        return self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return token_loss(model(inputs), targets)


class _Text:
    """Sequences of random tokens with their successors, made beforehand."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(shape.vocabulary, (_SEQUENCES, shape.sequence + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.tokens[index]
        return row[:-1], row[1:]


def gpt_job(shape: Shape, name: str = "gpt", *, batch: int | None = None, steps: int = _STEPS) -> Job:
    """Training it with fused AdamW, as whoever wants speed on these devices would."""
    optimizer = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    return Job(
        name=name,
        model=partial(GPT, shape),
        loss=_loss,
        data=partial(_Text, shape),
        optimizer=optimizer,
        batch_size=batch or shape.batch,
        steps=steps,
    )
