"""Parts of a layer with their costs, for graphs that are written down from published shapes instead of captured.

Everything that grows with the batch is per sample, as in `atoll.graph.graph`. Activation bytes follow Korthikanti et al. 2022 (Reducing
Activation Recomputation in Large Transformer Models, arXiv 2205.05198) and what is split how follows Megatron-LM (Narayanan et al. 2021,
arXiv 2104.04473), so that a half-precision block with dropout keeps `s·h·(34 + 5·a·s/h)` bytes, of which `s·h·(24 + 5·a·s/h)` are divided
by tensor parallelism.
"""

from dataclasses import dataclass
from typing import Literal

from atoll.graph.graph import Precision, Work

__all__ = [
    "ELEMENT_BYTES",
    "NOTHING",
    "Attention",
    "FeedForward",
    "LayerPart",
    "attention",
    "experts",
    "feed_forward",
    "matmul",
    "memory",
    "norm",
]

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_MASK_BYTES = 1  # a dropout mask keeps one byte an element
Split = Literal["", "rows", "columns", "depth"]


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
        return LayerPart(
            work=self.work + other.work,
            parameters=self.parameters + other.parameters,
            split_parameters=self.split_parameters + other.split_parameters,
            expert_parameters=self.expert_parameters + other.expert_parameters,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            split_saved_bytes=self.split_saved_bytes + other.split_saved_bytes,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
            tensor_reductions=self.tensor_reductions + other.tensor_reductions,
            expert_bytes=self.expert_bytes + other.expert_bytes,
        )


NOTHING = LayerPart()


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


def norm(tokens: float, hidden: int, element: int, *, bias: bool = True) -> LayerPart:
    """A layer norm (scale and shift) or, without bias, an RMS norm; repeated on every device of a tensor group."""
    size = tokens * hidden * element
    return LayerPart(work=(memory(2.0 * size),), parameters=hidden * (2 if bias else 1), saved_bytes=size)


def _residual(tokens: float, hidden: int, element: int, *, dropout: bool) -> LayerPart:
    """Bias, dropout and residual addition, fused: reads the branch and the trunk, writes the trunk and the mask."""
    mask = tokens * hidden * _MASK_BYTES if dropout else 0.0
    return LayerPart(work=(memory(3.0 * tokens * hidden * element + mask, backward=1.0),), saved_bytes=mask)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head attention of `sequence` queries over `memory_sequence` keys (another sequence: cross-attention)."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    sequence: int
    memory_sequence: int
    element: int
    bias: bool
    output_bias: bool
    dropout: bool
    rotary: bool
    flash: bool
    causal: bool
    cross: bool = False


def attention(a: Attention) -> LayerPart:
    """Projections, scores, softmax, context, output projection, residual; one all-reduce under tensor parallelism."""
    queries, keys = a.heads * a.head_size, a.kv_heads * a.head_size
    tokens, element = a.sequence, a.element
    projections: tuple[Work, ...]
    if a.cross:
        projections = (
            matmul(tokens, queries, a.hidden, element, split="columns"),
            matmul(a.memory_sequence, 2 * keys, a.hidden, element, split="columns"),
        )
    else:
        projections = (matmul(tokens, queries + 2 * keys, a.hidden, element, split="columns"),)
    rotated = tokens * (queries + keys) * element
    rotary = (memory(2.0 * rotated, split="rows", backward=1.0),) if a.rotary else ()
    inner = _flash_attention(a) if a.flash else _plain_attention(a)
    output = matmul(tokens, a.hidden, queries, element, split="depth")
    weights = a.hidden * (2 * queries + 2 * keys)
    split_biases = queries + 2 * keys if a.bias else 0
    kept = (2 * tokens * queries + 2 * a.memory_sequence * keys) * element  # query, output projection's input; key, value
    read = tokens * a.hidden * element  # the projections' input; the memory of a cross-attention is kept once by whoever made it
    own = LayerPart(
        work=projections + rotary + inner.work + (output,),
        parameters=weights + split_biases + (a.hidden if a.output_bias else 0),
        split_parameters=weights + split_biases,
        saved_bytes=kept + read,
        split_saved_bytes=kept,
        tensor_bytes=tokens * a.hidden * element,
        tensor_reductions=1,
    )
    scores_kept = LayerPart(saved_bytes=inner.saved_bytes, split_saved_bytes=inner.saved_bytes)
    return own + scores_kept + _residual(tokens, a.hidden, element, dropout=a.dropout)


def _plain_attention(a: Attention) -> LayerPart:
    """Scores and context as two batched products with the whole square of scores in memory between them."""
    square = float(a.heads * a.sequence * a.memory_sequence)
    rows = float(a.heads * a.sequence)
    flops = 2.0 * square * a.head_size
    read = (a.sequence * a.heads + a.memory_sequence * a.kv_heads) * a.head_size * a.element
    product = {"flops": flops, "bytes": read + square * a.element, "rows": rows}
    dropout = (memory(square * (2 * a.element + _MASK_BYTES), split="rows", backward=1.0),) if a.dropout else ()
    kept = square * (2 * a.element + _MASK_BYTES if a.dropout else a.element)
    work = (
        _batched(a, **product, columns=a.memory_sequence, depth=a.head_size),
        memory(2.0 * square * a.element, split="rows"),  # scale, mask and softmax
        *dropout,
        _batched(a, **product, columns=a.head_size, depth=a.memory_sequence),
    )
    return LayerPart(work=work, saved_bytes=kept)


def _batched(a: Attention, *, flops: float, bytes: float, rows: float, columns: int, depth: int) -> Work:
    return Work(kind="attention", flops=flops, bytes=bytes, rows=rows, columns=columns, depth=depth, split="rows")


def _flash_attention(a: Attention) -> LayerPart:
    """One fused kernel: half the square when causal, five products in backward for two in forward, a float a row kept."""
    square = float(a.heads * a.sequence * a.memory_sequence) * (0.5 if a.causal else 1.0)
    rows = float(a.heads * a.sequence)
    moved = 2 * (a.sequence * a.heads + a.memory_sequence * a.kv_heads) * a.head_size * a.element
    work = Work(
        kind="attention",
        flops=4.0 * square * a.head_size,
        bytes=float(moved),
        rows=rows,
        columns=a.memory_sequence,
        depth=a.head_size,
        backward=2.5,
        split="rows",
    )
    return LayerPart(work=(work,), saved_bytes=4.0 * rows)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A two-layer perceptron, or three matrices when `gated` (SwiGLU and kin)."""

    hidden: int
    inner: int
    tokens: float
    element: int
    gated: bool
    bias: bool
    dropout: bool

    @property
    def weights(self) -> int:
        """Elements of its matrices."""
        return self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def up_columns(self) -> int:
        """Columns of the first product, the gate's included."""
        return self.inner * (2 if self.gated else 1)


def feed_forward(f: FeedForward) -> LayerPart:
    """Up, activation, down, residual; one all-reduce under tensor parallelism."""
    split_biases = f.up_columns if f.bias else 0
    work = (
        matmul(f.tokens, f.up_columns, f.hidden, f.element, split="columns"),
        memory(f.tokens * (f.up_columns + f.inner) * f.element, split="rows"),
        matmul(f.tokens, f.hidden, f.inner, f.element, split="depth"),
    )
    kept = _activations(f, f.tokens)
    own = LayerPart(
        work=work,
        parameters=f.weights + split_biases + (f.hidden if f.bias else 0),
        split_parameters=f.weights + split_biases,
        saved_bytes=kept + f.tokens * f.hidden * f.element,
        split_saved_bytes=kept,
        tensor_bytes=f.tokens * f.hidden * f.element,
        tensor_reductions=1,
    )
    return own + _residual(f.tokens, f.hidden, f.element, dropout=f.dropout)


def _activations(f: FeedForward, tokens: float) -> float:
    """Bytes kept between up and down: input and output of the activation; with a gate also the gate's two operands."""
    return tokens * f.inner * f.element * (4 if f.gated else 2)


def experts(f: FeedForward, *, count: int, active: int, capacity: float = 1.0, shared: int = 0) -> LayerPart:
    """A router and `count` such perceptrons, each token sent to `active` of them (padded by `capacity`) and to `shared` common ones.

    Experts are divided by expert parallelism, never by tensor parallelism: `expert_parameters` and `split_parameters` are disjoint.
    """
    routed = f.tokens * active * capacity
    each = routed / count
    work = (
        matmul(f.tokens, count, f.hidden, 4),  # the router computes in fp32
        memory(4.0 * f.tokens * count * 3),  # softmax, top-k
        memory(2.0 * routed * f.hidden * f.element, backward=1.0),  # permute to experts …
        matmul(each, f.up_columns, f.hidden, f.element, count=count, expert=True),
        memory(each * (f.up_columns + f.inner) * f.element, count=count, expert=True),
        matmul(each, f.hidden, f.inner, f.element, count=count, expert=True),
        memory((routed + f.tokens) * f.hidden * f.element, backward=2.0),  # … and combine, weighted
    )
    biases = (f.up_columns + f.hidden) if f.bias else 0
    own = LayerPart(
        work=work,
        parameters=count * (f.weights + biases) + count * f.hidden,
        expert_parameters=count * (f.weights + biases),
        saved_bytes=f.tokens * (f.hidden * f.element + 4.0 * count) + 2 * routed * f.hidden * f.element + _activations(f, routed),
        expert_bytes=routed * f.hidden * f.element,
    )
    common = _shared_experts(f, shared) if shared else NOTHING
    return own + common + _residual(f.tokens, f.hidden, f.element, dropout=f.dropout)


def _shared_experts(f: FeedForward, shared: int) -> LayerPart:
    """Experts every token visits are one ordinary perceptron `shared` times as wide, without a residual of its own."""
    wide = FeedForward(
        hidden=f.hidden, inner=f.inner * shared, tokens=f.tokens, element=f.element, gated=f.gated, bias=f.bias, dropout=f.dropout
    )
    part = feed_forward(wide)
    residual = _residual(f.tokens, f.hidden, f.element, dropout=f.dropout)
    own_work = part.work[: -len(residual.work)]
    kept = _activations(wide, wide.tokens)
    return LayerPart(
        work=own_work,
        parameters=part.parameters,
        split_parameters=part.split_parameters,
        saved_bytes=kept,
        split_saved_bytes=kept,
        tensor_bytes=part.tensor_bytes,
        tensor_reductions=1,
    )
