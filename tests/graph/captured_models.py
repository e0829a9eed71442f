"""Tiny Hugging Face models, built from their configurations and otherwise unchanged, as jobs. No dropout: runs can be compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx.node import Node, map_aggregate
from torch.utils import _pytree as pytree

from atoll.graph.capture import Captured

VOCABULARY, TOKENS = 96, 16


@dataclass
class TinyJob:
    """The least that capture asks of a job."""

    name: str
    model: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], Any]
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batch_size: int = 4
    micro_batch_size: int | None = None
    collates_randomly: bool = False

    def example_batch(self, samples: int, first: int = 0) -> Any:
        """So many samples; pieces that are compared with the batch are cut from it."""
        piece = first or samples == 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batch = self.batch(self.batch_size if piece else samples)
        return pytree.tree_map(lambda leaf: leaf[first : first + samples], batch) if piece else batch


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


def tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, TOKENS))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_tokens(samples: int) -> dict[str, Tensor]:
    return tokens(samples) | {"attention_mask": torch.ones(samples, TOKENS, dtype=torch.long)}


def images(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32), "labels": torch.randint(0, 5, (samples,))}


def speech(samples: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(samples, 8, 40), "labels": torch.randint(3, VOCABULARY, (samples, TOKENS))}


_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 66,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SEQUENCE_TO_SEQUENCE = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
    "dropout": 0.0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, "use_cache": False} | {
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY} | {
    "decoder_start_token_id": 0,
    "use_cache": False,
    "dropout_rate": 0.0,
}
_WHISPER = _SEQUENCE_TO_SEQUENCE | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 24}
_DEEPSEEK = _DECODER | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    **_EXPERTS,
}

# name → class, configuration, its values, batch
_MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, tokens),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, tokens),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER, tokens),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER | {"head_dim": 8}, tokens),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER | {"head_dim": 8, "sliding_window": 8}, tokens),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER | {"head_dim": 8, "sliding_window": 8}, tokens),
    "bert": ("BertForMaskedLM", "BertConfig", _ENCODER, masked_tokens),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _ENCODER, masked_tokens),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5, tokens),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQUENCE_TO_SEQUENCE | {"max_position_embeddings": 64}, tokens),
    "vit": ("ViTForImageClassification", "ViTConfig", _VISION, images),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, speech),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}, tokens),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _DECODER | {"head_dim": 8, "num_experts": 4} | _EXPERTS, tokens),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK, tokens),
}
NAMES = tuple(_MODELS)


def tiny(name: str) -> TinyJob:
    """The job of that name; its model is a function that builds it."""
    import transformers

    model, configuration, values, batch = _MODELS[name]

    def build() -> nn.Module:
        built: nn.Module = getattr(transformers, model)(getattr(transformers, configuration)(**values))
        return built

    return TinyJob(name, build, own_loss, batch)


class Stage:
    """Executes one stage of a captured program with what the analysis says it needs, and nothing else."""

    def __init__(self, captured: Captured, model: nn.Module, batch: Any, start: int, stop: int, received: dict[str, Any]):
        self.captured, self.part = captured, captured.stage(start, stop)
        self.parameters: dict[int, Tensor] = {}  # by identity of the model's own parameter: this stage's copy
        self.values: dict[str, Any] = {}
        self._load(model, batch)
        self.inputs = {name: _received(received[name]) for name in self.part.receives}
        self.values |= self.inputs
        self.values |= {alias: self.inputs[name] for alias, name in captured.liveness.aliases().items() if name in self.inputs}
        nodes = {node.name: node for node in captured.program.graph.nodes}
        for name in self.part.run:
            self._execute(nodes[name])
        self.outputs = {name: self.values[name] for name in self.part.sends}

    def _load(self, model: nn.Module, batch: Any) -> None:
        program = self.captured.program
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for spec in program.graph_signature.input_specs:
            target = str(spec.target).removeprefix("model.")
            if spec.kind is InputKind.PARAMETER:
                own = model.get_parameter(target)
                self.values[spec.arg.name] = self.parameters.setdefault(id(own), own.detach().clone().requires_grad_(own.requires_grad))
            elif spec.kind is InputKind.BUFFER:
                self.values[spec.arg.name] = buffers[target].detach().clone()
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                self.values[spec.arg.name] = program.constants[str(spec.target)]
        for node in program.graph.nodes:
            if node.op == "get_attr":
                self.values[node.name] = getattr(program.graph_module, str(node.target))
        self.values |= dict(zip(program.graph_signature.user_inputs, pytree.tree_leaves(batch), strict=True))

    def _execute(self, node: Node) -> None:
        given = map_aggregate((node.args, node.kwargs), lambda leaf: self.values[leaf.name] if isinstance(leaf, Node) else leaf)
        args, kwargs = given
        self.values[node.name] = node.target(*args, **kwargs)


def _received(value: Any) -> Any:
    """What arrives over a wire: the same numbers, no history."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def run_in_two_stages(captured: Captured, model: nn.Module, batch: Any, cut: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Loss and gradients (by identity of the model's parameters) of the program cut before layer `cut`."""
    first = Stage(captured, model, batch, 0, cut, {})
    second = Stage(captured, model, batch, cut, len(captured.graph.layers), first.outputs)
    results = [second.values[str(name)] for name in captured.program.graph_signature.user_outputs]
    loss = results[0] if len(results) == 1 else results[0] / results[1]
    loss.backward()
    returned = {name: value.grad for name, value in second.inputs.items() if isinstance(value, Tensor) and value.grad is not None}
    if returned:
        torch.autograd.backward([first.outputs[name] for name in returned], list(returned.values()))
    gradients: dict[int, Tensor] = {}
    for stage in (second, first):
        for own, copy in stage.parameters.items():
            if copy.grad is not None:
                gradients[own] = gradients[own] + copy.grad if own in gradients else copy.grad
    return loss.detach(), gradients
