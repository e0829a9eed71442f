"""Graphs of text models from their published shapes: transformers (dense, mixture of experts, encoder only, encoder–decoder), GNMT.

For models that are planned or simulated without their code. A sample is one sequence. Layers are the embedding, each block, and the head
with the loss; a block keeps all its activations (`Layer.saved_bytes`) unless the plan recomputes it.

An LSTM multiplies its inputs for the whole sentence at once, but its state one token after another: `sequence` small products with one row
a sample each, which is why such models use accelerators badly at small batches.
"""

from dataclasses import replace

import msgspec

from atoll.errors import JobError
from atoll.graph.graph import Graph, Layer, Precision, SharedParameter, Work
from atoll.graph.parts import ELEMENT_BYTES, NOTHING, LayerPart, matmul, memory
from atoll.graph.transformers import Experts, Positions, TransformerShape, block, embedding, head, layer_of

__all__ = ["dense_transformer", "encoder_decoder", "mixture_of_experts", "recurrent_translator", "speech_recogniser", "transformer_encoder"]


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
    part = LayerPart(
        work=work,
        parameters=hidden * (3 * mel_bins + 1) + hidden * (3 * hidden + 1),
        saved_bytes=frames * mel_bins * element + 2 * wide + shape.stream_bytes,
    )
    return layer_of(part, name="stem", signature="stem", input_bytes=float(frames * mel_bins * element), output_bytes=shape.stream_bytes)


def _lstm(sequence: int, inputs: int, hidden: int, element: int) -> LayerPart:
    """One direction of one layer: gates of four times the state; kept: input, gates, cell and state of every token."""
    work = (
        matmul(sequence, 4 * hidden, inputs, element),
        matmul(1.0, 4 * hidden, hidden, element, count=sequence),
        memory(11.0 * hidden * element, count=sequence, backward=1.5),  # two gate vectors in, cell in, cell and state out
    )
    return LayerPart(
        work=work, parameters=4 * hidden * (inputs + hidden + 2), saved_bytes=float(sequence * (inputs + 6 * hidden) * element)
    )


def _residual(sequence: int, hidden: int, element: int) -> LayerPart:
    size = sequence * hidden
    return LayerPart(work=(memory(float(size * (5 * element + 1)), backward=1.0),), saved_bytes=float(size))  # dropout, addition


def _table(sequence: int, vocabulary: int, hidden: int, element: int) -> LayerPart:
    gather = Work(kind="gather", bytes=2.0 * sequence * hidden * element, rows=float(sequence), columns=hidden, backward=1.5)
    return LayerPart(work=(gather,), parameters=vocabulary * hidden, saved_bytes=8.0 * sequence)


def _attention(sequence: int, target: int, hidden: int, element: int) -> LayerPart:
    """Additive attention of every target token over the encoder's output."""
    square = float(sequence * target)
    score = Work(kind="attention", flops=2.0 * square * hidden, bytes=3 * square * hidden * element, rows=square, columns=1, depth=hidden)
    context = Work(
        kind="attention",
        flops=2.0 * square * hidden,
        bytes=(square + sequence * hidden) * element,
        rows=target,
        columns=hidden,
        depth=sequence,
    )
    return LayerPart(
        work=(matmul(target, hidden, hidden, element), matmul(sequence, hidden, hidden, element), score, context),
        parameters=2 * hidden * hidden + 2 * hidden,
        saved_bytes=square * (hidden + 2) * element + 2.0 * (sequence + target) * hidden * element,
    )


def recurrent_translator(
    *,
    name: str,
    layers: int = 8,
    hidden: int = 1024,
    vocabulary: int = 32000,
    sequence: int = 50,
    target_sequence: int = 50,
    precision: Precision = "fp32",
) -> Graph:
    """GNMT: `layers` of encoder, the first in both directions, and of decoder, each fed the attention's context; nothing is tied."""
    if layers < 2 or min(hidden, vocabulary, sequence, target_sequence) < 1:
        raise JobError(f"{name}: layers must be at least 2 and every size positive")
    element = ELEMENT_BYTES[precision]
    encoder = _encoder(layers, hidden, vocabulary, sequence, element)
    decoder = _decoder(layers, hidden, vocabulary, sequence, target_sequence, element)
    return Graph(
        name=name,
        layers=(*encoder, *decoder, _softmax(hidden, vocabulary, target_sequence, element)),
        precision=precision,
        tokens_per_sample=sequence + target_sequence,
        input_bytes=8.0 * (sequence + 2 * target_sequence),
    )


def _encoder(layers: int, hidden: int, vocabulary: int, sequence: int, element: int) -> list[Layer]:
    stream = float(sequence * hidden * element)
    one_way = _lstm(sequence, hidden, hidden, element)
    first = _table(sequence, vocabulary, hidden, element) + one_way + one_way
    rows = [layer_of(first, name="encoder.0", signature="encoder.0", input_bytes=8.0 * sequence, output_bytes=2 * stream)]
    for i in range(1, layers):
        inputs = 2 if i == 1 else 1
        part = _lstm(sequence, inputs * hidden, hidden, element) + (_residual(sequence, hidden, element) if i > 1 else NOTHING)
        signature = "encoder.1" if i == 1 else "encoder"
        rows.append(layer_of(part, name=f"encoder.{i}", signature=signature, input_bytes=inputs * stream, output_bytes=stream))
    return rows


def _decoder(layers: int, hidden: int, vocabulary: int, sequence: int, target: int, element: int) -> list[Layer]:
    """The first layer asks the encoder; after it only the decoder's stream and the context cross a cut."""
    stream = float(target * hidden * element)
    attend = _attention(sequence, target, hidden, element)
    first = _table(target, vocabulary, hidden, element) + _lstm(target, 2 * hidden, hidden, element) + attend
    memory_bytes = float(sequence * hidden * element)
    rows = [layer_of(first, name="decoder.0", signature="decoder.0", input_bytes=memory_bytes, output_bytes=2 * stream)]
    for i in range(1, layers):
        part = _lstm(target, 2 * hidden, hidden, element) + _residual(target, hidden, element)
        last = i == layers - 1
        signature, output = ("decoder.last", stream) if last else ("decoder", 2 * stream)
        rows.append(layer_of(part, name=f"decoder.{i}", signature=signature, input_bytes=2 * stream, output_bytes=output))
    return rows


def _softmax(hidden: int, vocabulary: int, target: int, element: int) -> Layer:
    logits = float(target * vocabulary)
    work = (
        matmul(target, vocabulary, hidden, element, split="columns"),
        memory(logits * (element + 16), split="rows", backward=1.0),
    )
    part = LayerPart(
        work=work,
        parameters=vocabulary * (hidden + 1),
        split_parameters=vocabulary * (hidden + 1),
        saved_bytes=target * hidden * element + 4.0 * logits,
        split_saved_bytes=4.0 * logits,
        tensor_bytes=target * hidden * element / 2 + 6.0 * target,
        tensor_reductions=2,
    )
    stream = float(target * hidden * element)
    return layer_of(part, name="head", signature="head", input_bytes=stream, output_bytes=0.0, tensor_units=vocabulary)
