"""Models by name, from their published shapes: `preset("gpt3-175b")`.

`PRESETS` lists them: dense decoders (GPT-2 and -3, Megatron's sizes, ERNIE, M6-10B, Llama), mixtures of experts, encoders,
encoder–decoders, recurrent and image models. A preset is a Graph and what else planning needs to know: the batch it was trained with and
its optimizer.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Protocol

import msgspec

from atoll.errors import JobError
from atoll.graph.generate import (
    dense_transformer,
    encoder_decoder,
    mixture_of_experts,
    recurrent_translator,
    speech_recogniser,
    transformer_encoder,
)
from atoll.graph.generate_vision import residual_network, vision_transformer
from atoll.graph.graph import Graph, Precision

__all__ = ["PRESETS", "Preset", "PresetEntry", "preset"]


class GraphBuilder(Protocol):
    """A generator of graphs with the shape already given."""

    def __call__(self, *, name: str, precision: Precision) -> Graph:
        """The graph under that name, in that precision."""


@dataclass(frozen=True, kw_only=True)
class PresetEntry:
    """One line of the table. `parameters` is the published count; `build` makes the graph."""

    name: str
    description: str
    parameters: float
    source: str
    batch_size: int
    build: GraphBuilder
    precision: Precision = "fp16"
    optimizer: str = "adamw"


def _gpt(
    name: str,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    source: str,
    *,
    sequence: int = 2048,
    vocabulary: int = 50257,
) -> PresetEntry:
    """GPT-2's architecture at another size; the vocabulary is padded to a multiple of 128 as Megatron does."""
    build = partial(
        dense_transformer, layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary, vocabulary_multiple=128
    )
    description = f"decoder, {layers} layers of {hidden}, {heads} heads, {sequence} tokens"
    return PresetEntry(name=name, description=description, parameters=parameters, source=source, batch_size=batch_size, build=build)


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2 (sizes as released)"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, arXiv 2005.14165, table 2.1"
_MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, table 1"

_OPT = "Zhang et al. 2022, OPT: Open Pre-trained Transformer Language Models, arXiv 2205.01068, table 1"
_NEO = "Black et al. 2021, GPT-Neo, released configuration"
_RECALLED = "; shape as recalled, its total agrees with the published count"
_M6 = "Lin et al. 2021, M6: A Chinese Multimodal Pretrainer, arXiv 2103.00823; planned in Whale (Jia et al., USENIX ATC 2022)" + _RECALLED
_ERNIE = "Wang et al. 2021, ERNIE 3.0 Titan, arXiv 2112.12731 (universal module; the small task modules are left out)" + _RECALLED
_LLAMA = "Touvron et al. 2023, LLaMA, arXiv 2302.13971, table 2"
_LLAMA2 = "Touvron et al. 2023, Llama 2, arXiv 2307.09288, table 1 and released configuration"
_LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv 2407.21783, table 3"


def _ernie() -> PresetEntry:
    """Wide: a feed-forward part of sixteen times the width of 12,288 is what makes 48 layers 260 billion parameters."""
    build = partial(dense_transformer, layers=48, hidden=12288, heads=192, feed_forward=196608, sequence=512, vocabulary=40000)
    description = "decoder, 48 layers of 12288 with a feed-forward width of 196608, 192 heads, 512 tokens"
    return PresetEntry(name="ernie-260b", description=description, parameters=260e9, source=_ERNIE, batch_size=2048, build=build)


_llama_like = partial(dense_transformer, gated=True, bias=False, dropout=False, positions="rotary", flash_attention=True, tied=False)


def _llama(
    name: str,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    feed_forward: int,
    batch_size: int,
    source: str,
    *,
    kv_heads: int | None = None,
    sequence: int = 2048,
    vocabulary: int = 32000,
) -> PresetEntry:
    """Gated feed-forward, RMS norms, rotary positions, no biases, fused attention."""
    build = partial(
        _llama_like,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=feed_forward,
        sequence=sequence,
        vocabulary=vocabulary,
    )
    description = f"decoder, {layers} layers of {hidden}, {heads} heads over {kv_heads or heads} key-value heads, {sequence} tokens"
    return PresetEntry(
        name=name,
        description=description,
        parameters=parameters,
        source=source,
        batch_size=batch_size,
        build=build,
        precision="bf16",
    )


# GPT-3 prints 5140 as the width of its 13B model and 24 as the heads of its 1.3B one; neither agrees with its own head size of 128.
GPT_MODELS: tuple[PresetEntry, ...] = (
    _gpt("gpt2", 124e6, 12, 768, 12, 512, _GPT2, sequence=1024),
    _gpt("gpt2-medium", 355e6, 24, 1024, 16, 512, _GPT2, sequence=1024),
    _gpt("gpt2-large", 774e6, 36, 1280, 20, 512, _GPT2, sequence=1024),
    _gpt("gpt2-xl", 1558e6, 48, 1600, 25, 512, _GPT2, sequence=1024),
    _gpt("gpt3-125m", 125e6, 12, 768, 12, 256, _GPT3),
    _gpt("gpt3-350m", 350e6, 24, 1024, 16, 256, _GPT3),
    _gpt("gpt3-760m", 760e6, 24, 1536, 16, 256, _GPT3),
    _gpt("gpt3-1.3b", 1.3e9, 24, 2048, 16, 512, _GPT3),
    _gpt("gpt3-2.7b", 2.7e9, 32, 2560, 32, 512, _GPT3),
    _gpt("gpt3-6.7b", 6.7e9, 32, 4096, 32, 1024, _GPT3),
    _gpt("gpt3-13b", 13e9, 40, 5120, 40, 1024, _GPT3),
    _gpt("gpt3-175b", 175e9, 96, 12288, 96, 1536, _GPT3),
    _gpt("megatron-1.7b", 1.7e9, 24, 2304, 24, 512, _MEGATRON),
    _gpt("megatron-3.6b", 3.6e9, 30, 3072, 32, 512, _MEGATRON),
    _gpt("megatron-7.5b", 7.5e9, 36, 4096, 32, 512, _MEGATRON),
    _gpt("megatron-18.4b", 18.4e9, 40, 6144, 48, 1024, _MEGATRON),
    _gpt("megatron-39.1b", 39.1e9, 48, 8192, 64, 1536, _MEGATRON),
    _gpt("megatron-76b", 76.1e9, 60, 10240, 80, 1792, _MEGATRON),
    _gpt("megatron-145b", 145.6e9, 80, 12288, 96, 2304, _MEGATRON),
    _gpt("megatron-310b", 310.1e9, 96, 16384, 128, 2160, _MEGATRON),
    _gpt("megatron-530b", 529.6e9, 105, 20480, 128, 2520, _MEGATRON),
    _gpt("megatron-1t", 1008e9, 128, 25600, 160, 3072, _MEGATRON),
    _gpt("opt-350m", 350e6, 24, 1024, 16, 256, _OPT, vocabulary=50272),  # its 512-wide table counted as wide as the model
    _gpt("gpt-neo-2.7b", 2.7e9, 32, 2560, 20, 1024, _NEO),  # its local attention counted as global
    _gpt("m6-10b", 10e9, 50, 4096, 128, 1024, _M6, sequence=512, vocabulary=21128),
    _ernie(),
)

LLAMA_MODELS: tuple[PresetEntry, ...] = (
    _llama("llama-7b", 6.7e9, 32, 4096, 32, 11008, 2048, _LLAMA),
    _llama("llama-13b", 13.0e9, 40, 5120, 40, 13824, 2048, _LLAMA),
    _llama("llama-8b", 8.0e9, 32, 4096, 32, 14336, 1024, _LLAMA3, kv_heads=8, sequence=8192, vocabulary=128256),
    _llama("llama-70b", 69e9, 80, 8192, 64, 28672, 1024, _LLAMA2, kv_heads=8, sequence=4096),
    _llama("llama-3-70b", 70.6e9, 80, 8192, 64, 28672, 1024, _LLAMA3, kv_heads=8, sequence=8192, vocabulary=128256),
    _llama("llama-3-405b", 405e9, 126, 16384, 128, 53248, 2048, _LLAMA3, kv_heads=8, sequence=8192, vocabulary=128256),
)


_M6T = (
    "Yang et al. 2021, M6-T: Exploring Sparse Expert Models and Beyond, arXiv 2105.15082; planned in Whale (Jia et al., USENIX ATC 2022); "
    "shape and optimizer as recalled, its total agrees with the published count"
)
_MIXTRAL = "Jiang et al. 2024, Mixtral of Experts, arXiv 2401.04088, table 1"
_DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv 2412.19437, section 4.2"
_BERT = "Devlin et al. 2019, BERT, arXiv 1810.04805, section 3"
_ROBERTA = "Liu et al. 2019, RoBERTa, arXiv 1907.11692, section 5 and released configuration"
_T5 = "Raffel et al. 2020, Exploring the Limits of Transfer Learning, arXiv 1910.10683, section 3.7"
_GNMT = (
    "Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144; 278 M in Shazeer et al. 2017, arXiv 1701.06538, table 2"
)
_RESNET = "He et al. 2016, Deep Residual Learning, arXiv 1512.03385; stride in the 3×3 convolution as in torchvision (4.09 G multiply-adds)"
_WHALE = "Jia et al. 2022, Whale, USENIX ATC: ResNet-50 features with a classifier of 100,000 classes"
_VIT = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, arXiv 2010.11929, table 1"
_WHISPER = "Radford et al. 2022, Robust Speech Recognition via Large-Scale Weak Supervision, arXiv 2212.04356, table 1"


def _m6(name: str, parameters: float, experts: int, expert_hidden: int, batch_size: int) -> PresetEntry:
    """M6-T's sparse models: 24 layers of 1,024, experts in each, two of them a token."""
    build = partial(
        mixture_of_experts, layers=24, hidden=1024, heads=16, sequence=512, vocabulary=21128, experts=experts, active_experts=2,
        expert_hidden=expert_hidden, capacity=1.25,
    )  # fmt: skip
    description = f"mixture of experts, 24 layers of 1024, {experts} experts of {expert_hidden} in each, 2 a token, 512 tokens"
    return PresetEntry(
        name=name, description=description, parameters=parameters, source=_M6T, batch_size=batch_size, build=build, optimizer="adafactor"
    )


_sparse_llama = partial(mixture_of_experts, gated=True, bias=False, dropout=False, positions="rotary", flash_attention=True, tied=False)
_mixtral = partial(
    _sparse_llama, layers=32, hidden=4096, heads=32, kv_heads=8, sequence=4096, vocabulary=32000,
    experts=8, active_experts=2, expert_hidden=14336,
)  # fmt: skip
# with ordinary attention of about as many parameters in place of its latent attention
_deepseek = partial(
    _sparse_llama, layers=61, hidden=7168, heads=56, head_size=128, sequence=4096, vocabulary=129280,
    experts=256, active_experts=8, shared_experts=1, expert_hidden=2048, dense_layers=3, feed_forward=18432,
)  # fmt: skip


def _encoder(
    name: str,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    source: str,
    *,
    vocabulary: int = 30522,
    segments: int = 2,
    positions_kept: int = 512,
) -> PresetEntry:
    build = partial(
        transformer_encoder, layers=layers, hidden=hidden, heads=heads, sequence=512, vocabulary=vocabulary, segments=segments,
        positions_kept=positions_kept,
    )  # fmt: skip
    description = f"encoder with masked-language head, {layers} layers of {hidden}, {heads} heads, 512 tokens"
    return PresetEntry(name=name, description=description, parameters=parameters, source=source, batch_size=batch_size, build=build)


def _t5(name: str, parameters: float, layers: int, hidden: int, heads: int, head_size: int, feed_forward: int) -> PresetEntry:
    build = partial(
        encoder_decoder, encoder_layers=layers, decoder_layers=layers, hidden=hidden, heads=heads, head_size=head_size,
        feed_forward=feed_forward, sequence=512, target_sequence=114, vocabulary=32128, bias=False,
    )  # fmt: skip
    description = f"encoder–decoder, {layers}+{layers} layers of {hidden}, {heads} heads, 512 tokens in, 114 out"
    return PresetEntry(
        name=name,
        description=description,
        parameters=parameters,
        source=_T5,
        batch_size=128,
        build=build,
        precision="bf16",
        optimizer="adafactor",
    )


OTHER_MODELS: tuple[PresetEntry, ...] = (
    _m6("m6-moe-100b", 103.2e9, 512, 4096, 1024),
    _m6("m6-moe-1t", 1002.7e9, 960, 21248, 3840),
    PresetEntry(
        name="mixtral-8x7b",
        description="mixture of experts, 32 layers of 4096, 8 experts of 14336, 2 a token, 4096 tokens",
        parameters=46.7e9,
        source=_MIXTRAL,
        batch_size=1024,
        build=_mixtral,
        precision="bf16",
    ),
    PresetEntry(
        name="deepseek-v3-like",
        description="mixture of experts, 61 layers of 7168, 256 experts of 2048 and a shared one, 8 a token, 4096 tokens",
        parameters=671e9,
        source=_DEEPSEEK,
        batch_size=15360,
        build=_deepseek,
        precision="bf16",
    ),
    _encoder("bert-base", 110e6, 12, 768, 12, 256, _BERT),
    _encoder("bert-large", 340e6, 24, 1024, 16, 256, _BERT),
    _encoder("roberta-base", 125e6, 12, 768, 12, 8192, _ROBERTA, vocabulary=50265, segments=1, positions_kept=514),
    _encoder("roberta-large", 355e6, 24, 1024, 16, 8192, _ROBERTA, vocabulary=50265, segments=1, positions_kept=514),
    _t5("t5-small", 60e6, 6, 512, 8, 64, 2048),
    _t5("t5-base", 220e6, 12, 768, 12, 64, 3072),
    _t5("t5-large", 738e6, 24, 1024, 16, 64, 4096),
    _t5("t5-3b", 2.85e9, 24, 1024, 32, 128, 16384),
    _t5("t5-11b", 11.3e9, 24, 1024, 128, 128, 65536),
    PresetEntry(
        name="gnmt",
        description="recurrent translator, 8+8 LSTM layers of 1024 with attention, 50 tokens in and out",
        parameters=278e6,
        source=_GNMT,
        batch_size=1024,
        build=recurrent_translator,
        precision="fp32",
        optimizer="adam",
    ),
    PresetEntry(
        name="resnet50",
        description="residual network, 50 layers, 224×224 images, 1000 classes",
        parameters=25.557e6,
        source=_RESNET,
        batch_size=256,
        build=residual_network,
        precision="fp32",
        optimizer="sgd",
    ),
    PresetEntry(
        name="resnet50-100k",
        description="ResNet-50 with a classifier of 100,000 classes, the part worth splitting",
        parameters=228.4e6,
        source=_WHALE,
        batch_size=256,
        build=partial(residual_network, classes=100_000),
        precision="fp32",
        optimizer="sgd",
    ),
    PresetEntry(
        name="resnet152",
        description="residual network, 152 layers, 224×224 images, 1000 classes",
        parameters=60.19e6,
        source=_RESNET,
        batch_size=256,
        build=partial(residual_network, depth=152),
        precision="fp32",
        optimizer="sgd",
    ),
    PresetEntry(
        name="vit-l16",
        description="vision transformer, 24 layers of 1024, 224×224 images in patches of 16",
        parameters=304e6,
        source=_VIT,
        batch_size=4096,
        build=partial(vision_transformer, layers=24, hidden=1024, heads=16),
        precision="bf16",
    ),
    PresetEntry(
        name="whisper-large",
        description="speech recogniser, 32+32 layers of 1280, 30 s of sound, 448 tokens",
        parameters=1550e6,
        source=_WHISPER,
        batch_size=256,
        build=partial(speech_recogniser, layers=32, hidden=1280, heads=20, vocabulary=51865),
    ),
)


PRESETS: tuple[PresetEntry, ...] = (*GPT_MODELS, *LLAMA_MODELS, *OTHER_MODELS)


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A published model, ready to be planned. `batch_size` is in samples (sequences, images, sentence pairs)."""

    graph: Graph
    batch_size: int
    optimizer: str
    description: str
    source: str


def preset(name: str, *, precision: Precision | None = None, batch_size: int | None = None) -> Preset:
    """The model of that name, in its own precision and batch size unless others are given."""
    entry = next((entry for entry in PRESETS if entry.name == name.lower()), None)
    if entry is None:
        raise JobError(_unknown(name))
    if batch_size is not None and batch_size < 1:
        raise JobError(f"{name}: batch_size must be at least 1, got {batch_size}")
    return Preset(
        graph=entry.build(name=entry.name, precision=precision or entry.precision),
        batch_size=batch_size or entry.batch_size,
        optimizer=entry.optimizer,
        description=entry.description,
        source=entry.source,
    )


def _unknown(name: str) -> str:
    names = [entry.name for entry in PRESETS]
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(other) for other in near)}?" if near else f"there are: {', '.join(names)}"
    return f"no preset is called {name!r}; {hint}"
