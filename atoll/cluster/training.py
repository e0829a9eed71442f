"""What training does besides multiplying: operators forward and backward, attention, the optimizer — as cases to be timed.

Backward passes are timed on a graph that is kept, so that forward is not part of them. Bytes are counted by `atoll.graph.flops`, as capture
counts those of a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atoll.cluster.timing import Case
from atoll.graph.flops import TensorSpec, measure

__all__ = [
    "ATTENTION_SHAPES",
    "OPERATOR_ELEMENTS",
    "OPTIMIZERS",
    "UPDATE_ELEMENTS",
    "OperatorCase",
    "attention",
    "backward",
    "operators",
    "update",
]

aten = torch.ops.aten

OPERATOR_ELEMENTS = (1 << 16, 1 << 20)  # inside a core's cache, and outside
# (samples times heads, sequence, depth of a head)
ATTENTION_SHAPES = ((8, 128, 64), (4, 512, 64), (32, 128, 32), (16, 32, 64))
UPDATE_ELEMENTS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_ROW = 512  # elements that a normalisation or a softmax goes over
_CLASSES = 1 << 15  # a vocabulary
_FIRST_CLASSES = 1 << 10  # targets are among them
_CHANNELS = 64
_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class OperatorCase:
    """One operator at one size, forward and backward."""

    name: str
    bytes: float
    backward_bytes: float
    forward: Case
    backward: Case


def _spec(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, gradient and dtype.is_floating_point)


def _calls(elements: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operators with their arguments, tensors as specs; integers are class numbers."""
    plain, rows = _spec(elements), _spec(elements // _ROW, _ROW)
    for function in (aten.gelu, aten.relu, aten.tanh, aten.sigmoid, aten.silu, aten.exp, aten.rsqrt):
        yield function.default, (plain,)
    yield aten.pow.Tensor_Scalar, (plain, 3.0)
    yield aten.mul.Tensor, (plain, plain)
    yield aten.dropout.default, (plain, 0.1, True)
    yield aten.softmax.int, (rows, -1)
    yield aten.layer_norm.default, (rows, [_ROW], _spec(_ROW), _spec(_ROW))
    classes = min(_CLASSES, elements // 16)
    yield aten.cross_entropy_loss.default, (_spec(elements // classes, classes), _spec(elements // classes, dtype=torch.int64))
    yield aten.sum.dim_IntList, (rows, [-1])
    yield aten.cumsum.default, (rows, -1)
    side = int((elements / _CHANNELS / 4) ** 0.5)
    image, channel = _spec(4, _CHANNELS, side, side), _spec(_CHANNELS)
    running = _spec(_CHANNELS, gradient=False)
    yield aten.batch_norm.default, (image, channel, channel, running, running, True, 0.1, 1e-5, False)
    yield aten.group_norm.default, (image, 8, channel, channel)
    yield aten.max_pool2d.default, (image, [3, 3], [2, 2], [1, 1])
    yield aten.avg_pool2d.default, (image, [2, 2])
    folded = TensorSpec((16, _ROW // 16, elements // _ROW), (_ROW // 16, 1, _ROW), torch.float32, True)
    yield aten.contiguous.default, (folded,)  # heads brought to the front


def _real(spec: Any, device: torch.device) -> Any:
    if not isinstance(spec, TensorSpec):
        return spec
    if not spec.dtype.is_floating_point:
        return torch.randint(_FIRST_CLASSES, spec.shape, device=device)
    storage = torch.rand(sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True)) + 1, device=device)
    return storage.as_strided(spec.shape, spec.stride).requires_grad_(spec.requires_grad)


def backward(run: Callable[[], Tensor], inputs: list[Tensor]) -> Case:
    """The backward pass of what `run` computes from `inputs`, again and again."""
    out = run()
    gradient = torch.ones_like(out)
    return Case(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))


def operators(device: torch.device, elements: int) -> list[OperatorCase]:
    """Operators on tensors of so many elements."""
    found = []
    for target, specs in _calls(elements):
        cost = measure(target, specs, {}, "fp32")
        args = [_real(spec, device) for spec in specs]
        run = partial(target, *args)
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        name = target._overloadpacket.__name__
        found.append(OperatorCase(name, cost.bytes, cost.backward_bytes, Case(run), backward(run, inputs)))
    return found


def attention(device: torch.device, variant: str, heads: int, sequence: int, depth: int) -> tuple[Case, Case]:
    """Attention forward and backward; heads lie beside each other in memory, as a projection leaves them."""
    query, key, value = (torch.randn(1, sequence, heads, depth, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    run = partial(scaled_dot_product_attention, query, key, value, **_VARIANTS[variant])
    return Case(run), backward(run, [query, key, value])


def update(device: torch.device, optimizer: str, elements: int) -> tuple[Case, int]:
    """A step of an optimizer, and over how many tensors: several where they are small, as in a model."""
    tensors = max(2, min(16, (1 << 23) // elements))
    parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return Case(OPTIMIZERS[optimizer](parameters, lr=1e-6).step), tensors
