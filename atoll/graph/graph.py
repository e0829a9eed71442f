"""Graph: a model as a row of layers that know what they cost — the noun everything after capture works with.

Amounts that grow with the batch are **per sample**; amounts of parameters are absolute. Bytes are in the job's own precision. A Graph is
frozen, survives a JSON round trip and holds no tensor, so a trillion parameters cost nothing.
"""

from functools import lru_cache
from typing import Literal

import msgspec

__all__ = ["Constraint", "Graph", "Layer", "Node", "Precision", "SharedParameter", "Work", "WorkKind"]

Precision = Literal["fp32", "bf16", "fp16", "bf16-true"]
WorkKind = Literal["matmul", "attention", "conv", "memory", "gather"]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One forward kernel, or `count` identical ones: what the roofline needs to know of it.

    A matmul is `(samples·rows) × depth` by `depth × columns`. Tensor parallelism over t devices divides what `split` names: the columns,
    the depth, or the rows (attention heads, elementwise work between a column- and a row-split matmul); `""` means it is repeated
    on every device. `expert` work is divided by expert parallelism: `flops` counts only the tokens that are routed.
    """

    kind: WorkKind
    flops: float = 0.0  # forward, per sample, of one kernel
    bytes: float = 0.0  # read and written, per sample, of one kernel
    weight_bytes: float = 0.0  # read once a kernel whatever the number of samples
    rows: float = 0.0  # per sample
    columns: int = 0
    depth: int = 0
    count: int = 1
    backward: float = 2.0  # backward work as a multiple of forward; 0 where no gradient flows
    split: Literal["", "rows", "columns", "depth"] = ""
    expert: bool = False
    operator: str = ""  # what the captured program calls it, so that measurements of that very operator apply; "": none of them do


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the model that is never cut inside.

    `output_bytes` is all that crosses a cut made right after this layer, whoever produced it: skip connections, an encoder's output on
    its way to a decoder, masks that cannot be recomputed. `gradient_bytes` is what comes back through the same cut.
    """

    name: str  # module path, e.g. "transformer.h.3"
    signature: str = ""  # equal for layers that cost the same; "" means like no other
    work: tuple[Work, ...] = ()
    parameters: int = 0  # trainable, as many as this layer uses (shared ones counted at their first user)
    split_parameters: int = 0  # of those, divided by tensor parallelism; experts are not among them
    expert_parameters: int = 0  # of those, divided by expert parallelism
    frozen_parameters: int = 0  # without gradient or optimizer state
    frozen_split_parameters: int = 0  # of those, divided by tensor parallelism; experts are not among them
    frozen_expert_parameters: int = 0  # of those, divided by expert parallelism
    frozen_bytes: float = 0.0  # what the frozen ones occupy, which their dtype says; 0: what the graph's precision says
    saved_bytes: float = 0.0  # kept for backward, per sample, nothing recomputed
    split_saved_bytes: float = 0.0  # of those, divided by tensor parallelism
    input_bytes: float = 0.0  # per sample, what must be kept to recompute this layer
    output_bytes: float = 0.0  # per sample, crossing the cut after this layer
    gradient_bytes: float = 0.0  # per sample, returning through that cut
    cut: bool = True  # whether a cut after this layer is legal
    tensor_units: int = 1  # the most equal parts tensor parallelism can make; 1: cannot
    tensor_bytes: float = 0.0  # per sample, all-reduced in forward under tensor parallelism (as much again in backward)
    tensor_reductions: int = 0  # in how many all-reduces
    tensor_backward: float = 1.0  # in backward, as a multiple of that: less where values need no gradient
    experts: int = 0
    expert_bytes: float = 0.0  # per sample, dispatched to experts in forward (combined: as much again; backward: both again)
    nodes: tuple[int, int] = (0, 0)  # range of positions in the captured program
    tensors: tuple[int, ...] = ()  # elements of each of its trainable tensors, where they are known: optimizers update one at a time

    @property
    def has_backward(self) -> bool:
        """Whether a gradient flows through it: not where it and all before it are frozen."""
        return not self.work or bool(self.parameters) or any(work.backward for work in self.work)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of the captured training graph."""

    name: str
    operator: str
    module: str  # path of the innermost module it came from, "" for the loss and other top-level code
    layer: int
    flops: float  # per sample, forward
    backward_flops: float
    parameter_bytes: float
    output_bytes: float  # per sample
    saved_bytes: float  # per sample, kept for backward
    requires_grad: bool  # whether a gradient flows through its output


class SharedParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that several layers use (tied weights): stages that share it have copies and, if it is trained, exchange its gradient."""

    name: str
    parameters: int
    layers: tuple[int, ...]  # ascending; it is counted in the first one's `parameters`, or `frozen_parameters`
    trained: bool = True


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """An annotation, resolved to layers.

    `layers` are the indices it covers. `order` is the position among annotations of its kind (stage 0, stage 1, …), `parent` the index of
    the enclosing constraint in `Graph.constraints`, or -1.
    """

    kind: Literal["replica", "split", "stage", "pipeline"]
    layers: tuple[int, ...]
    devices: int = 0  # 0: free
    micro_batches: int = 0  # pipeline only; 0: free
    uneven: bool = True  # split only: whether unequal shards are allowed
    order: int = 0
    parent: int = -1
    where: str = ""  # "train.py:12"


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its loss included, as a row of layers in the order they run."""

    name: str
    layers: tuple[Layer, ...]
    precision: Precision = "fp32"
    tokens_per_sample: int = 1
    shared: tuple[SharedParameter, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    nodes: tuple[Node, ...] = ()
    input_bytes: float = 0.0  # per sample, the batch itself
    fixed_samples: int | None = None  # the only number of samples a device can compute at a time; None: any
    master_weights: bool = True  # in half precision weights are kept, and gradients summed, in fp32; False: all is in half precision
    eager: bool = False  # the model could not be captured: its one layer runs as it is written

    def __hash__(self) -> int:
        return id(self)  # a Graph is compared by value but looked up (caches of costs) by identity: hashing thousands of nodes is slow

    @staticmethod
    def from_layers(
        name: str,
        layers: "tuple[Layer, ...] | list[Layer]",
        *,
        precision: Precision = "fp32",
        tokens_per_sample: int = 1,
        shared: tuple[SharedParameter, ...] = (),
        constraints: tuple[Constraint, ...] = (),
    ) -> "Graph":
        """A Graph written down by hand, for models that are only planned or simulated."""
        return Graph(
            name=name,
            layers=tuple(layers),
            precision=precision,
            tokens_per_sample=tokens_per_sample,
            shared=shared,
            constraints=constraints,
        )

    @property
    def parameters(self) -> int:
        """Trainable parameters, shared ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def frozen_parameters(self) -> int:
        """Parameters that are not trained, shared ones once."""
        return sum(layer.frozen_parameters for layer in self.layers)

    @property
    def all_parameters(self) -> int:
        """Trained and frozen: what a whole model holds."""
        return self.parameters + self.frozen_parameters

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs of one sample."""
        return sum(work.flops * work.count for layer in self.layers for work in layer.work)

    @property
    def training_flops(self) -> float:
        """Forward and backward FLOPs of one sample, nothing recomputed."""
        return sum(work.flops * work.count * (1 + work.backward) for layer in self.layers for work in layer.work)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The legal cut points: `c` means between layer `c-1` and layer `c`."""
        return legal_cuts(self)

    def to_json(self) -> str:
        """This graph as JSON; `from_json` reads it back equal."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: "str | bytes") -> "Graph":
        """The graph that `to_json` wrote."""
        return msgspec.json.decode(text, type=Graph)


@lru_cache(maxsize=64)
def legal_cuts(graph: Graph) -> tuple[int, ...]:
    """See `Graph.cuts`."""
    return tuple(i + 1 for i, layer in enumerate(graph.layers[:-1]) if layer.cut)
