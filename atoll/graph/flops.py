"""What one operator costs: FLOPs and memory traffic forward and backward, and what autograd keeps of it.

Each different operator is run once on fake tensors, forward and backward, under a counter that sees the kernels beneath it. So composite
operators (`linear`, `einsum`, `cross_entropy`, a `no_grad` region) are counted by what they really do, autograd itself says what it
saves, and 48 equal layers cost one measurement.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from atoll.graph.export import ambient_precision
from atoll.graph.fake import first_line
from atoll.graph.graph import Precision

__all__ = ["Kernel", "KernelCounter", "OperatorCost", "TensorSpec", "measure_operator", "saved_tensors", "why_not_measured"]

aten = torch.ops.aten


@dataclass(frozen=True)
class TensorSpec:
    """A tensor at concrete sizes, without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_parameter: bool = False

    @property
    def bytes(self) -> int:
        """If it were stored densely."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def storage_bytes(self) -> int:
        """Bytes of memory behind it: less than `bytes` for one that was expanded."""
        if 0 in self.shape:
            return 0
        return (sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor like it; a leaf that asks for a gradient where this one does."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Kernel:
    """A matrix product or convolution seen beneath an operator, or `count` equal ones: `rows × depth` by `depth × columns`."""

    flops: float  # of one
    rows: int = 0
    columns: int = 0
    depth: int = 0
    right_numel: int = 0  # elements of the right operand, to tell a weight from an activation
    left_numel: int = 0
    convolution: bool = False
    count: int = 1


@dataclass(frozen=True)
class OperatorCost:
    """All samples of the captured batch together."""

    kernels: tuple[Kernel, ...] = ()
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0  # read and written by forward kernels; views cost nothing
    backward_bytes: float = 0.0
    saved_inputs: tuple[int, ...] = ()  # positions among the tensor arguments whose memory autograd keeps
    saved_outputs: tuple[int, ...] = ()
    saved_fresh: float = 0.0  # bytes kept that are neither an argument's nor a result's
    aliases: tuple[int, ...] = ()  # by output: the tensor argument whose memory it shares, or -1
    requires_grad: tuple[bool, ...] = ()  # by output
    note: str = ""  # what could not be measured, and why


@dataclass
class _Count:
    flops: float = 0.0
    bytes: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _products(func: Any, args: Sequence[Any]) -> Kernel | None:
    """Shapes of a matrix product."""
    packet = func._overloadpacket
    if packet in (aten.addmm, aten.baddbmm):
        args = args[1:]
    grouped = func.namespace == "aten" and packet.__name__ == "_grouped_mm"
    if grouped or packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        left, right = args[0], args[1]
        batch = left.shape[0] if left.dim() == 3 and not grouped else 1
        rows, depth, columns = batch * left.shape[-2], left.shape[-1], right.shape[-1]
        return Kernel(2.0 * rows * depth * columns, rows, columns, depth, right.numel(), left.numel())
    if packet in (aten.mv, aten.addmv, aten.dot, aten.vdot):
        left, right = args[-2:] if packet is not aten.addmv else args[1:3]
        return Kernel(2.0 * left.numel(), left.numel() // right.numel(), 1, right.numel(), right.numel(), left.numel())
    return None


def _recurrence(func: Any, args: Sequence[Any]) -> list[Kernel]:
    """A layer of a recurrent network in one kernel: all inputs are multiplied at once, states one step after another."""
    packet = func._overloadpacket.__name__
    if packet not in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        return []
    (steps, samples, _), (gates, depth), (_, hidden) = args[0].shape, args[1].shape, args[2].shape
    times = 2 if packet.endswith("backward") else 1  # for the gradients of the inputs and of the weights
    inputs = Kernel(2.0 * steps * samples * gates * depth, steps * samples, gates, depth, gates * depth, args[0].numel(), count=times)
    states = Kernel(2.0 * samples * gates * hidden, samples, gates, hidden, gates * hidden, samples * hidden, count=times * steps)
    return [inputs, states]


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Sums FLOPs and traffic of the kernels that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = _Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func._overloadpacket.__name__ in _QUESTIONS:
            return func(*args, **kwargs)
        if func._overloadpacket not in flop_registry and not _is_kernel(func):
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        kernels = _recurrence(func, args)
        product = _products(func, args)
        if product is None and func._overloadpacket in flop_registry:
            flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
            product = _convolution(func, args, out, flops)
        kernels += [product] if product is not None else []
        if kernels:
            self.count.flops += sum(kernel.flops * kernel.count for kernel in kernels)
            self.count.kernels += kernels
        elif not func.is_view:
            self.count.bytes += sum(_bytes_of(t) for t in [*_tensors((args, kwargs)), *_tensors(out)])
        return out


# Asked of a tensor's metadata, often from code that cannot let an exception pass: never decomposed.
_QUESTIONS = frozenset(
    {"sym_size", "size", "sym_stride", "stride", "sym_numel", "numel", "sym_storage_offset", "storage_offset", "dim"}
    | {"is_contiguous", "sym_is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "layout"}
)


def _is_kernel(func: Any) -> bool:
    """Whether devices run it as it is, rather than as the operators it is composed of."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"))


def _convolution(func: Any, args: Any, out: Any, flops: float) -> Kernel:
    """A convolution as the matrix product it amounts to; anything else with known FLOPs without shapes."""
    if func._overloadpacket in (aten.convolution, aten._convolution):
        weight, transposed = args[1], args[6]
        columns = out.shape[1]
        depth = math.prod(weight.shape[2:]) * (weight.shape[0] // args[8] if transposed else weight.shape[1])
        return Kernel(flops, out.numel() // max(columns, 1), columns, depth, weight.numel(), convolution=True)
    return Kernel(flops, convolution="convolution" in str(func))


def _bytes_of(tensor: torch.Tensor) -> int:
    """Memory a kernel touches for a tensor: an expanded dimension is read once."""
    seen = math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0)
    return seen * tensor.element_size()


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def saved_tensors(saved: list[torch.Tensor]) -> Iterator[None]:
    """Inside, what autograd keeps for backward is noted."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def measure_operator(target: Callable[..., Any], args: Any, kwargs: Any, precision: Precision) -> OperatorCost:
    """Run `target` on fake tensors made from the `TensorSpec`s among its arguments, forward and backward, and say what it cost."""
    if target is aten.scaled_dot_product_attention.default:
        return _attention(*args, **kwargs)
    if target is aten.dropout.default:
        return _dropout(*args, **kwargs)
    leaves, tree = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    schema = getattr(target, "_schema", None)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = [leaf.empty() if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
        given = inputs
        if schema is not None and schema.is_mutable:  # on a leaf that wants a gradient it is an error; in the program it never is a leaf
            given = [leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in inputs]
        final_args, final_kwargs = pytree.tree_unflatten(given, tree)
        saved: list[torch.Tensor] = []
        with ambient_precision(precision), saved_tensors(saved), KernelCounter() as forward:
            out = target(*final_args, **final_kwargs)
        cost = _forward_cost(leaves, [x for x in given if isinstance(x, torch.Tensor)], _tensors(out), saved, forward.count)
        return _with_backward(cost, [x for x in inputs if isinstance(x, torch.Tensor)], _tensors(out))


def _forward_cost(
    leaves: list[Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor], saved: list[torch.Tensor], count: _Count
) -> OperatorCost:
    of_input = {_memory_of(tensor): index for index, tensor in reversed(list(enumerate(inputs)))}
    of_output = {_memory_of(tensor): index for index, tensor in reversed(list(enumerate(outputs)))}
    weights = [leaf.shape for leaf in leaves if isinstance(leaf, TensorSpec) and leaf.is_parameter]
    fresh: dict[int, int] = {}
    for tensor in saved:
        memory = _memory_of(tensor)
        is_cast_weight = any(sorted(tensor.shape) == sorted(shape) for shape in weights)  # autocast keeps a copy: not per sample
        if memory not in of_input and memory not in of_output and not is_cast_weight:
            fresh[memory] = tensor.untyped_storage().nbytes()
    kept = {_memory_of(tensor) for tensor in saved}
    return OperatorCost(
        kernels=tuple(count.kernels),
        flops=count.flops,
        bytes=count.bytes,
        saved_inputs=tuple(index for memory, index in of_input.items() if memory in kept),
        saved_outputs=tuple(index for memory, index in of_output.items() if memory in kept and memory not in of_input),
        saved_fresh=float(sum(fresh.values())),
        aliases=tuple(of_input.get(_memory_of(tensor), -1) for tensor in outputs),
        requires_grad=tuple(tensor.requires_grad for tensor in outputs),
    )


def why_not_measured(error: Exception, told: str) -> str:
    """In words, why an operator cannot be measured."""
    if type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException", "GuardOnDataDependentSymNode"):
        return "how large its result is depends on the data"
    return f"it cannot be measured: {told}"


def _with_backward(cost: OperatorCost, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> OperatorCost:
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    results = [tensor for tensor in outputs if tensor.requires_grad]
    if not wanted or not results:
        return cost
    gradients = [torch.empty_like(tensor) for tensor in results]
    try:
        with KernelCounter() as backward:
            torch.autograd.grad(results, wanted, gradients, allow_unused=True)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = why_not_measured(error, f"{type(error).__name__}: {first_line(error)}")
        note = f"its backward is taken for twice its forward, because {reason}"
        return replace(cost, backward_flops=2 * cost.flops, backward_bytes=2 * cost.bytes, note=note)
    return replace(cost, backward_flops=backward.count.flops, backward_bytes=backward.count.bytes)


def _attention(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, attn_mask: TensorSpec | None = None, *rest: Any, **named: Any
) -> OperatorCost:
    """Attention as the fused kernels do it, whichever the device would choose: it keeps query, key, value, output and a row of sums.

    Backward computes the scores again: five products where forward has two. Causal attention is counted in full.
    """
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    flops = 2.0 * scores * (query.shape[-1] + value.shape[-1])
    backward = 2.0 * scores * (3 * query.shape[-1] + 2 * value.shape[-1])
    tensors = [query, key, value, *([attn_mask] if isinstance(attn_mask, TensorSpec) else [])]
    kept, sums = len(tensors), 4.0 * math.prod(query.shape[:-1])
    if isinstance(attn_mask, TensorSpec) and attn_mask.dtype == torch.bool:  # kernels make it a mask of numbers and keep that
        kept, sums = 3, sums + attn_mask.bytes * query.dtype.itemsize
    needs_gradient = any(tensor.requires_grad for tensor in tensors)
    output = math.prod(query.shape[:-1]) * value.shape[-1] * query.dtype.itemsize
    traffic = sum(min(tensor.storage_bytes, tensor.bytes) for tensor in tensors) + output
    return OperatorCost(
        kernels=(Kernel(flops, math.prod(query.shape[:-1]), key.shape[-2], query.shape[-1]),),
        flops=flops,
        backward_flops=backward if needs_gradient else 0.0,
        bytes=float(traffic),
        backward_bytes=2.0 * traffic if needs_gradient else 0.0,
        saved_inputs=tuple(range(kept)) if needs_gradient else (),
        saved_outputs=(0,) if needs_gradient else (),
        saved_fresh=sums if needs_gradient else 0.0,
        aliases=(-1,),
        requires_grad=(needs_gradient,),
    )


def _dropout(input: TensorSpec, p: float, train: bool) -> OperatorCost:
    """Dropout as one fused kernel that keeps a mask of one byte an element."""
    if not train or not p:
        return OperatorCost(aliases=(0,), requires_grad=(input.requires_grad,))
    elements = math.prod(input.shape)
    traffic = float(2 * input.bytes + elements)
    gradient = input.requires_grad
    return OperatorCost(
        bytes=traffic, backward_bytes=traffic * gradient, saved_fresh=float(elements * gradient), aliases=(-1,), requires_grad=(gradient,)
    )
