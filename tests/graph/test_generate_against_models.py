"""Generated graphs against the real models at small sizes: every parameter, and every forward FLOP torch counts."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.graph import (
    Graph,
    dense_transformer,
    encoder_decoder,
    mixture_of_experts,
    speech_recogniser,
    transformer_encoder,
    vision_transformer,
)

transformers = pytest.importorskip("transformers")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def flops(model: nn.Module, **batch: torch.Tensor) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**batch)
    return float(counter.get_total_flops())


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 100, (1, count))


def agree(graph: Graph, model: nn.Module, *, apart: int = 0, **batch: torch.Tensor) -> None:
    """Parameters but for `apart`, which the generator leaves out; FLOPs to a thousandth (norms of a router and the like)."""
    assert graph.parameters == parameters(model) - apart
    assert graph.forward_flops == pytest.approx(flops(model, **batch), rel=1e-3)


def test_gpt2() -> None:
    shape = {"vocab_size": 100, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, attn_implementation="eager"))
    graph = dense_transformer(name="g", layers=3, hidden=48, heads=4, sequence=32, vocabulary=100)
    agree(graph, model, input_ids=tokens(32))


def test_llama_with_grouped_keys() -> None:
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    graph = dense_transformer(
        name="l",
        layers=3,
        hidden=48,
        heads=6,
        kv_heads=2,
        feed_forward=80,
        sequence=32,
        vocabulary=100,
        gated=True,
        bias=False,
        dropout=False,
        positions="rotary",
        tied=False,
    )
    agree(graph, transformers.LlamaForCausalLM(config), input_ids=tokens(32))


def test_bert() -> None:
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    graph = transformer_encoder(name="b", layers=3, hidden=48, heads=4, sequence=32, vocabulary=100, positions_kept=64)
    agree(graph, transformers.BertForMaskedLM(config), input_ids=tokens(32))


def test_t5() -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=48, d_kv=8, d_ff=80, num_layers=3, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0
    )
    graph = encoder_decoder(
        name="t",
        encoder_layers=3,
        decoder_layers=2,
        hidden=48,
        heads=4,
        head_size=8,
        feed_forward=80,
        sequence=32,
        target_sequence=16,
        vocabulary=100,
        bias=False,
    )
    model = transformers.T5ForConditionalGeneration(config)
    final_norm, relative_positions = 48, 2 * 32 * 4
    agree(graph, model, apart=final_norm + relative_positions, input_ids=tokens(32), decoder_input_ids=tokens(16))


def test_mixtral() -> None:
    config = transformers.MixtralConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )
    graph = mixture_of_experts(
        name="m",
        layers=2,
        hidden=48,
        heads=4,
        kv_heads=2,
        sequence=32,
        vocabulary=100,
        experts=4,
        active_experts=2,
        expert_hidden=80,
        gated=True,
        bias=False,
        dropout=False,
        positions="rotary",
        tied=False,
    )
    agree(graph, transformers.MixtralForCausalLM(config), input_ids=tokens(32))


def test_vision_transformer() -> None:
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
        num_labels=10,
        attn_implementation="eager",
    )
    graph = vision_transformer(name="v", layers=3, hidden=48, heads=4, image=32, patch=8, classes=10)
    agree(graph, transformers.ViTForImageClassification(config), pixel_values=torch.randn(1, 3, 32, 32))


def test_whisper() -> None:
    config = transformers.WhisperConfig(
        vocab_size=100,
        num_mel_bins=16,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        max_source_positions=32,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    graph = speech_recogniser(name="w", layers=2, hidden=48, heads=4, vocabulary=100, mel_bins=16, frames=64, target_sequence=16)
    model = transformers.WhisperForConditionalGeneration(config)
    assert graph.parameters == pytest.approx(parameters(model), rel=0.01)
    counted = flops(model, input_features=torch.randn(1, 16, 64), decoder_input_ids=tokens(16))
    assert graph.forward_flops == pytest.approx(counted, rel=1e-3)
