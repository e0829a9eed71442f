"""Mixtures of experts as people write them, and tiny Hugging Face ones, as jobs."""

from collections.abc import Callable
from typing import Any

import torch
from captured_models import _DECODER, _DEEPSEEK, TinyJob, own_loss, tokens
from torch import Tensor, nn
from torch.nn.functional import gelu, one_hot, relu

EXPERTS, WIDTH, HIDDEN, SEQUENCE = 5, 6, 8, 4


class Mixture(nn.Module):
    """Stacked weights, a router, and a projection before and after so that gradients have to come through."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x + self.mix(x))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Repeated(Mixture):
    """Rows are repeated for every expert; biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN)), nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates = self.router(rows).softmax(-1)  # [rows, experts]
        hidden = gelu(torch.bmm(rows.expand(EXPERTS, *rows.shape), self.up) + self.up_bias.unsqueeze(1))
        answers = torch.baddbmm(self.down_bias.view(EXPERTS, 1, WIDTH), hidden, self.down)  # [experts, rows, width]
        return (gates.t().unsqueeze(-1) * answers).sum(0).view_as(x)


class Letters(Mixture):
    """Einsums; the gates are used among the experts."""

    def mix(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)  # [batch, sequence, experts]
        hidden = relu(torch.einsum("bsw,ewh->bseh", x, self.up)) * gates.unsqueeze(-1)
        return torch.einsum("bseh,ehw->bsew", hidden, self.down).sum(2)


class Summed(Mixture):
    """The last product sums over experts."""

    def mix(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        hidden = relu(torch.einsum("bsw,ewh->bseh", x, self.up))
        return torch.einsum("bse,bseh,ehw->bsw", gates, hidden, self.down)


class Broadcast(Mixture):
    """`matmul` of four dimensions, a gated hidden layer, weights stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)

    def mix(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1).transpose(1, 2).unsqueeze(-1)  # [batch, experts, sequence, 1]
        x = x.unsqueeze(1)  # [batch, 1, sequence, width]
        return (torch.matmul(torch.matmul(x, self.up) * torch.matmul(x, self.gate.transpose(1, 2)).sigmoid(), self.down) * gates).sum(1)


class Capacity(Mixture):
    """Masks put tokens into buffers of two seats an expert and sample."""

    def mix(self, x: Tensor) -> Tensor:
        trust, expert = self.router(x).softmax(-1).max(-1)
        chosen = one_hot(expert, EXPERTS)
        seat = one_hot((chosen.cumsum(1) - 1).clamp(0, 2), 3)[..., :2]
        mask = (chosen.unsqueeze(-1) * seat).to(x.dtype)  # [batch, sequence, experts, seats]
        sent = torch.einsum("bsec,bsw->ebcw", mask, x)
        hidden = relu(torch.einsum("ebcw,ewh->ebch", sent, self.up))
        answers = torch.einsum("ebch,ehw->ebcw", hidden, self.down)
        return torch.einsum("bsec,ebcw->bsw", mask * trust[..., None, None], answers)


class Picked(Mixture):
    """Weights, biases and a scale picked for each of two experts a token."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.randn(EXPERTS, HIDDEN)), nn.Parameter(torch.rand(EXPERTS))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        trust, experts = self.router(rows).softmax(-1).topk(2)
        ids = experts.flatten()
        twice = rows.repeat_interleave(2, 0)
        hidden = relu(torch.einsum("rw,rwh->rh", twice, self.up[ids]) + self.bias[ids])
        answers = (hidden.view(twice.shape[0], 1, HIDDEN) @ self.down[ids]).squeeze(1) * self.scale.index_select(0, ids)[:, None]
        return (answers * trust.flatten()[:, None]).view(-1, 2, WIDTH).sum(1).view_as(x)


class Chosen(Mixture):
    """Weights picked for all choices of a token at once, with a dimension for the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH)), nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        trust, ids = self.router(rows).softmax(-1).topk(2)  # [rows, 2]
        hidden = torch.einsum("rw,rcwh->rch", rows, self.up[ids])
        hidden = hidden * torch.matmul(self.gate[ids], rows[:, None, :, None]).squeeze(-1).sigmoid() * trust.unsqueeze(-1)
        answers = torch.einsum("rch,rchw->rcw", hidden.reshape(rows.shape[0], 2, HIDDEN), self.down[ids]) + self.bias[ids]
        return answers.sum(1).view_as(x)


class Collapsed(Picked):
    """All tokens go to the same two experts."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.router.weight.zero_()


class Two(nn.Module):
    """Two mixtures that are not recognised as repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Capacity(), Repeated()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Mixing(Repeated):
    """Something between the products mixes the experts."""

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        hidden = torch.bmm(rows.expand(EXPERTS, *rows.shape), self.up).softmax(0)
        return torch.bmm(hidden, self.down).sum(0).view_as(x)


class Decayed(Summed):
    """The experts' weights are read by something else, too."""

    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x) + self.down.square().mean()


class Dropping(Repeated):
    """Dropout among the experts."""

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        hidden = nn.functional.dropout(torch.bmm(rows.expand(EXPERTS, *rows.shape), self.up), 0.5)
        return torch.bmm(hidden, self.down).sum(0).view_as(x)


class BatchWide(Repeated):
    """A number that depends on all rows enters the experts."""

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        hidden = torch.bmm(rows.expand(EXPERTS, *rows.shape), self.up) * rows.mean(0).sum()
        return torch.bmm(hidden, self.down).sum(0).view_as(x)


class Heads(Mixture):
    """Stacked matrices that are heads of attention, not experts."""

    def mix(self, x: Tensor) -> Tensor:
        query, key = (torch.einsum("bsw,ewh->besh", x, self.up + shift) for shift in (0, 1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, torch.einsum("bsw,ewh->besh", x, self.up))
        return torch.einsum("besh,ehw->bsw", mixed, self.down)


def squares(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Total and weight, so that a lane without samples has a loss, too."""
    error = (model(batch["x"]) - batch["y"]).square()
    return error.sum(), torch.ones_like(error).sum()


def pairs(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, SEQUENCE, WIDTH), "y": torch.randn(samples, SEQUENCE, WIDTH)}


HAND_WRITTEN: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (Repeated, Letters, Summed, Broadcast, Capacity, Picked, Chosen, Collapsed, Two)
}
REFUSED: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (Mixing, Decayed, Dropping, BatchWide)}

_ONE = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
_FIVE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 8, **_FIVE}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": {"rope_type": "default"}},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK | {"first_k_dense_replace": 0, "n_routed_experts": 6}),
}


def _hugging_face(name: str) -> TinyJob:
    import transformers

    model, configuration, values = _HUGGING_FACE[name]

    def build() -> nn.Module:
        built: nn.Module = getattr(transformers, model)(getattr(transformers, configuration)(**_DECODER | values | _ONE))
        return built

    return TinyJob(name, build, own_loss, tokens)


def _hand_written(kind: Callable[[], nn.Module]) -> TinyJob:
    return TinyJob(getattr(kind, "__name__", "mixture"), kind, squares, pairs)


def mixture(name: str) -> TinyJob:
    """The job of that name."""
    known = HAND_WRITTEN | REFUSED | {"Heads": Heads}
    return _hand_written(known[name]) if name in known else _hugging_face(name)


HUGGING_FACE = tuple(_HUGGING_FACE)
