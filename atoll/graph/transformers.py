"""Layers with their costs, for graphs that are written down from published shapes instead of captured; above all those of transformers.

Everything that grows with the batch is per sample, as in `atoll.graph.graph`. Activation bytes follow Korthikanti et al. 2022 (Reducing
Activation Recomputation in Large Transformer Models, arXiv 2205.05198) and what is split how follows Megatron-LM (Narayanan et al. 2021,
arXiv 2104.04473), so that a half-precision block with dropout keeps `s·h·(34 + 5·a·s/h)` bytes, of which `s·h·(24 + 5·a·s/h)` are divided
by tensor parallelism.
"""

from dataclasses import dataclass, fields
from typing import Literal

from atoll.errors import JobError
from atoll.graph.graph import Layer, Precision, Work

__all__ = ["ELEMENT_BYTES", "Experts", "LayerPart", "TransformerShape"]
__all__ += ["block", "embedding", "head", "layer_of", "matmul", "memory", "vocabulary_loss"]

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16-true": 2}
_MASK_BYTES = 1  # a dropout mask keeps one byte an element
Split = Literal["", "rows", "columns", "depth"]
Positions = Literal["learned", "rotary", "none"]


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """What one piece of a layer adds to it; the fields mean what they mean in `Layer`."""

    work: tuple[Work, ...] = ()
    parameters: int = 0
    split_parameters: int = 0
    expert_parameters: int = 0
    saved_bytes: float = 0.0
    split_saved_bytes: float = 0.0
    tensor_bytes: float = 0.0
    tensor_reductions: int = 0
    expert_bytes: float = 0.0

    def __add__(self, other: "LayerPart") -> "LayerPart":
        return LayerPart(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def layer_of(
    part: LayerPart, *, name: str, input_bytes: float, output_bytes: float, signature: str = "", tensor_units: int = 1, experts: int = 0
) -> Layer:
    """A Layer from the sum of its parts; its signature is its name, unless another is given."""
    return Layer(
        name=name,
        signature=signature or name,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        gradient_bytes=output_bytes,
        tensor_units=tensor_units,
        experts=experts,
        **vars(part),
    )


def matmul(
    rows: float, columns: int, depth: int, element: int, *, split: Split = "", count: int = 1, expert: bool = False, backward: float = 2.0
) -> Work:
    """`count` products of (rows × depth) activations by a (depth × columns) weight."""
    return Work(
        kind="matmul",
        flops=2.0 * rows * columns * depth,
        bytes=rows * (columns + depth) * element,
        weight_bytes=float(columns * depth * element),
        rows=rows,
        columns=columns,
        depth=depth,
        count=count,
        backward=backward,
        split=split,
        expert=expert,
    )


def memory(amount: float, *, split: Split = "", backward: float = 1.5, count: int = 1, expert: bool = False) -> Work:
    """Elementwise work that reads and writes `amount` bytes. Backward reads the gradient and what was kept, and writes: 1½ times."""
    return Work(kind="memory", bytes=amount, split=split, backward=backward, count=count, expert=expert)


def vocabulary_loss(tokens: int, features: int, classes: int, element: int, parameters: int) -> LayerPart:
    """Logits and their cross-entropy in fp32, both divided over the classes under tensor parallelism.

    The input's gradient is then all-reduced in backward and three floats a token in forward; the mean of the two directions is what is
    written down.
    """
    logits = float(tokens * classes)
    return LayerPart(
        work=(
            matmul(tokens, classes, features, element, split="columns"),
            memory(logits * (element + 16), split="rows", backward=1.0),  # to fp32 (e+4), then log-softmax reads twice and writes (12)
        ),
        parameters=parameters,
        split_parameters=parameters,
        saved_bytes=tokens * features * element + 4.0 * logits,
        split_saved_bytes=4.0 * logits,
        tensor_bytes=tokens * features * element / 2 + 6.0 * tokens,
        tensor_reductions=2,
    )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture in place of the feed-forward part: each token goes to `active` of `count` (padded by `capacity`), and to `shared` ones."""

    count: int
    active: int
    hidden: int
    capacity: float = 1.0
    shared: int = 0


@dataclass(kw_only=True)
class TransformerShape:
    """What every block of a transformer has in common. `sequence` tokens make a sample; sizes that are 0 follow from the others."""

    name: str  # of the model, for errors
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    feed_forward: int = 0  # 0: 4·hidden
    kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden/heads
    precision: Precision = "fp16"
    gated: bool = False  # three matrices in the feed-forward part (SwiGLU and kin)
    bias: bool = True
    attention_bias: bool = False  # on query, key and value even without `bias`
    dropout: bool = True
    positions: Positions = "learned"
    flash_attention: bool = False
    causal: bool = True  # which halves attention only in the fused kernel
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if not self.head_size and (self.heads < 1 or self.hidden % self.heads):
            advice = "give head_size if the model has one of its own"
            raise JobError(f"{self.name}: hidden {self.hidden} is not a multiple of {self.heads} heads; {advice}")
        self.feed_forward = self.feed_forward or 4 * self.hidden
        self.kv_heads = self.kv_heads or self.heads
        self.head_size = self.head_size or self.hidden // self.heads
        for name in ("hidden", "heads", "sequence", "vocabulary", "feed_forward", "kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise JobError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise JobError(f"{self.name}: {self.heads} heads cannot share {self.kv_heads} key-value heads; one must divide the other")

    @property
    def element(self) -> int:
        """Bytes of one activation."""
        return ELEMENT_BYTES[self.precision]

    @property
    def stream_bytes(self) -> float:
        """Bytes of a sample between two blocks."""
        return float(self.sequence * self.hidden * self.element)

    @property
    def norm(self) -> LayerPart:
        """A layer norm (scale and shift) or, without bias, an RMS norm; repeated on every device of a tensor group."""
        work = (memory(2.0 * self.stream_bytes),)
        return LayerPart(work=work, parameters=self.hidden * (2 if self.bias else 1), saved_bytes=self.stream_bytes)

    @property
    def residual(self) -> LayerPart:
        """Bias, dropout and residual addition, fused: reads the branch and the trunk, writes the trunk and the mask."""
        mask = float(self.sequence * self.hidden * _MASK_BYTES) if self.dropout else 0.0
        return LayerPart(work=(memory(3.0 * self.stream_bytes + mask, backward=1.0),), saved_bytes=mask)


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
    tokens_bytes = 8.0 * shape.sequence
    return layer_of(part, name=name, input_bytes=tokens_bytes + passing, output_bytes=size + passing, tensor_units=shape.kv_heads)


def block(shape: TransformerShape, name: str, signature: str, *, memory_sequence: int = 0, passing: float = 0.0) -> Layer:
    """Attention, cross-attention over `memory_sequence` tokens if there are any, then feed-forward or experts; each with its norm."""
    part = shape.norm + _attention(shape)
    if memory_sequence:
        part += shape.norm + _attention(shape, memory_sequence)
    part += shape.norm + (_mixture(shape, shape.experts) if shape.experts else _feed_forward(shape, shape.feed_forward) + shape.residual)
    return layer_of(
        part,
        name=name,
        signature=signature,
        input_bytes=shape.stream_bytes + passing,
        output_bytes=shape.stream_bytes + passing,
        tensor_units=shape.kv_heads,
        experts=shape.experts.count if shape.experts else 0,
    )


def head(shape: TransformerShape, *, tied: bool, transform: bool = False) -> Layer:
    """Final norm (a dense transform before it, as in BERT), logits, and cross-entropy in fp32."""
    part = shape.norm
    if transform:
        size, hidden = shape.stream_bytes, shape.hidden
        work = (matmul(shape.sequence, hidden, hidden, shape.element), memory(2.0 * size))
        part = LayerPart(work=work, parameters=hidden * (hidden + 1) + shape.vocabulary, saved_bytes=2.0 * size) + part
    table = 0 if tied else shape.vocabulary * shape.hidden
    part += vocabulary_loss(shape.sequence, shape.hidden, shape.vocabulary, shape.element, table)
    return layer_of(part, name="head", input_bytes=shape.stream_bytes, output_bytes=0.0, tensor_units=shape.kv_heads)


def _attention(s: TransformerShape, memory_sequence: int = 0) -> LayerPart:
    """Projections, scores, softmax, context, output projection, residual; one all-reduce under tensor parallelism.

    With a `memory_sequence` it is cross-attention over so many tokens, which are not rotated or masked.
    """
    queries, keys = s.heads * s.head_size, s.kv_heads * s.head_size
    tokens, element, keys_sequence = s.sequence, s.element, memory_sequence or s.sequence
    if memory_sequence:
        projections: tuple[Work, ...] = (
            matmul(tokens, queries, s.hidden, element, split="columns"),
            matmul(memory_sequence, 2 * keys, s.hidden, element, split="columns"),
        )
    else:
        projections = (matmul(tokens, queries + 2 * keys, s.hidden, element, split="columns"),)
    if s.positions == "rotary" and not memory_sequence:
        projections += (memory(2.0 * tokens * (queries + keys) * element, split="rows", backward=1.0),)
    scores = _fused_scores(s, keys_sequence, s.causal and not memory_sequence) if s.flash_attention else _plain_scores(s, keys_sequence)
    weights = s.hidden * (2 * queries + 2 * keys)
    split_biases = queries + 2 * keys if s.bias or s.attention_bias else 0
    kept = (2 * tokens * queries + 2 * keys_sequence * keys) * element  # query, output projection's input; key, value
    read = tokens * s.hidden * element  # the projections' input; the memory of a cross-attention is kept once by whoever made it
    own = LayerPart(
        work=(*projections, *scores.work, matmul(tokens, s.hidden, queries, element, split="depth")),
        parameters=weights + split_biases + (s.hidden if s.bias else 0),
        split_parameters=weights + split_biases,
        saved_bytes=kept + read + scores.saved_bytes,
        split_saved_bytes=kept + scores.saved_bytes,
        tensor_bytes=tokens * s.hidden * element,
        tensor_reductions=1,
    )
    return own + s.residual


def _plain_scores(s: TransformerShape, keys: int) -> LayerPart:
    """Scores and context as two batched products with the whole square of scores in memory between them."""
    square, rows = float(s.heads * s.sequence * keys), float(s.heads * s.sequence)
    flops = 2.0 * square * s.head_size
    moved = (s.sequence * s.heads + keys * s.kv_heads) * s.head_size * s.element + square * s.element
    masked = square * (2 * s.element + _MASK_BYTES)
    work = (
        Work(kind="attention", flops=flops, bytes=moved, rows=rows, columns=keys, depth=s.head_size, split="rows"),
        memory(2.0 * square * s.element, split="rows"),  # scale, mask and softmax
        *((memory(masked, split="rows", backward=1.0),) if s.dropout else ()),
        Work(kind="attention", flops=flops, bytes=moved, rows=rows, columns=s.head_size, depth=keys, split="rows"),
    )
    return LayerPart(work=work, saved_bytes=masked if s.dropout else square * s.element)


def _fused_scores(s: TransformerShape, keys: int, causal: bool) -> LayerPart:
    """One fused kernel: half the square when causal, five products in backward for two in forward, a float a row kept."""
    rows = float(s.heads * s.sequence)
    work = Work(
        kind="attention",
        flops=4.0 * rows * keys * (0.5 if causal else 1.0) * s.head_size,
        bytes=float(2 * (s.sequence * s.heads + keys * s.kv_heads) * s.head_size * s.element),
        rows=rows,
        columns=keys,
        depth=s.head_size,
        backward=2.5,
        split="rows",
    )
    return LayerPart(work=(work,), saved_bytes=4.0 * rows)


def _feed_forward(s: TransformerShape, inner: int) -> LayerPart:
    """Up, activation, down; one all-reduce under tensor parallelism."""
    tokens, hidden, element = float(s.sequence), s.hidden, s.element
    weights, columns = _perceptron(s, inner)
    split_biases = columns if s.bias else 0
    kept = _activations(s, inner, tokens)
    return LayerPart(
        work=(
            matmul(tokens, columns, hidden, element, split="columns"),
            memory(tokens * (columns + inner) * element, split="rows"),
            matmul(tokens, hidden, inner, element, split="depth"),
        ),
        parameters=weights + split_biases + (hidden if s.bias else 0),
        split_parameters=weights + split_biases,
        saved_bytes=kept + tokens * hidden * element,
        split_saved_bytes=kept,
        tensor_bytes=tokens * hidden * element,
        tensor_reductions=1,
    )


def _perceptron(s: TransformerShape, inner: int) -> tuple[int, int]:
    """Elements of its matrices, and columns of the first product, the gate's included."""
    return s.hidden * inner * (3 if s.gated else 2), inner * (2 if s.gated else 1)


def _activations(s: TransformerShape, inner: int, tokens: float) -> float:
    """Bytes kept between up and down: input and output of the activation; with a gate also the gate's two operands."""
    return tokens * inner * s.element * (4 if s.gated else 2)


def _mixture(s: TransformerShape, mix: Experts) -> LayerPart:
    """A router and perceptrons; those every token visits are one ordinary perceptron, as wide as all of them.

    Experts are divided by expert parallelism, never by tensor parallelism: `expert_parameters` and `split_parameters` are disjoint.
    """
    tokens, hidden, element, inner, count = float(s.sequence), s.hidden, s.element, mix.hidden, mix.count
    routed = tokens * mix.active * mix.capacity
    each = routed / count
    weights, columns = _perceptron(s, inner)
    own_parameters = count * (weights + (columns + hidden if s.bias else 0))
    part = LayerPart(
        work=(
            matmul(tokens, count, hidden, 4),  # the router computes in fp32
            memory(4.0 * tokens * count * 3),  # softmax, top-k
            memory(2.0 * routed * hidden * element, backward=1.0),  # permute to experts …
            matmul(each, columns, hidden, element, count=count, expert=True),
            memory(each * (columns + inner) * element, count=count, expert=True),
            matmul(each, hidden, inner, element, count=count, expert=True),
            memory((routed + tokens) * hidden * element, backward=2.0),  # … and combine, weighted
        ),
        parameters=own_parameters + count * hidden,
        expert_parameters=own_parameters,
        saved_bytes=tokens * (hidden * element + 4.0 * count) + 2 * routed * hidden * element + _activations(s, inner, routed),
        expert_bytes=routed * hidden * element,
    )
    if mix.shared:  # they read what the router keeps already
        part += _feed_forward(s, inner * mix.shared) + LayerPart(saved_bytes=-tokens * hidden * element)
    return part + s.residual
