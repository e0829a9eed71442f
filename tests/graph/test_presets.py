"""Presets come out as large as published, and are found by name."""

import pytest

from atoll.errors import JobError
from atoll.graph.presets import PRESETS, PresetEntry, preset

ASKED = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-1.3b",
    "gpt3-175b",
    "megatron-3.6b",
    "megatron-18.4b",
    "megatron-39.1b",
    "megatron-76b",
    "megatron-145b",
    "megatron-310b",
    "megatron-530b",
    "megatron-1t",
    "ernie-260b",
    "m6-moe-100b",
    "m6-moe-1t",
    "m6-10b",
    "llama-7b",
    "llama-8b",
    "llama-13b",
    "llama-70b",
    "llama-3-405b",
    "mixtral-8x7b",
    "deepseek-v3-like",
    "bert-base",
    "bert-large",
    "roberta-base",
    "t5-base",
    "t5-large",
    "t5-3b",
    "t5-11b",
    "gnmt",
    "resnet50",
    "resnet50-100k",
    "vit-l16",
    "whisper-large",
    "opt-350m",
    "gpt-neo-2.7b",
]


def test_names_are_unique_and_include_what_was_promised() -> None:
    names = [entry.name for entry in PRESETS]
    assert len(names) == len(set(names))
    assert set(ASKED) <= set(names)


@pytest.mark.parametrize("entry", PRESETS, ids=lambda entry: entry.name)
def test_parameters_are_within_three_percent_of_published(entry: PresetEntry) -> None:
    made = preset(entry.name)
    assert made.graph.parameters == pytest.approx(entry.parameters, rel=0.03)
    assert made.graph.name == entry.name
    assert made.source
    assert made.batch_size > 0


@pytest.mark.parametrize("entry", PRESETS, ids=lambda entry: entry.name)
def test_costs_are_consistent(entry: PresetEntry) -> None:
    graph = preset(entry.name).graph
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    for layer in graph.layers:
        assert layer.parameters >= layer.split_parameters + layer.expert_parameters
        assert layer.saved_bytes >= layer.split_saved_bytes >= 0
        assert all(work.flops >= 0 and work.bytes > 0 for work in layer.work)
        assert all(work.flops == pytest.approx(2 * work.rows * work.columns * work.depth) for work in layer.work if work.kind == "matmul")
    assert all(layer.output_bytes > 0 for layer in graph.layers[:-1])
    by_signature = {layer.signature: layer for layer in graph.layers}
    for layer in graph.layers:
        twin = by_signature[layer.signature]
        assert (layer.work, layer.parameters, layer.saved_bytes, layer.output_bytes) == (
            twin.work,
            twin.parameters,
            twin.saved_bytes,
            twin.output_bytes,
        )


@pytest.mark.parametrize(
    ("name", "giga_multiply_adds"),
    [("resnet50", 4.089), ("resnet152", 11.51), ("vit-l16", 61.55)],  # as fvcore counts them for torchvision's models
)
def test_image_models_compute_as_much_as_published(name: str, giga_multiply_adds: float) -> None:
    assert preset(name).graph.forward_flops / 2e9 == pytest.approx(giga_multiply_adds, rel=0.01)


def test_resnet50_has_exactly_the_published_parameters() -> None:
    assert preset("resnet50").graph.parameters == 25_557_032


def test_precision_and_batch_can_be_chosen() -> None:
    full = preset("bert-large", precision="fp32", batch_size=7)
    assert (full.graph.precision, full.batch_size) == ("fp32", 7)
    assert full.graph.layers[1].output_bytes == 2 * preset("bert-large").graph.layers[1].output_bytes


def test_recurrent_products_are_one_row_at_a_time() -> None:
    work = preset("gnmt").graph.layers[4].work
    assert [(w.rows, w.count) for w in work if w.kind == "matmul"] == [(50, 1), (1, 50)]


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(JobError, match=r"no preset is called 'gpt3-175'; did you mean 'gpt3-175b'"):
        preset("gpt3-175")
    with pytest.raises(JobError, match="there are: gpt2"):
        preset("§§§")
    with pytest.raises(JobError, match="batch_size must be at least 1"):
        preset("gpt2", batch_size=0)
