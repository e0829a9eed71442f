"""Presets of dense decoders: GPT-2 and -3, Megatron's sizes, ERNIE, M6-10B, Llama. Shapes as their authors published them."""

from functools import partial

from atoll.graph.generate import dense_transformer
from atoll.graph.preset_entry import PresetEntry

__all__ = ["GPT_MODELS", "LLAMA_MODELS"]


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
