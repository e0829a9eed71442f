"""Presets that are not dense decoders: mixtures of experts, encoders, encoder–decoders, recurrent and image models."""

from functools import partial

from atoll.graph.generate import encoder_decoder, mixture_of_experts, speech_recogniser, transformer_encoder
from atoll.graph.generate_recurrent import recurrent_translator
from atoll.graph.generate_vision import residual_network, vision_transformer
from atoll.graph.preset_entry import PresetEntry

__all__ = ["OTHER_MODELS"]

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
