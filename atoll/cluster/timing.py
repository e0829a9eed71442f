"""Timing on a shared machine: cases take turns, and the fastest tenth of the turns counts.

Machines are shared and noisy, so every case is timed in many short turns that alternate with all other cases: a disturbance of some seconds
then touches a few turns of every case instead of ruining one. Disturbances only ever add time, so the fastest tenth of the turns counts;
how much slower the usual turn was tells how busy the machine is.

What training does besides multiplying: operators forward and backward, attention, the optimizer — as cases to be timed.

Backward passes are timed on a graph that is kept, so that forward is not part of them. Bytes are counted by `atoll.graph.flops`, as capture
counts those of a model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atoll.graph.flops import TensorSpec, measure_operator

__all__ = [
    "ATTENTION_SHAPES",
    "OPERATOR_ELEMENTS",
    "OPTIMIZERS",
    "UPDATE_ELEMENTS",
    "Case",
    "OperatorCase",
    "Timing",
    "attention_cases",
    "backward_case",
    "interleaved",
    "operators",
    "update",
]

_MOST_TURNS = 60
_TURN_S = 0.004  # about a scheduler's time slice: longer turns are rarely left alone
_MINOR_EVERY = 4
_FIRST_ROUND = 0.1  # of the whole, as it is told: cases run for the first time then, which takes longer than later turns


@dataclass(frozen=True)
class Case:
    """Something to time; what matters less has a turn in every fourth round only."""

    run: Callable[[], object]
    minor: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: undisturbed (the fastest tenth of turns), and of the median turn by the clock on the wall."""

    seconds: float
    usual_seconds: float


def interleaved(
    cases: Sequence[Case],
    *,
    budget_s: float,
    synchronize: Callable[[], None],
    tick: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Callable[[], float] | None = None,
) -> list[Timing]:
    """How long one run of each case takes.

    Each case is timed once; then turns go round until the budget is spent or each case has had plenty. `tick` hears how far we are. Cases
    are timed with the stopwatch, if there is one that others cannot disturb, else with the clock.
    """
    stopwatch = stopwatch or clock
    start = clock()
    turns = []
    for i, case in enumerate(cases):
        turns.append([_turn(case.run, 1, synchronize, stopwatch, clock)])
        tick(_FIRST_ROUND * (i + 1) / len(cases))
    order = ((turn, i) for turn in range(_MOST_TURNS) for i, case in enumerate(cases) if not (case.minor and turn % _MINOR_EVERY))
    for turn, i in order:
        elapsed = clock() - start
        if elapsed >= budget_s:
            break
        tick(_FIRST_ROUND + (1 - _FIRST_ROUND) * max(elapsed / budget_s, turn / _MOST_TURNS))
        repeats = max(1, round(_TURN_S / max(min(turns[i])[0], 1e-9)))
        turns[i].append(_turn(cases[i].run, repeats, synchronize, stopwatch, clock))
    tick(1.0)
    return [_timing(taken) for taken in turns]


def _timing(turns: Sequence[tuple[float, float]]) -> Timing:
    ours = sorted(seconds for seconds, _ in turns)
    everything = sorted(seconds for _, seconds in turns)
    return Timing(seconds=max(ours[len(ours) // 10], 1e-9), usual_seconds=max(everything[len(everything) // 2], 1e-9))


def _turn(
    run: Callable[[], object], repeats: int, synchronize: Callable[[], None], stopwatch: Callable[[], float], clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds a run, by the stopwatch and by the clock. A first run wakes the threads that will share the work, and is not counted."""
    run()
    synchronize()
    ours, everything = stopwatch(), clock()
    for _ in range(repeats):
        run()
    synchronize()
    return (stopwatch() - ours) / repeats, (clock() - everything) / repeats


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


def backward_case(run: Callable[[], Tensor], inputs: list[Tensor]) -> Case:
    """The backward pass of what `run` computes from `inputs`, again and again."""
    out = run()
    gradient = torch.ones_like(out)
    return Case(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))


def operators(device: torch.device, elements: int) -> list[OperatorCase]:
    """Operators on tensors of so many elements."""
    found = []
    for target, specs in _calls(elements):
        cost = measure_operator(target, specs, {}, "fp32")
        args = [_real(spec, device) for spec in specs]
        run = partial(target, *args)
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        name = target._overloadpacket.__name__
        found.append(OperatorCase(name, cost.bytes, cost.backward_bytes, Case(run), backward_case(run, inputs)))
    return found


def attention_cases(device: torch.device, variant: str, heads: int, sequence: int, depth: int) -> tuple[Case, Case]:
    """Attention forward and backward; heads lie beside each other in memory, as a projection leaves them."""
    query, key, value = (torch.randn(1, sequence, heads, depth, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    run = partial(scaled_dot_product_attention, query, key, value, **_VARIANTS[variant])
    return Case(run), backward_case(run, [query, key, value])


def update(device: torch.device, optimizer: str, elements: int) -> tuple[Case, int]:
    """A step of an optimizer, and over how many tensors: several where they are small, as in a model."""
    tensors = max(2, min(16, (1 << 23) // elements))
    parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return Case(OPTIMIZERS[optimizer](parameters, lr=1e-6).step), tensors
