"""A mixture of experts, annotated: every byte is sent to one of eight small networks, so the model is larger than its work.

Two lines make a distributed model of an ordinary one: they demand of the planner that experts are divided among devices, which send each
other the bytes an expert is to see, and that everything else is replicated. What that costs and how many devices take part is still
the planner's choice. Trained alone they change nothing.

python examples/mixture_of_experts.py          trains here, alone, in about a minute
atoll plan examples/mixture_of_experts.py --cluster examples/clusters/one_host.toml
"""

from functools import partial

import torch
from language_model import SEQUENCE, Attention, LanguageModel, loss
from torch import Tensor, nn
from torch.nn.functional import gelu, one_hot

import atoll
from atoll.data import StandardLibraryText

EXPERTS = 8
ROOM = 2 * SEQUENCE // EXPERTS  # bytes of one sample that one expert has room for: twice its fair share


class Experts(nn.Module):
    """Eight networks side by side: their weights are stacked, one slice an expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(gelu(torch.bmm(x, self.up)), self.down)  # [experts, rows, width]


class MixtureBlock(nn.Module):
    """Attention, then the one expert the router thinks best for each byte; a byte an expert has no room for passes by."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.expert_norm, self.router = nn.LayerNorm(width), nn.Linear(width, EXPERTS, bias=False)
        with atoll.split():  # the first of the two lines
            self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.expert_norm(x)
        trust, expert = self.router(y).softmax(-1).max(-1)  # [batch, sequence] each
        chosen = one_hot(expert, EXPERTS)  # [batch, sequence, experts]
        seat = (chosen.cumsum(1) - 1).clamp(0, ROOM)  # in the order of the sequence; the last seat is outside
        seated = (chosen.unsqueeze(-1) * one_hot(seat, ROOM + 1)[..., :ROOM]).to(y.dtype)  # [batch, sequence, experts, room]
        sent = torch.einsum("bser,bsw->ebrw", seated, y)
        answers = self.experts(sent.flatten(1, 2)).unflatten(1, sent.shape[1:3])
        return x + trust.unsqueeze(-1) * torch.einsum("bser,ebrw->bsw", seated, answers)


class MixtureModel(LanguageModel):
    """The language model with experts in every block."""

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__(layers=0, width=width)
        self.blocks = nn.ModuleList(MixtureBlock(width, heads) for _ in range(layers))


def build() -> nn.Module:
    return atoll.default(MixtureModel(), atoll.replica())  # the second; without it: return MixtureModel()


job = atoll.Job(
    name="mixture of experts",
    model=build,
    loss=loss,
    data=partial(StandardLibraryText, sequence_length=SEQUENCE),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    max_grad_norm=1.0,
    batch_size=16,
    steps=120,
)

if __name__ == "__main__":
    job.run()
