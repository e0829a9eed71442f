"""Graphs of published models from their shapes: transformers of every kind, residual networks, and the recurrent GNMT.

For models that are planned or simulated without their code. A sample is one sequence, one image or one pair of sentences. Layers are the
embedding (or stem), each block, and the head with the loss; a block keeps all its activations (`Layer.saved_bytes`) unless the plan
recomputes it.
"""

from dataclasses import dataclass, replace
from typing import Required, TypedDict, Unpack

import msgspec

from atoll.errors import JobError
from atoll.graph.graph import Graph, Layer, Precision, SharedParameter, Work
from atoll.graph.transformers import (
    ELEMENT_BYTES,
    Experts,
    LayerPart,
    Positions,
    TransformerShape,
    block,
    embedding,
    head,
    layer_of,
    matmul,
    memory,
    vocabulary_loss,
)

__all__ = ["dense_transformer", "encoder_decoder", "mixture_of_experts", "transformer_encoder"]
__all__ += ["recurrent_translator", "residual_network", "speech_recogniser", "vision_transformer"]


class ShapeOptions(TypedDict, total=False):
    """Arguments of transformers that mean what they mean in `TransformerShape`."""

    hidden: Required[int]
    heads: Required[int]
    sequence: Required[int]
    vocabulary: Required[int]
    feed_forward: int
    kv_heads: int
    head_size: int
    gated: bool
    bias: bool
    attention_bias: bool
    dropout: bool
    positions: Positions
    flash_attention: bool
    causal: bool
    precision: Precision


def dense_transformer(*, name: str, layers: int, tied: bool = True, vocabulary_multiple: int = 1, **shape: Unpack[ShapeOptions]) -> Graph:
    """A decoder such as GPT (the defaults) or Llama (`gated`, no `bias`, no `dropout`, rotary `positions`, not `tied`).

    The vocabulary is padded up to a multiple of `vocabulary_multiple`, as Megatron does with 128·t.
    """
    shape["vocabulary"] = -(-shape["vocabulary"] // vocabulary_multiple) * vocabulary_multiple
    return _stacked(name, [TransformerShape(name=name, **shape)] * _at_least_one(name, layers), tied=tied)


def _at_least_one(name: str, layers: int) -> int:
    if layers < 1:
        raise JobError(f"{name}: layers must be at least 1, got {layers}")
    return layers


def _stacked(name: str, shapes: list[TransformerShape], *, tied: bool, transform: bool = False) -> Graph:
    """Embedding, one block for each shape, head."""
    first = shapes[0]
    blocks = [block(shape, f"blocks.{i}", "experts" if shape.experts else "block") for i, shape in enumerate(shapes)]
    layers = [embedding(first, "embedding"), *blocks, head(first, tied=tied, transform=transform)]
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
    experts: int,
    active_experts: int,
    expert_hidden: int,
    capacity: float = 1.0,
    shared_experts: int = 0,
    every: int = 1,
    dense_layers: int = 0,
    tied: bool = True,
    **shape: Unpack[ShapeOptions],
) -> Graph:
    """A decoder in which every `every`-th block after the first `dense_layers` has experts instead of a feed-forward part.

    Each token goes to `active_experts` of `experts`, whose buffers are `capacity` times what an even load needs.
    """
    if not 1 <= active_experts <= experts:
        raise JobError(f"{name}: active_experts must be between 1 and experts={experts}, got {active_experts}")
    if capacity <= 0 or every < 1:
        raise JobError(f"{name}: capacity must be positive and every at least 1, got {capacity} and {every}")
    dense = TransformerShape(name=name, **shape)
    mix = Experts(count=experts, active=active_experts, hidden=expert_hidden, capacity=capacity, shared=shared_experts)
    sparse = replace(dense, experts=mix)
    counted = range(-dense_layers, _at_least_one(name, layers) - dense_layers)
    return _stacked(name, [sparse if i >= 0 and i % every == every - 1 else dense for i in counted], tied=tied)


def transformer_encoder(*, name: str, layers: int, positions_kept: int = 0, segments: int = 2, **shape: Unpack[ShapeOptions]) -> Graph:
    """BERT and its kin with a masked-language head: every token attends to every other; head with a dense transform and tied table.

    `positions_kept` is the size of the position table when it is longer than `sequence`, `segments` of the segment table.
    """
    encoder = replace(TransformerShape(name=name, **shape), causal=False)
    graph = _stacked(name, [encoder] * _at_least_one(name, layers), tied=True, transform=True)
    extra = encoder.hidden * (segments + max(positions_kept - encoder.sequence, 0) + 2)  # and the norm after the embedding
    first = msgspec.structs.replace(graph.layers[0], parameters=graph.layers[0].parameters + extra)
    return msgspec.structs.replace(graph, layers=(first, *graph.layers[1:]))


def encoder_decoder(
    *, name: str, encoder_layers: int, decoder_layers: int, target_sequence: int, tied: bool = True, **shape: Unpack[ShapeOptions]
) -> Graph:
    """T5 and its kin, without positions unless given: the encoder's output crosses every cut inside the decoder, beside its own stream.

    The target tokens cross the encoder with the batch and are not counted at cuts.
    """
    _at_least_one(name, min(encoder_layers, decoder_layers))
    encoder = replace(TransformerShape(name=name, **({"positions": "none"} | shape)), causal=False)
    decoder = replace(encoder, sequence=target_sequence, causal=True)
    second = embedding(decoder, "decoder.embedding", passing=encoder.stream_bytes)
    # the decoder looks tokens up in the encoder's table, so only position vectors are its own
    second = msgspec.structs.replace(second, parameters=second.parameters - second.split_parameters, split_parameters=0)
    layers = _two_stacks(embedding(encoder, "embedding"), encoder, encoder_layers, second, decoder, decoder_layers, tied=tied)
    users = (0, encoder_layers + 1, *((len(layers) - 1,) if tied else ()))
    return Graph(
        name=name,
        layers=layers,
        precision=encoder.precision,
        tokens_per_sample=encoder.sequence + target_sequence,
        shared=_tied_table(encoder, users),
        input_bytes=8.0 * (encoder.sequence + 2 * target_sequence),
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
        head(decoder, tied=tied),
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
    precision: Precision = "fp16",
) -> Graph:
    """Whisper: two convolutions halve the frames, an encoder reads them, a decoder with a tied table of its own writes tokens."""
    encoder = TransformerShape(
        name=name, hidden=hidden, heads=heads, sequence=frames // 2, vocabulary=vocabulary, precision=precision, dropout=False,
        positions="none", causal=False,
    )  # fmt: skip
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
    return layer_of(part, name="stem", input_bytes=float(frames * mel_bins * element), output_bytes=shape.stream_bytes)


def vision_transformer(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    precision: Precision = "fp16",
) -> Graph:
    """ViT: patches become tokens, an encoder reads them with a class token, a classifier reads that token."""
    if image % patch or hidden % heads:
        raise JobError(f"{name}: patch {patch} must divide image {image} and heads {heads} must divide hidden {hidden}")
    patches = (image // patch) ** 2
    shape = TransformerShape(name=name, hidden=hidden, heads=heads, sequence=patches + 1, vocabulary=1, precision=precision, causal=False)
    element, pixels = shape.element, 3 * patch * patch
    image_bytes = 3.0 * image * image * element
    part = LayerPart(
        work=(matmul(patches, hidden, pixels, element, backward=1.0), memory(2.0 * shape.stream_bytes, backward=0.5)),
        parameters=hidden * (pixels + 1) + hidden * (patches + 2),
        saved_bytes=image_bytes,
    )
    stem = layer_of(part, name="stem", input_bytes=image_bytes, output_bytes=shape.stream_bytes)
    blocks = [block(shape, f"blocks.{i}", "block") for i in range(layers)]
    last = _classifier(shape.norm, shape.stream_bytes, 1, hidden, classes, element)
    return Graph(name=name, layers=(stem, *blocks, last), precision=precision, tokens_per_sample=shape.sequence, input_bytes=image_bytes)


def _classifier(before: LayerPart, input_bytes: float, tokens: int, features: int, classes: int, element: int) -> Layer:
    """What comes before it, one fully connected layer that can be split over the classes, and cross-entropy."""
    part = before + vocabulary_loss(tokens, features, classes, element, classes * (features + 1))
    return layer_of(part, name="head", input_bytes=input_bytes, output_bytes=0.0, tensor_units=classes)


_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@dataclass(frozen=True)
class _Picture:
    """A feature map: channels × side × side."""

    channels: int
    side: int

    @property
    def elements(self) -> int:
        return self.channels * self.side**2


def _convolution(
    source: _Picture, channels: int, kernel: int, stride: int, element: int, *, relu: bool = True
) -> tuple[LayerPart, _Picture]:
    """Convolution, batch norm and (in place) ReLU. Kept for backward: the input, and the batch norm's input."""
    target = _Picture(channels, -(-source.side // stride))
    depth = kernel * kernel * source.channels
    work = Work(
        kind="conv",
        flops=2.0 * target.elements * depth,
        bytes=float((source.elements + target.elements) * element),
        weight_bytes=float(channels * depth * element),
        rows=float(target.side**2),
        columns=channels,
        depth=depth,
    )
    normalise = memory(3.0 * target.elements * element, backward=5 / 3)  # statistics read it once more
    activate = (memory(2.0 * target.elements * element),) if relu else ()
    part = LayerPart(
        work=(work, normalise, *activate),
        parameters=channels * depth + 2 * channels,
        saved_bytes=float((source.elements + target.elements) * element),
    )
    return part, target


def _bottleneck(source: _Picture, width: int, stride: int, element: int) -> tuple[LayerPart, _Picture]:
    """1×1, 3×3 (which carries the stride), 1×1 to four times the width, and the shortcut."""
    first, middle = _convolution(source, width, 1, 1, element)
    second, middle = _convolution(middle, width, 3, stride, element)
    third, target = _convolution(middle, 4 * width, 1, 1, element, relu=False)
    part = first + second + third
    if stride != 1 or source.channels != target.channels:
        shortcut, _ = _convolution(source, target.channels, 1, stride, element, relu=False)
        # the shortcut reads what the first convolution already keeps
        part += LayerPart(work=shortcut.work, parameters=shortcut.parameters, saved_bytes=shortcut.saved_bytes - source.elements * element)
    return part + LayerPart(work=(memory(5.0 * target.elements * element, backward=1.0),)), target  # addition, then ReLU


def residual_network(*, name: str, depth: int = 50, image: int = 224, classes: int = 1000, precision: Precision = "fp32") -> Graph:
    """ResNet-50, -101 or -152 with the stride in the 3×3 convolution; layers are the stem, each bottleneck and the classifier."""
    if depth not in _BLOCKS:
        raise JobError(f"{name}: depth must be 50, 101 or 152, got {depth}")
    if image < 32 or classes < 1:
        raise JobError(f"{name}: image must be at least 32 and classes at least 1, got {image} and {classes}")
    element = ELEMENT_BYTES[precision]
    part, picture = _convolution(_Picture(3, image), 64, 7, 2, element)
    pooled = _Picture(64, -(-picture.side // 2))
    part += LayerPart(work=(memory(float((picture.elements + pooled.elements) * element)),), saved_bytes=float(8 * pooled.elements))
    image_bytes = 3.0 * image * image * element
    layers = [layer_of(part, name="stem", input_bytes=image_bytes, output_bytes=float(pooled.elements * element))]
    picture = pooled
    for group, count in enumerate(_BLOCKS[depth]):
        for i in range(count):
            source = picture
            part, picture = _bottleneck(source, 64 * 2**group, 2 if group and not i else 1, element)
            signature = f"group{group + 1}.{'first' if not i else 'next'}"
            came, goes = float(source.elements * element), float(picture.elements * element)
            layers.append(layer_of(part, name=f"group{group + 1}.{i}", signature=signature, input_bytes=came, output_bytes=goes))
    averaging = LayerPart(work=(memory(float(picture.elements * element), backward=1.0),))
    last = _classifier(averaging, float(picture.elements * element), 1, picture.channels, classes, element)
    return Graph(name=name, layers=(*layers, last), precision=precision, input_bytes=image_bytes)


def _lstm(sequence: int, inputs: int, hidden: int, element: int) -> LayerPart:
    """One direction of one layer: gates of four times the state; kept: input, gates, cell and state of every token.

    Inputs are multiplied for the whole sentence at once, but states one token after another: `sequence` small products with one row a
    sample each, which is why such models use accelerators badly at small batches.
    """
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
    last = _classifier(LayerPart(), float(target_sequence * hidden * element), target_sequence, hidden, vocabulary, element)
    return Graph(
        name=name,
        layers=(*encoder, *decoder, last),
        precision=precision,
        tokens_per_sample=sequence + target_sequence,
        input_bytes=8.0 * (sequence + 2 * target_sequence),
    )


def _encoder(layers: int, hidden: int, vocabulary: int, sequence: int, element: int) -> list[Layer]:
    stream = float(sequence * hidden * element)
    one_way = _lstm(sequence, hidden, hidden, element)
    first = _table(sequence, vocabulary, hidden, element) + one_way + one_way
    rows = [layer_of(first, name="encoder.0", input_bytes=8.0 * sequence, output_bytes=2 * stream)]
    for i in range(1, layers):
        inputs = 2 if i == 1 else 1
        part = _lstm(sequence, inputs * hidden, hidden, element) + (_residual(sequence, hidden, element) if i > 1 else LayerPart())
        signature = "encoder.1" if i == 1 else "encoder"
        rows.append(layer_of(part, name=f"encoder.{i}", signature=signature, input_bytes=inputs * stream, output_bytes=stream))
    return rows


def _decoder(layers: int, hidden: int, vocabulary: int, sequence: int, target: int, element: int) -> list[Layer]:
    """The first layer asks the encoder; after it only the decoder's stream and the context cross a cut."""
    stream = float(target * hidden * element)
    attend = _attention(sequence, target, hidden, element)
    first = _table(target, vocabulary, hidden, element) + _lstm(target, 2 * hidden, hidden, element) + attend
    memory_bytes = float(sequence * hidden * element)
    rows = [layer_of(first, name="decoder.0", input_bytes=memory_bytes, output_bytes=2 * stream)]
    for i in range(1, layers):
        part = _lstm(target, 2 * hidden, hidden, element) + _residual(target, hidden, element)
        last = i == layers - 1
        signature, output = ("decoder.last", stream) if last else ("decoder", 2 * stream)
        rows.append(layer_of(part, name=f"decoder.{i}", signature=signature, input_bytes=2 * stream, output_bytes=output))
    return rows
