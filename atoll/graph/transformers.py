"""Layers of a transformer built from `atoll.graph.parts`: embedding, block, head; shared by every transformer generator."""

from dataclasses import dataclass, field, replace
from typing import Literal

from atoll.errors import JobError
from atoll.graph.graph import Layer, Precision, Work
from atoll.graph.parts import (
    ELEMENT_BYTES,
    NOTHING,
    Attention,
    FeedForward,
    LayerPart,
    attention,
    experts,
    feed_forward,
    matmul,
    memory,
    norm,
)

__all__ = ["Experts", "TransformerShape", "block", "embedding", "head", "layer_of"]

Positions = Literal["learned", "rotary", "none"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward part."""

    count: int
    active: int
    hidden: int
    capacity: float = 1.0
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """What every block of a transformer has in common. `sequence` tokens make a sample."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int
    kv_heads: int
    head_size: int
    precision: Precision
    gated: bool = False
    bias: bool = True
    attention_bias: bool = True
    dropout: bool = True
    positions: Positions = "learned"
    flash_attention: bool = False
    causal: bool = True
    experts: Experts | None = field(default=None)

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "sequence", "vocabulary", "feed_forward", "kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise JobError(f"transformer: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise JobError(f"transformer: {self.heads} heads cannot share {self.kv_heads} key-value heads; one must divide the other")

    @property
    def element(self) -> int:
        """Bytes of one activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def stream_bytes(self) -> float:
        """Bytes of a sample between two blocks."""
        return float(self.sequence * self.hidden * self.element)


def layer_of(
    part: LayerPart, *, name: str, signature: str, input_bytes: float, output_bytes: float, tensor_units: int = 1, experts: int = 0
) -> Layer:
    """A Layer from the sum of its parts."""
    return Layer(
        name=name,
        signature=signature,
        work=part.work,
        parameters=part.parameters,
        split_parameters=part.split_parameters,
        expert_parameters=part.expert_parameters,
        saved_bytes=part.saved_bytes,
        split_saved_bytes=part.split_saved_bytes,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        gradient_bytes=output_bytes,
        tensor_units=tensor_units,
        tensor_bytes=part.tensor_bytes,
        tensor_reductions=part.tensor_reductions,
        experts=experts,
        expert_bytes=part.expert_bytes,
    )


def embedding(shape: TransformerShape, name: str, *, passing: float = 0.0) -> Layer:
    """Token (and learned position) vectors, with dropout. `passing` bytes a sample cross this layer on their way elsewhere.

    Split over the vocabulary it is all-reduced in forward only, so half of that is written to each direction.
    """
    size = shape.stream_bytes
    learned = shape.positions == "learned"
    mask = float(shape.sequence * shape.hidden) if shape.dropout else 0.0
    works = [Work(kind="gather", bytes=2.0 * size, rows=float(shape.sequence), columns=shape.hidden, backward=1.5)]
    if learned:
        works.append(memory(2.0 * size, backward=0.5))
    if shape.dropout:
        works.append(memory(2.0 * size + mask, backward=1.0))
    table = shape.vocabulary * shape.hidden
    part = LayerPart(
        work=tuple(works),
        parameters=table + (shape.sequence * shape.hidden if learned else 0),
        split_parameters=table,
        saved_bytes=mask + 8.0 * shape.sequence,  # token numbers are kept for the backward
        tensor_bytes=size / 2,
        tensor_reductions=1,
    )
    return layer_of(
        part,
        name=name,
        signature=name,
        input_bytes=8.0 * shape.sequence + passing,
        output_bytes=size + passing,
        tensor_units=shape.kv_heads,
    )


def block(shape: TransformerShape, name: str, signature: str, *, memory_sequence: int = 0, passing: float = 0.0) -> Layer:
    """Attention, cross-attention over `memory_sequence` tokens if there are any, then feed-forward or experts; each with its norm."""
    own = _attention_shape(shape)
    part = _norm(shape) + attention(own)
    if memory_sequence:
        part += _norm(shape) + attention(replace(own, memory_sequence=memory_sequence, cross=True, causal=False, rotary=False))
    part += _norm(shape) + _feed_forward(shape)
    return layer_of(
        part,
        name=name,
        signature=signature,
        input_bytes=shape.stream_bytes + passing,
        output_bytes=shape.stream_bytes + passing,
        tensor_units=shape.kv_heads,
        experts=shape.experts.count if shape.experts else 0,
    )


def head(shape: TransformerShape, name: str, *, tied: bool, transform: bool = False) -> Layer:
    """Final norm (a dense transform before it, as in BERT), logits, and cross-entropy in fp32.

    Split over the vocabulary, its input's gradient is all-reduced in backward and three floats a token in forward; the mean of the two
    directions is what is written down.
    """
    tokens, hidden, vocabulary, element = shape.sequence, shape.hidden, shape.vocabulary, shape.element
    logits = float(tokens * vocabulary)
    table = vocabulary * hidden
    part = (_transform(shape) if transform else NOTHING) + _norm(shape)
    part += LayerPart(
        work=(
            matmul(tokens, vocabulary, hidden, element, split="columns"),
            memory(logits * (element + 16), split="rows", backward=1.0),  # to fp32 (e+4), then log-softmax reads twice and writes (12)
        ),
        parameters=0 if tied else table,
        split_parameters=0 if tied else table,
        saved_bytes=tokens * hidden * element + 4.0 * logits,
        split_saved_bytes=4.0 * logits,
        tensor_bytes=shape.stream_bytes / 2 + 6.0 * tokens,
        tensor_reductions=2,
    )
    return layer_of(part, name=name, signature=name, input_bytes=shape.stream_bytes, output_bytes=0.0, tensor_units=shape.kv_heads)


def _transform(shape: TransformerShape) -> LayerPart:
    size = shape.stream_bytes
    work = (matmul(shape.sequence, shape.hidden, shape.hidden, shape.element), memory(2.0 * size))
    return LayerPart(work=work, parameters=shape.hidden * (shape.hidden + 1) + shape.vocabulary, saved_bytes=2.0 * size)


def _norm(shape: TransformerShape) -> LayerPart:
    return norm(shape.sequence, shape.hidden, shape.element, bias=shape.bias)


def _attention_shape(shape: TransformerShape) -> Attention:
    return Attention(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        sequence=shape.sequence,
        memory_sequence=shape.sequence,
        element=shape.element,
        bias=shape.bias or shape.attention_bias,
        output_bias=shape.bias,
        dropout=shape.dropout,
        rotary=shape.positions == "rotary",
        flash=shape.flash_attention,
        causal=shape.causal,
    )


def _feed_forward(shape: TransformerShape) -> LayerPart:
    perceptron = FeedForward(
        hidden=shape.hidden,
        inner=shape.experts.hidden if shape.experts else shape.feed_forward,
        tokens=float(shape.sequence),
        element=shape.element,
        gated=shape.gated,
        bias=shape.bias,
        dropout=shape.dropout,
    )
    if shape.experts is None:
        return feed_forward(perceptron)
    mix = shape.experts
    return experts(perceptron, count=mix.count, active=mix.active, capacity=mix.capacity, shared=mix.shared)
