"""Hugging Face architectures at tiny sizes, from their own configuration classes: nothing is downloaded, and nothing is switched off.

A configuration is made with its defaults (dropout, SpecAugment, layer drop and auxiliary losses are what they are there) and only its sizes
are made small. Labels are padded with -100, each sample by another length; so are inputs, where the model takes a mask.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, CLASSES, IMAGE = 96, 12, 5, 32

_SIZES: dict[str, Any] = {  # attribute of a configuration → what it is set to, where the configuration has it as a number
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_or_config_json_file", "padded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "attention_head_size", "d_head"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 8),
    "qk_rope_head_dim": 4,
    "image_size": IMAGE,
    "patch_size": 8,
    "type_vocab_size": 2,
    "sliding_window": 8,
}


@dataclass(frozen=True)
class Architecture:
    """A model to try: how it is built, and a batch for it."""

    name: str
    task: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    by_pieces: bool = False  # it draws numbers that belong to no sample, so that each piece of a batch has its own
    epsilon: float = 1e-3  # of AdamW


def small(config_class: Any, **given: Any) -> Any:
    """The configuration with small sizes; what is given counts more."""
    default = config_class()
    names = {*inspect.signature(config_class.__init__).parameters, *vars(default), *getattr(config_class, "__dataclass_fields__", ())}
    sizes = {
        name: value for name, value in _SIZES.items() if name in names and type(getattr(default, name, None)) in (int, float, type(None))
    }
    sizes = {name: value for name, value in sizes.items() if getattr(default, name, None) is not None}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(default, name, None)
        if (isinstance(value, int) and value >= VOCABULARY) or (name == "pad_token_id" and value is None):
            sizes[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}[name]
    return config_class(**sizes | given)


def _lengths(samples: int, most: int) -> Tensor:
    """Of each sample, between a third and all of `most`."""
    return torch.randint(most // 3, most + 1, (samples,))


def _padded(samples: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask of those that count, and labels of which the others are ignored."""
    ids, mask = torch.randint(3, VOCABULARY, (samples, tokens)), torch.arange(tokens)[None] < _lengths(samples, tokens)[:, None]
    return ids.where(mask, 0), mask.long(), ids.where(mask, -100)


def text(samples: int) -> dict[str, Tensor]:
    """For decoders: each token is to be told from those before it."""
    ids, mask, labels = _padded(samples)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def unmasked_text(samples: int) -> dict[str, Tensor]:
    """For models that take no mask."""
    ids, _, labels = _padded(samples)
    return {"input_ids": ids, "labels": labels}


def masked_text(samples: int) -> dict[str, Tensor]:
    """For encoders: some tokens are to be guessed."""
    ids, mask, labels = _padded(samples)
    hidden = torch.rand(samples, TOKENS) < 0.3
    hidden[:, 0] = True
    return {"input_ids": ids.where(~hidden, 1), "attention_mask": mask, "labels": labels.where(hidden, -100)}


def classified_text(samples: int) -> dict[str, Tensor]:
    """A class for each text."""
    ids, mask, _ = _padded(samples)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, CLASSES, (samples,))}


def ended_text(samples: int) -> dict[str, Tensor]:
    """The same for models that read the class off the token that ends a text."""
    batch = classified_text(samples)
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    return batch | {"input_ids": batch["input_ids"].scatter(1, last, 1)}


def translated_text(samples: int) -> dict[str, Tensor]:
    """For encoders with decoders."""
    ids, mask, _ = _padded(samples)
    return {"input_ids": ids, "attention_mask": mask, "labels": _padded(samples, 9)[2]}


def images(samples: int) -> dict[str, Tensor]:
    """A class for each image."""
    return {"pixel_values": torch.randn(samples, 3, IMAGE, IMAGE), "labels": torch.randint(0, CLASSES, (samples,))}


def unlabelled_images(samples: int) -> dict[str, Tensor]:
    """For models that are trained to restore them."""
    return {"pixel_values": torch.randn(samples, 3, IMAGE, IMAGE)}


def recordings(samples: int, length: int = 600) -> dict[str, Tensor]:
    """Waves and what was said: CTC."""
    mask = torch.arange(length)[None] < torch.randint(length * 2 // 3, length + 1, (samples,))[:, None]
    waves = torch.randn(samples, length) * mask
    return {"input_values": waves, "attention_mask": mask.long(), "labels": _padded(samples, 6)[2]}


def classified_recordings(samples: int) -> dict[str, Tensor]:
    """A class for each recording."""
    return recordings(samples) | {"labels": torch.randint(0, CLASSES, (samples,))}


def spectra(samples: int) -> dict[str, Tensor]:
    """Spectrograms and what was said."""
    return {"input_features": torch.randn(samples, 8, 40), "labels": _padded(samples, 9)[2]}


def spectra_by_time(samples: int) -> dict[str, Tensor]:
    """The same, with time first and a mask."""
    mask = torch.arange(40)[None] < torch.randint(30, 41, (samples,))[:, None]
    return {"input_features": torch.randn(samples, 40, 8), "attention_mask": mask.long(), "labels": _padded(samples, 9)[2]}


def classified_spectra(samples: int) -> dict[str, Tensor]:
    """A class for each."""
    return {"input_values": torch.randn(samples, 32, 16), "labels": torch.randint(0, CLASSES, (samples,))}


_TASKS: dict[str, tuple[str, Callable[[int], dict[str, Tensor]]]] = {
    "causal": ("CAUSAL_LM", text),
    "masked": ("MASKED_LM", masked_text),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", translated_text),
    "classifier": ("SEQUENCE_CLASSIFICATION", classified_text),
    "image": ("IMAGE_CLASSIFICATION", images),
    "ctc": ("CTC", recordings),
    "audio": ("AUDIO_CLASSIFICATION", classified_recordings),
    "speech": ("SPEECH_SEQ_2_SEQ", spectra),
}

_NAMES = {
    "causal": """
        gpt2 gpt_neo gpt_neox gptj gpt_bigcode codegen openai-gpt opt bloom falcon llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe
        gemma gemma2 gemma3_text phi phi3 phimoe olmo olmo2 olmoe stablelm starcoder2 cohere cohere2 granite granitemoe granitemoeshared glm
        glm4 deepseek_v2 deepseek_v3 jetmoe jamba bamba mamba mamba2 falcon_mamba rwkv recurrent_gemma xglm biogpt ctrl persimmon nemotron
        helium smollm3 ernie4_5 ernie4_5_moe hunyuan_v1_dense minimax dots1 glm4_moe gpt_oss arcee seed_oss lfm2 mpt xlnet
        megatron-bert diffllama doge apertus vaultgemma flex_olmo""",
    "masked": """
        bert roberta albert distilbert electra deberta deberta-v2 xlm-roberta xlm-roberta-xl camembert mobilebert mpnet longformer big_bird
        convbert funnel fnet layoutlm squeezebert rembert roformer nystromformer yoso mra ibert esm flaubert xlm tapas modernbert eurobert
        data2vec-text ernie roberta-prelayernorm""",
    "classifier": "bert gpt2 llama t5",
    "seq2seq": """
        t5 mt5 umt5 longt5 switch_transformers bart mbart marian pegasus pegasus_x blenderbot blenderbot-small m2m_100 led bigbird_pegasus
        prophetnet plbart nllb-moe mvp""",
    "image": """
        vit deit beit swin swinv2 convnext convnextv2 resnet regnet dinov2 dinov2_with_registers focalnet mobilenet_v1 mobilenet_v2
        mobilevitv2 poolformer pvt pvt_v2 cvt bit data2vec-vision vit_msn segformer siglip clip swiftformer ijepa donut-swin""",
    "ctc": "wav2vec2 hubert wavlm sew sew-d unispeech unispeech-sat data2vec-audio wav2vec2-conformer",
    "audio": "audio-spectrogram-transformer wav2vec2 hubert",
    "speech": "whisper speech_to_text",
}
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": VOCABULARY,
}
_FOUR_STAGES: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_TWO_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
_WINDOWS: dict[str, Any] = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
_PARTS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION: dict[str, Any] = {**_PARTS, "image_size": IMAGE, "patch_size": 8}
_TEXT: dict[str, Any] = {**_PARTS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 2}
_BOTH: dict[str, Any] = {"vision_config": _VISION, "text_config": _TEXT}
_GIVEN: dict[str, dict[str, Any]] = {  # where small numbers alone do not fit together
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "ctrl": {"dff": 48},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 1},
    "funnel": {"d_inner": 48, "block_sizes": [1, 1], "num_decoder_layers": 1},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4, "expert_capacity": 64},
    "xlnet": {"d_inner": 48},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "donut-swin": _WINDOWS,
    "convnext": _TWO_STAGES,
    "convnextv2": _TWO_STAGES,
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "regnet": _FOUR_STAGES | {"embedding_size": 8, "groups_width": 4},
    "bit": _FOUR_STAGES | {"embedding_size": 8, "num_groups": 4},
    "focalnet": {
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "patch_size": 4,
    },
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevitv2": {"width_multiplier": 0.25, "image_size": IMAGE, "patch_size": 2, "output_stride": 16, "n_attn_blocks": [1, 1, 1]},
    "poolformer": _FOUR_STAGES,
    "pvt": _FOUR_STAGES | {"num_attention_heads": [1, 1, 2, 2]},
    "pvt_v2": _FOUR_STAGES | {"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]},
    "cvt": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "segformer": _FOUR_STAGES | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    "swiftformer": {"embed_dims": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "siglip": _BOTH,
    "clip": _BOTH,
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "wav2vec2-conformer"), _WAVES),
    "sew": _WAVES | {"squeeze_factor": 2},
    "sew-d": _WAVES | {"squeeze_factor": 2},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 20, "decoder_start_token_id": 1},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 16, "decoder_start_token_id": 1},
}


_BATCHES = {
    "speech_to_text speech": spectra_by_time,
    "audio-spectrogram-transformer audio": classified_spectra,
    "t5 classifier": ended_text,
}
_EPSILONS = {"rwkv": 0.1}  # its embeddings begin at 1e-4 before a normalisation, so that their gradients are in the hundreds
_BY_PIECES = ("funnel", "xlnet")  # dropout of positions
_CLASSES = ("classifier", "image", "audio")
_VARIATIONS = {  # as people configure them for fine-tuning
    "wav2vec2 ctc": {"layerdrop": 0.0, "ctc_loss_reduction": "mean"},
    "hubert audio": {"layerdrop": 0.0},
    "wav2vec2 audio": {"layerdrop": 0.0, "mask_feature_prob": 0.1, "mask_feature_length": 4},
    "whisper speech": {"apply_spec_augment": True, "mask_time_length": 4},
    "mixtral causal": {"output_router_logits": True},
}


def _architecture(kind: str, task: str, variation: dict[str, Any] | None = None) -> Architecture:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mapping, batch = _TASKS[task]
    found = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[kind]
    model_class = found if isinstance(found, str) else found[0]
    given = _GIVEN.get(kind, {}) | ({"num_labels": CLASSES} if task in _CLASSES else {}) | (variation or {})

    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, model_class)(small(CONFIG_MAPPING[kind], **given))
        return model

    text = "".join(f" {name}={value}" for name, value in (variation or {}).items())
    return Architecture(
        f"{kind} {task}{text}", task, build, _BATCHES.get(f"{kind} {task}", batch), kind in _BY_PIECES, _EPSILONS.get(kind, 1e-3)
    )


def share(model: nn.Module, task: str, piece: dict[str, Tensor], batch: dict[str, Tensor]) -> float:
    """What the loss of a piece counts for in the batch's, where each piece has to be computed by itself."""
    if task == "ctc" and model.config.ctc_loss_reduction == "sum":  # type: ignore[union-attr]
        return 1.0
    counted = [len(part["labels"]) for part in (piece, batch)]
    if task not in (*_CLASSES, "ctc"):
        first = 1 if task == "causal" and model.config.model_type != "xlnet" else 0  # type: ignore[union-attr]  # nothing is before it
        counted = [int((part["labels"][:, first:] != -100).sum()) for part in (piece, batch)]
    return counted[0] / counted[1]


def architectures() -> list[Architecture]:
    """All of them, in the order of their tasks."""
    found = [_architecture(kind, task) for task, names in _NAMES.items() for kind in names.split()]
    return found + [_architecture(*name.split(), variation) for name, variation in _VARIATIONS.items()]  # type: ignore[call-arg]
