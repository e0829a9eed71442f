"""The table behind `atoll.graph.presets`: shapes as their authors published them, each with its source."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.graph.generate import dense_transformer
from atoll.graph.graph import Graph, Precision

__all__ = ["PRESETS", "PresetEntry"]


@dataclass(frozen=True, kw_only=True)
class PresetEntry:
    """One line of the table. `parameters` is the published count; `build` makes the graph."""

    name: str
    description: str
    parameters: float
    source: str
    batch_size: int
    build: Callable[[str, Precision], Graph]
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

    def build(name: str, precision: Precision) -> Graph:
        return dense_transformer(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            sequence=sequence,
            vocabulary=vocabulary,
            vocabulary_multiple=128,
            precision=precision,
        )

    description = f"decoder, {layers} layers of {hidden}, {heads} heads, {sequence} tokens"
    return PresetEntry(name=name, description=description, parameters=parameters, source=source, batch_size=batch_size, build=build)


_GPT2 = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2 (sizes as released)"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, arXiv 2005.14165, table 2.1"
_MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, table 1"

# GPT-3 prints 5140 as the width of its 13B model and 24 as the heads of its 1.3B one; neither agrees with its own head size of 128.
_GPT_MODELS = (
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
)

PRESETS: tuple[PresetEntry, ...] = (*_GPT_MODELS,)
