"""Graphs of transformers from their published shapes: dense, mixture of experts, encoder only, encoder–decoder.

For models that are planned or simulated without their code. A sample is one sequence. Layers are the embedding, each block, and the head
with the loss; a block keeps all its activations (`Layer.saved_bytes`) unless the plan recomputes it.
"""

from dataclasses import replace

import msgspec

from atoll.errors import JobError
from atoll.graph.graph import Graph, Layer, Precision, SharedParameter
from atoll.graph.parts import Part, matmul, memory
from atoll.graph.transformers import Experts, Positions, TransformerShape, block, embedding, head, layer_of

__all__ = ["dense_transformer", "encoder_decoder", "mixture_of_experts", "speech_recogniser", "transformer_encoder"]


def dense_transformer(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    feed_forward: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    gated: bool = False,
    bias: bool = True,
    attention_bias: bool = False,
    dropout: bool = True,
    positions: Positions = "learned",
    flash_attention: bool = False,
    causal: bool = True,
    tied: bool = True,
    precision: Precision = "fp16",
    vocabulary_multiple: int = 1,
) -> Graph:
    """A decoder such as GPT (the defaults) or Llama (`gated`, no `bias`, no `dropout`, rotary `positions`, not `tied`).

    `feed_forward` is 4·hidden and `head_size` hidden/heads unless given; `attention_bias` puts biases on query, key and value even
    without `bias`. A causal mask halves attention only in the fused kernel (`flash_attention`). The vocabulary is padded up to a multiple
    of `vocabulary_multiple`, as Megatron does with 128·t.
    """
    shape = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocabulary=-(-vocabulary // vocabulary_multiple) * vocabulary_multiple,
        feed_forward=feed_forward or 4 * hidden,
        kv_heads=kv_heads or heads,
        head_size=head_size or _head_size(name, hidden, heads),
        precision=precision,
        gated=gated,
        bias=bias,
        attention_bias=attention_bias,
        dropout=dropout,
        positions=positions,
        flash_attention=flash_attention,
        causal=causal,
    )
    return _stacked(name, [shape] * _at_least_one(name, layers), tied=tied)


def _head_size(name: str, hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise JobError(f"{name}: hidden {hidden} is not a multiple of {heads} heads; give head_size if the model has one of its own")
    return hidden // heads


def _at_least_one(name: str, layers: int) -> int:
    if layers < 1:
        raise JobError(f"{name}: layers must be at least 1, got {layers}")
    return layers


def _stacked(name: str, shapes: list[TransformerShape], *, tied: bool, transform: bool = False) -> Graph:
    """Embedding, one block for each shape, head."""
    first = shapes[0]
    blocks = [block(shape, f"blocks.{i}", "experts" if shape.experts else "block") for i, shape in enumerate(shapes)]
    layers = [embedding(first, "embedding"), *blocks, head(first, "head", tied=tied, transform=transform)]
    return Graph(
        name=name,
        layers=tuple(layers),
        precision=first.precision,
        tokens_per_sample=first.sequence,
        shared=_tied_table(first, (0, len(layers) - 1)) if tied else (),
        input_bytes=16.0 * first.sequence,  # tokens and targets, 8 bytes each
    )


def _tied_table(shape: TransformerShape, layers: tuple[int, ...]) -> tuple[SharedParameter, ...]:
    return (SharedParameter(name="embedding.weight", parameters=shape.vocabulary * shape.hidden, layers=layers),)


def mixture_of_experts(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    experts: int,
    active_experts: int,
    expert_hidden: int,
    capacity: float = 1.0,
    shared_experts: int = 0,
    every: int = 1,
    dense_layers: int = 0,
    feed_forward: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    gated: bool = False,
    bias: bool = True,
    dropout: bool = True,
    positions: Positions = "learned",
    flash_attention: bool = False,
    causal: bool = True,
    tied: bool = True,
    precision: Precision = "fp16",
) -> Graph:
    """A decoder in which every `every`-th block after the first `dense_layers` has experts instead of a feed-forward part.

    Each token goes to `active_experts` of `experts`, whose buffers are `capacity` times what an even load needs.
    """
    _check_experts(name, experts, active_experts, capacity, every)
    dense = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocabulary=vocabulary,
        feed_forward=feed_forward or 4 * hidden,
        kv_heads=kv_heads or heads,
        head_size=head_size or _head_size(name, hidden, heads),
        precision=precision,
        gated=gated,
        bias=bias,
        attention_bias=False,
        dropout=dropout,
        positions=positions,
        flash_attention=flash_attention,
        causal=causal,
    )
    mix = Experts(count=experts, active=active_experts, hidden=expert_hidden, capacity=capacity, shared=shared_experts)
    sparse = replace(dense, experts=mix)
    shapes = [sparse if _sparse_here(i, dense_layers, every) else dense for i in range(_at_least_one(name, layers))]
    return _stacked(name, shapes, tied=tied)


def _sparse_here(index: int, dense_layers: int, every: int) -> bool:
    return index >= dense_layers and (index - dense_layers) % every == every - 1


def _check_experts(name: str, experts: int, active: int, capacity: float, every: int) -> None:
    if not 1 <= active <= experts:
        raise JobError(f"{name}: active_experts must be between 1 and experts={experts}, got {active}")
    if capacity <= 0 or every < 1:
        raise JobError(f"{name}: capacity must be positive and every at least 1, got {capacity} and {every}")


def transformer_encoder(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    feed_forward: int | None = None,
    positions_kept: int | None = None,
    segments: int = 2,
    flash_attention: bool = False,
    precision: Precision = "fp16",
) -> Graph:
    """BERT and its kin with a masked-language head: every token attends to every other; head with a dense transform and tied table.

    `positions_kept` is the size of the position table when it is longer than `sequence`, `segments` of the segment table.
    """
    shape = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocabulary=vocabulary,
        feed_forward=feed_forward or 4 * hidden,
        kv_heads=heads,
        head_size=_head_size(name, hidden, heads),
        precision=precision,
        flash_attention=flash_attention,
        causal=False,
    )
    graph = _stacked(name, [shape] * _at_least_one(name, layers), tied=True, transform=True)
    extra = hidden * (segments + max((positions_kept or sequence) - sequence, 0) + 2)  # and the norm after the embedding
    first = msgspec.structs.replace(graph.layers[0], parameters=graph.layers[0].parameters + extra)
    return msgspec.structs.replace(graph, layers=(first, *graph.layers[1:]))


def encoder_decoder(
    *,
    name: str,
    encoder_layers: int,
    decoder_layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    target_sequence: int,
    vocabulary: int,
    feed_forward: int | None = None,
    head_size: int | None = None,
    gated: bool = False,
    bias: bool = True,
    positions: Positions = "none",
    flash_attention: bool = False,
    tied: bool = True,
    precision: Precision = "fp16",
) -> Graph:
    """T5 and its kin: the encoder's output crosses every cut inside the decoder, beside the decoder's own stream.

    The target tokens cross the encoder with the batch and are not counted at cuts.
    """
    encoder = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        vocabulary=vocabulary,
        feed_forward=feed_forward or 4 * hidden,
        kv_heads=heads,
        head_size=head_size or _head_size(name, hidden, heads),
        precision=precision,
        gated=gated,
        bias=bias,
        attention_bias=False,
        positions=positions,
        flash_attention=flash_attention,
        causal=False,
    )
    decoder = replace(encoder, sequence=target_sequence, causal=True)
    _at_least_one(name, min(encoder_layers, decoder_layers))
    first = embedding(encoder, "embedding")
    second = embedding(decoder, "decoder.embedding", passing=encoder.stream_bytes)
    # the decoder looks tokens up in the encoder's table, so only position vectors are its own
    second = msgspec.structs.replace(second, parameters=second.parameters - second.split_parameters, split_parameters=0)
    layers = _two_stacks(first, encoder, encoder_layers, second, decoder, decoder_layers, tied=tied)
    users = (0, encoder_layers + 1, *((len(layers) - 1,) if tied else ()))
    return Graph(
        name=name,
        layers=layers,
        precision=precision,
        tokens_per_sample=sequence + target_sequence,
        shared=_tied_table(encoder, users),
        input_bytes=8.0 * (sequence + 2 * target_sequence),
    )


def _two_stacks(
    first: Layer,
    encoder: TransformerShape,
    encoder_layers: int,
    second: Layer,
    decoder: TransformerShape,
    decoder_layers: int,
    *,
    tied: bool,
) -> tuple[Layer, ...]:
    memory_sequence, passing = encoder.sequence, encoder.stream_bytes
    names = [f"decoder.{i}" for i in range(decoder_layers)]
    blocks = [block(decoder, name, "decoder", memory_sequence=memory_sequence, passing=passing) for name in names]
    # whatever crosses the last cut goes to the head, which no longer needs the encoder's output
    stream = decoder.stream_bytes
    blocks[-1] = msgspec.structs.replace(blocks[-1], output_bytes=stream, gradient_bytes=stream, signature="decoder.last")
    return (
        first,
        *(block(encoder, f"encoder.{i}", "encoder") for i in range(encoder_layers)),
        second,
        *blocks,
        head(decoder, "head", tied=tied),
    )


def speech_recogniser(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    mel_bins: int = 80,
    frames: int = 3000,
    target_sequence: int = 448,
    flash_attention: bool = False,
    precision: Precision = "fp16",
) -> Graph:
    """Whisper: two convolutions halve the frames, an encoder reads them, a decoder with a tied table of its own writes tokens."""
    encoder = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=frames // 2,
        vocabulary=vocabulary,
        feed_forward=4 * hidden,
        kv_heads=heads,
        head_size=_head_size(name, hidden, heads),
        precision=precision,
        dropout=False,
        positions="none",
        flash_attention=flash_attention,
        causal=False,
    )
    decoder = replace(encoder, sequence=target_sequence, causal=True, positions="learned")
    stem = _audio_stem(encoder, mel_bins, frames)
    second = embedding(decoder, "decoder.embedding", passing=encoder.stream_bytes)
    stacked = _two_stacks(stem, encoder, _at_least_one(name, layers), second, decoder, layers, tied=True)
    return Graph(
        name=name,
        layers=stacked,
        precision=precision,
        tokens_per_sample=encoder.sequence + target_sequence,
        shared=_tied_table(decoder, (layers + 1, len(stacked) - 1)),
        input_bytes=4.0 * mel_bins * frames + 16.0 * target_sequence,
    )


def _audio_stem(shape: TransformerShape, mel_bins: int, frames: int) -> Layer:
    """Two convolutions of three frames with GELU, the second with stride 2; the first needs no gradient of its input."""
    hidden, element = shape.hidden, shape.element
    wide = float(frames * hidden * element)
    work = (
        matmul(frames, hidden, 3 * mel_bins, element, backward=1.0),
        memory(2.0 * wide),
        matmul(shape.sequence, hidden, 3 * hidden, element),
        memory(2.0 * shape.stream_bytes),
    )
    part = Part(
        work=work,
        parameters=hidden * (3 * mel_bins + 1) + hidden * (3 * hidden + 1),
        saved_bytes=frames * mel_bins * element + 2 * wide + shape.stream_bytes,
    )
    return layer_of(part, name="stem", signature="stem", input_bytes=float(frames * mel_bins * element), output_bytes=shape.stream_bytes)
