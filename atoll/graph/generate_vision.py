"""Graphs of image models from their published shapes: residual networks and vision transformers. A sample is one image."""

from dataclasses import dataclass

from atoll.errors import JobError
from atoll.graph.graph import Graph, Layer, Precision, Work
from atoll.graph.parts import ELEMENT_BYTES, LayerPart, matmul, memory, norm
from atoll.graph.transformers import TransformerShape, block, layer_of

__all__ = ["residual_network", "vision_transformer"]

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


def _classifier(features: int, classes: int, element: int, pooled: LayerPart, input_bytes: float) -> Layer:
    """Pooling, one fully connected layer that can be split over the classes, and cross-entropy."""
    work = (
        matmul(1.0, classes, features, element, split="columns"),
        memory(float(classes * (element + 16)), split="rows", backward=1.0),
    )
    own = LayerPart(
        work=work,
        parameters=classes * (features + 1),
        split_parameters=classes * (features + 1),
        saved_bytes=float(features * element + 4 * classes),
        split_saved_bytes=4.0 * classes,
        tensor_bytes=features * element / 2 + 6.0,  # the features' gradient in backward, three floats in forward
        tensor_reductions=2,
    )
    return layer_of(pooled + own, name="head", signature="head", input_bytes=input_bytes, output_bytes=0.0, tensor_units=classes)


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
    layers = [layer_of(part, name="stem", signature="stem", input_bytes=image_bytes, output_bytes=float(pooled.elements * element))]
    picture = pooled
    for group, count in enumerate(_BLOCKS[depth]):
        for i in range(count):
            source = picture
            part, picture = _bottleneck(source, 64 * 2**group, 2 if group and not i else 1, element)
            signature = f"group{group + 1}.{'first' if not i else 'next'}"
            came, goes = float(source.elements * element), float(picture.elements * element)
            layers.append(layer_of(part, name=f"group{group + 1}.{i}", signature=signature, input_bytes=came, output_bytes=goes))
    averaging = LayerPart(work=(memory(float(picture.elements * element), backward=1.0),))
    head = _classifier(picture.channels, classes, element, averaging, float(picture.elements * element))
    return Graph(name=name, layers=(*layers, head), precision=precision, input_bytes=image_bytes)


def vision_transformer(
    *,
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    flash_attention: bool = False,
    precision: Precision = "fp16",
) -> Graph:
    """ViT: patches become tokens, an encoder reads them with a class token, a classifier reads that token."""
    if image % patch or hidden % heads:
        raise JobError(f"{name}: patch {patch} must divide image {image} and heads {heads} must divide hidden {hidden}")
    patches = (image // patch) ** 2
    shape = TransformerShape(
        hidden=hidden,
        heads=heads,
        sequence=patches + 1,
        vocabulary=1,
        feed_forward=4 * hidden,
        kv_heads=heads,
        head_size=hidden // heads,
        precision=precision,
        flash_attention=flash_attention,
        causal=False,
    )
    element, pixels = shape.element, 3 * patch * patch
    stem_part = LayerPart(
        work=(matmul(patches, hidden, pixels, element, backward=1.0), memory(2.0 * shape.stream_bytes, backward=0.5)),
        parameters=hidden * (pixels + 1) + hidden * (patches + 2),
        saved_bytes=3.0 * image * image * element,
    )
    image_bytes = 3.0 * image * image * element
    stem = layer_of(stem_part, name="stem", signature="stem", input_bytes=image_bytes, output_bytes=shape.stream_bytes)
    blocks = [block(shape, f"blocks.{i}", "block") for i in range(layers)]
    head = _classifier(hidden, classes, element, norm(shape.sequence, hidden, element), shape.stream_bytes)
    return Graph(name=name, layers=(stem, *blocks, head), precision=precision, tokens_per_sample=shape.sequence, input_bytes=image_bytes)
