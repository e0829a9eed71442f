"""Models for the tests of tensor parallelism: tiny Hugging Face ones, unchanged, and small ones with one difficulty each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, embedding, gelu, log_softmax, nll_loss

from .tensor_ranks import Case

VOCABULARY, TOKENS = 97, 6  # a prime: rows of a vocabulary need not divide evenly

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCABULARY}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
DECODER = SHAPE | SPECIAL | {"num_key_value_heads": 4, "max_position_embeddings": 64}
ENCODER = SHAPE | {"max_position_embeddings": 66, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = SPECIAL | {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
NO_GPT2_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY, "decoder_start_token_id": 0}
SEQ2SEQ = SPECIAL | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQ2SEQ |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "decoder_start_token_id": 2, "dropout": 0.0}
WHISPER = SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 24}
FALCON = SPECIAL | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 4, "vocab_size": VOCABULARY}
FALCON |= {"new_decoder_architecture": True, "alibi": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
BLOOM = SPECIAL | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "attention_dropout": 0.0, "hidden_dropout": 0.0}
OPT = DECODER | {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}
NEOX = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"} | {"attention_dropout": 0.0, "hidden_dropout": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, TOKENS))
    labels = ids.clone()
    labels[0, 3] = -100
    return {"input_ids": ids, "labels": labels}


def images(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 70, (samples,))}


def speech(samples: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(samples, 8, 40), "labels": torch.randint(3, VOCABULARY, (samples, TOKENS))}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(**batch).loss
    return result


def hugging_face(name: str, model: str, configuration: str, values: dict[str, Any], batch: Callable[[int], Any] = tokens) -> Case:
    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, configuration)(**values))
        return built

    return Case(name, build, own_loss, batch)


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 16), torch.randint(0, VOCABULARY, (samples,))


def sentences(samples: int) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, VOCABULARY, (samples, TOKENS))
    target[0, 1] = 5
    return torch.randint(0, VOCABULARY, (samples, TOKENS)), target


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 24), nn.Linear(24, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.second(dropout(gelu(self.first(x)), 0.25)))
        return result


class Classifier(nn.Module):
    """Two MLPs and a wide output layer, with the loss a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Feedforward(), Feedforward())
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("importance", torch.linspace(0.5, 2, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits


class Tied(nn.Module):
    """Embedding and output layer share one table, in different layers."""

    def __init__(self, shift: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16, padding_idx=5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2)])
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = hidden @ self.table.weight.T
        return logits.flip(-1) if self.shift else logits  # no rule divides a flip: then the output layer stays whole


class OneLayerTied(nn.Module):
    """The same table looked up and multiplied by in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(embedding(x, self.table)) @ self.table.T


class Encoder(nn.Module):
    """PyTorch's own encoder: three projections in one, heads folded into the batch, dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 48, dropout=0.2, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 3, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


class Gate(nn.Module):
    """A gate whose two halves are one product, with a bias and a slope that are parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(16, 48, bias=False), nn.Linear(24, 16)
        self.bias = nn.Parameter(torch.randn(48))
        self.slope = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.gate(x) + self.bias).chunk(2, -1)
        return x + self.down(a * torch.sigmoid(b * self.slope))


class Gated(nn.Module):
    """The second and the third block are one module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gate(), Gate()])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor], weighed: bool = False, **options: Any) -> Tensor:
    x, target = batch
    logits = model(x)
    if logits.dim() == 3:
        logits, target = logits.transpose(1, 2), target
    weight = model.importance if weighed else None
    loss = cross_entropy(logits, target, weight, **options)
    return loss if loss.dim() == 0 else loss.square().mean()


def likelihood(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return nll_loss(log_softmax(model(x), -1), target, reduction="sum")


def logits_used_twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    logits = model(x)
    return cross_entropy(logits, target) + 1e-3 * torch.logsumexp(logits, -1).square().mean()


_HUGGING_FACE: dict[str, tuple[Any, ...]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | NO_GPT2_DROPOUT),
    "gpt2-dropout": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-grouped": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"num_attention_heads": 8, "head_dim": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"dropout_rate": 0.0, "use_cache": False}),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ | {"max_position_embeddings": 64}),
    "vit": ("ViTForImageClassification", "ViTConfig", ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 70}, images),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, speech),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"head_dim": 8, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | EXPERTS),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER | {"num_key_value_heads": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DECODER
        | {"n_routed_experts": 4, "n_shared_experts": 1}
        | {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
}

CASES: dict[str, Callable[[], Case]] = {name: partial(hugging_face, name, *given) for name, given in _HUGGING_FACE.items()}
CASES |= {
    "classifier": lambda: Case("classifier", Classifier, entropy, vectors, random=True),
    "smoothed": lambda: Case("smoothed", Classifier, partial(entropy, label_smoothing=0.1), vectors, random=True),
    "weighed": lambda: Case("weighed", Classifier, partial(entropy, weighed=True, label_smoothing=0.1, ignore_index=5), vectors),
    "rows": lambda: Case("rows", Classifier, partial(entropy, weighed=True, reduction="none"), vectors, random=True),
    "total": lambda: Case("total", Classifier, partial(entropy, reduction="sum"), vectors, sums=True, random=True),
    "likelihood": lambda: Case("likelihood", Classifier, likelihood, vectors, sums=True, random=True),
    "logits-used-twice": lambda: Case("logits-used-twice", Classifier, logits_used_twice, vectors),
    "tied": lambda: Case("tied", Tied, partial(entropy, ignore_index=5), sentences),
    "tied-half": lambda: Case("tied-half", partial(Tied, shift=True), entropy, sentences),
    "tied-in-one-layer": lambda: Case("tied-in-one-layer", OneLayerTied, entropy, sentences),
    "encoder": lambda: Case("encoder", Encoder, entropy, vectors),
    "gate": lambda: Case("gate", Gated, entropy, vectors),
}
