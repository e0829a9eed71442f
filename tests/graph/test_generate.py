"""Generated graphs agree with the formulas published for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import JobError
from atoll.graph.generate import dense_transformer, encoder_decoder, mixture_of_experts, transformer_encoder
from atoll.graph.graph import Graph

# layers, hidden, heads, sequence, vocabulary
SHAPES = [(30, 3072, 32, 2048, 51200), (96, 12288, 96, 2048, 51200), (128, 25600, 160, 2048, 51200), (12, 768, 12, 1024, 50304)]


def megatron(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> Graph:
    return dense_transformer(name="m", layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary)


@pytest.mark.parametrize(("layers", "hidden", "heads", "sequence", "vocabulary"), SHAPES)
def test_parameters_agree_with_narayanan_2021(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> None:
    graph = megatron(layers, hidden, heads, sequence, vocabulary)
    published = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))
    assert graph.parameters == pytest.approx(published, rel=1e-4)


@pytest.mark.parametrize(("layers", "hidden", "heads", "sequence", "vocabulary"), SHAPES)
def test_flops_with_recomputation_agree_with_narayanan_2021(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> None:
    graph = megatron(layers, hidden, heads, sequence, vocabulary)
    published = 96 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    recomputed = sum(work.flops * work.count for layer in graph.layers[1:-1] for work in layer.work)
    assert graph.training_flops + recomputed == pytest.approx(published, rel=1e-6)


@given(st.integers(1, 64), st.integers(1, 32), st.integers(1, 4096))
def test_saved_activations_agree_with_korthikanti_2022(heads: int, head_size: int, sequence: int) -> None:
    hidden = heads * head_size
    block = megatron(2, hidden, heads, sequence, 128).layers[1]
    assert block.saved_bytes == pytest.approx(sequence * hidden * (34 + 5 * heads * sequence / hidden))
    assert block.split_saved_bytes == pytest.approx(sequence * hidden * (24 + 5 * heads * sequence / hidden))


def test_block_reduces_twice_and_passes_one_stream() -> None:
    block = megatron(2, 1024, 16, 2048, 51200).layers[1]
    assert (block.tensor_bytes, block.tensor_reductions, block.tensor_units) == (2 * 2048 * 1024 * 2, 2, 16)
    assert block.input_bytes == block.output_bytes == block.gradient_bytes == 2048 * 1024 * 2
    assert [work.split for work in block.work if work.kind in ("matmul", "attention")] == [
        "columns",
        "rows",
        "rows",
        "depth",
        "columns",
        "depth",
    ]


def test_full_precision_doubles_what_is_not_a_mask() -> None:
    half = dense_transformer(name="m", layers=1, hidden=64, heads=4, sequence=32, vocabulary=100, dropout=False)
    full = dense_transformer(name="m", layers=1, hidden=64, heads=4, sequence=32, vocabulary=100, dropout=False, precision="fp32")
    assert full.layers[1].saved_bytes == 2 * half.layers[1].saved_bytes
    assert full.layers[1].tensor_bytes == 2 * half.layers[1].tensor_bytes
    assert full.training_flops == half.training_flops


def test_flash_attention_keeps_no_square_and_skips_half_of_it() -> None:
    plain = dense_transformer(name="m", layers=1, hidden=64, heads=4, sequence=512, vocabulary=100, dropout=False)
    flash = dense_transformer(name="m", layers=1, hidden=64, heads=4, sequence=512, vocabulary=100, dropout=False, flash_attention=True)
    square = 4 * 512 * 512
    assert plain.layers[1].saved_bytes - flash.layers[1].saved_bytes == 2 * square - 4 * 4 * 512
    assert plain.forward_flops - flash.forward_flops == 2 * square * 16


def test_llama_block_counts_three_matrices_and_grouped_keys() -> None:
    graph = dense_transformer(
        name="l",
        layers=1,
        hidden=4096,
        heads=32,
        kv_heads=8,
        sequence=8192,
        vocabulary=128256,
        feed_forward=14336,
        gated=True,
        bias=False,
        dropout=False,
        positions="rotary",
        tied=False,
    )
    block = graph.layers[1]
    assert block.parameters == 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    assert block.parameters - block.split_parameters == 2 * 4096
    assert block.tensor_units == 8
    assert graph.shared == ()


def test_tied_table_is_counted_once_and_shared() -> None:
    graph = megatron(2, 64, 4, 32, 1000)
    assert graph.shared[0].layers == (0, 3)
    assert graph.shared[0].parameters == 64_000
    assert graph.layers[-1].parameters == 2 * 64


def test_expert_flops_count_only_routed_tokens() -> None:
    shape = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000}
    dense = dense_transformer(name="d", **shape)
    sparse = mixture_of_experts(name="s", **shape, experts=16, active_experts=1, expert_hidden=256, every=2)
    router = 2 * 2 * 128 * 64 * 16
    assert sparse.forward_flops == pytest.approx(dense.forward_flops + router)
    assert [layer.experts for layer in sparse.layers] == [0, 0, 16, 0, 16, 0]
    assert sparse.layers[2].expert_parameters == 16 * (2 * 64 * 256 + 256 + 64)
    assert sparse.layers[2].expert_bytes == 128 * 64 * 2


def test_shared_experts_are_tensor_split() -> None:
    shape = {"layers": 1, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000, "experts": 8, "active_experts": 2}
    alone = mixture_of_experts(name="s", **shape, expert_hidden=32).layers[1]
    common = mixture_of_experts(name="s", **shape, expert_hidden=32, shared_experts=2).layers[1]
    assert common.parameters - alone.parameters == 2 * 64 * 64 + 64 + 64
    assert common.split_parameters - alone.split_parameters == 2 * 64 * 64 + 64
    assert common.expert_parameters == alone.expert_parameters


def test_encoder_output_crosses_every_cut_of_the_decoder() -> None:
    graph = encoder_decoder(
        name="t", encoder_layers=2, decoder_layers=3, hidden=64, heads=4, sequence=128, target_sequence=32, vocabulary=1000, bias=False
    )
    stream, memory = 32 * 64 * 2, 128 * 64 * 2
    assert [layer.output_bytes for layer in graph.layers] == [memory] * 3 + [stream + memory] * 3 + [stream, 0]
    assert graph.shared[0].layers == (0, 3, 7)
    assert graph.parameters == 1000 * 64 + 2 * (12 * 64**2 + 2 * 64) + 3 * (16 * 64**2 + 3 * 64) + 64


def test_encoder_is_not_causal() -> None:
    graph = transformer_encoder(name="b", layers=2, hidden=64, heads=4, sequence=128, vocabulary=1000, flash_attention=True)
    attention = next(work for work in graph.layers[1].work if work.kind == "attention")
    assert attention.flops == 4 * 128 * 128 * 64


def test_graph_survives_json() -> None:
    graph = mixture_of_experts(
        name="s", layers=2, hidden=64, heads=4, sequence=16, vocabulary=99, experts=4, active_experts=2, expert_hidden=32
    )
    assert Graph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "hidden 64 is not a multiple of 5 heads"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"kv_heads": 3}, "3 key-value heads"),
    ],
)
def test_impossible_shapes_are_errors(change: dict[str, int], message: str) -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 8, "vocabulary": 100} | change
    with pytest.raises(JobError, match=message):
        dense_transformer(name="x", **shape)


def test_more_active_experts_than_experts_is_an_error() -> None:
    with pytest.raises(JobError, match="active_experts must be between 1 and experts=4"):
        mixture_of_experts(name="x", layers=2, hidden=64, heads=4, sequence=8, vocabulary=9, experts=4, active_experts=5, expert_hidden=8)
