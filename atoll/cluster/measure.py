"""Measuring a device: matrix products, convolutions, elementwise work, attention, optimizers and the cost of an operator.

Machines are shared and noisy, so every case is timed in many short turns that alternate with all other cases: a disturbance of some seconds
then touches a few turns of every case instead of ruining one. What a step will take is what things usually take, with what neighbours
cost: the median turn of each case, by the processor's time where there is one thread, stretched as time on the wall was over the usual
tenth of a second. A machine without its neighbours is the fastest tenth of the turns.

Backward passes are timed on a graph that is kept, so that forward is not part of them. Bytes are counted by `atoll.graph.flops`, as capture
counts those of a model.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention

from atoll.cluster.cluster import AttentionRate, ConvRate, MatmulRate, Measurements, MemoryRate, OperatorRate, UpdateTime
from atoll.graph.flops import OperatorCost, TensorSpec, measure_operator

__all__ = ["Case", "DeviceMeasurement", "Timing", "interleaved", "measure_device", "one_way_copy"]

_MOST_TURNS = 60
_TURN_S = 0.004  # about a scheduler's time slice: longer turns are rarely left alone
_WINDOW_S = 0.1  # about a step of a small model
_MINOR_EVERY = 4
_FIRST_ROUND = 0.1  # of the whole, as it is told: cases run for the first time then, which takes longer than later turns


@dataclass(frozen=True)
class Case:
    """Something to time; what matters less has a turn in every fourth round only."""

    run: Callable[[], object]
    minor: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: undisturbed (the fastest tenth of turns), of the median turn by the clock on the wall, and as a part of work that
    lasts longer than a turn: the median turn, and the share of the usual tenth of a second in which others had the processor."""

    seconds: float
    usual_seconds: float
    lasting_seconds: float


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
    turns: list[list[tuple[float, float]]] = []
    taken: list[_Turn] = []
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
        taken.append(_Turn(i, repeats, turns[i][-1][1]))
    tick(1.0)
    medians = [statistics.median(seconds for seconds, _ in own) for own in turns]
    stretch = _stretch(taken, medians)
    return [_timing(own, median * stretch) for own, median in zip(turns, medians, strict=True)]


class _Turn(NamedTuple):
    """Some runs of a case one after another, and what each took by the clock on the wall."""

    case: int
    repeats: int
    wall_seconds: float


def _stretch(turns: Sequence[_Turn], medians: Sequence[float]) -> float:
    """How many times as long as their medians turns take together in the usual window: neighbours take whole slices of time, so that most
    short turns do not notice them, but everything that lasts longer does."""
    windows: list[float] = []
    wall = own = 0.0
    for turn in turns:
        wall, own = wall + turn.repeats * turn.wall_seconds, own + turn.repeats * medians[turn.case]
        if wall >= _WINDOW_S:
            windows.append(wall / max(own, 1e-9))
            wall = own = 0.0
    return statistics.median(windows) if windows else 1.0


def _timing(turns: Sequence[tuple[float, float]], lasting_seconds: float) -> Timing:
    ours = sorted(seconds for seconds, _ in turns)
    everything = sorted(seconds for _, seconds in turns)
    return Timing(
        seconds=max(ours[len(ours) // 10], 1e-9),
        usual_seconds=max(everything[len(everything) // 2], 1e-9),
        lasting_seconds=max(lasting_seconds, 1e-9),
    )


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


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RESULTS_BYTES = 64e6  # more than the caches of a core and what it shares with others
_OPERANDS_BYTES = 32e6  # operands take turns over this much, so that small products do not find theirs in the nearest cache every time
_FULL_S, _QUICK_S = 40.0, 7.0
_LONGEST_MINOR_S = 0.03  # products that would take longer in a precision without fast units are left out: the rate no longer changes
_PILOT = (256, 256, 256)

# (rows, columns, depth)
_QUICK_PRODUCTS = (
    (64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (1, 1024, 1024), (32, 1024, 1024), (1024, 64, 64),
    (1024, 256, 256), (512, 3072, 768),
)  # fmt: skip
_MORE_PRODUCTS = (
    (128, 128, 64), (128, 128, 128), (2048, 2048, 2048), (8, 1024, 1024), (128, 1024, 1024), (64, 256, 256), (4096, 256, 256),
    (8192, 64, 64), (512, 128, 128), (512, 768, 768), (512, 768, 3072), (256, 256, 4096), (512, 8192, 256),
)  # fmt: skip
_ACCELERATOR_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (64, 8192, 8192))
# (batch, inputs, outputs, size, kernel, groups)
_CONVOLUTIONS = (
    (8, 64, 64, 32, 3, 1), (8, 64, 256, 16, 1, 1), (8, 3, 64, 64, 7, 1), (8, 256, 64, 16, 1, 1), (8, 128, 128, 16, 3, 1),
    (8, 256, 256, 8, 3, 1), (8, 512, 128, 8, 1, 1), (8, 32, 32, 32, 3, 1), (8, 64, 64, 32, 3, 64),
)  # fmt: skip
_MEMORY_BYTES = (48e3, 192e3, 768e3, 3e6, 12e6, 48e6, 192e6)
_ACCELERATOR_MEMORY_BYTES = (*_MEMORY_BYTES, 768e6)
_CHAIN = 32  # operators in the chain that tells what the smallest one costs
_OPERATOR_ELEMENTS = (1 << 16, 1 << 20)  # inside a core's cache, and outside
# (samples times heads, sequence, depth of a head)
_ATTENTION_SHAPES = ((8, 128, 64), (4, 512, 64), (32, 128, 32), (16, 32, 64))
_UPDATE_ELEMENTS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_ROW = 512  # elements that a normalisation or a softmax goes over
_CLASSES = 1 << 15  # a vocabulary
_FIRST_CLASSES = 1 << 10  # targets are among them
_CHANNELS = 64
_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1}}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}
aten = torch.ops.aten


@dataclass(frozen=True)
class DeviceMeasurement:
    """What was measured of a device. `busy` is how many times slower than undisturbed the usual turn was: 1 on a quiet machine."""

    measurements: Measurements
    memory_bytes_per_s: float
    busy: float


def measure_device(
    device: torch.device,
    available_bytes: float,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    undisturbed: bool = False,
    tick: Callable[[float], None] = lambda share: None,
) -> DeviceMeasurement:
    """What a device with so much free memory does. Takes about 40 s, quick 7 s, or the budget given; each case is run in any event.

    `undisturbed` leaves out what neighbours cost.
    """
    on_cpu = device.type == "cpu"
    synchronize = (lambda: None) if on_cpu else torch.accelerator.synchronize
    # One thread's own processor time leaves out the time others took; several threads wait for each other, so only the clock tells.
    stopwatch = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    timed = partial(interleaved, synchronize=synchronize, stopwatch=stopwatch)
    sizes = [size for size in _memory_bytes(on_cpu) if size <= max(available_bytes / 8, _MEMORY_BYTES[0])]
    results = _Results(min(_RESULTS_BYTES, available_bytes / 8))
    trials = list(_trials(device, quick, sizes, lambda case: timed([case], budget_s=0.0)[0].seconds))
    cases = [_chain(device), _copy(device, sizes[-1]), *(case for trial in trials for case in trial.cases)]
    budget_s = budget_s if budget_s is not None else _QUICK_S if quick else _FULL_S
    timings = timed([results.keeping(case) for case in cases], budget_s=budget_s, tick=tick)
    seconds = iter([timing.seconds if undisturbed else timing.lasting_seconds for timing in timings])
    operator_seconds, memory_rate = next(seconds) / (2 * _CHAIN), sizes[-1] / next(seconds)
    rates: dict[str, list[Any]] = defaultdict(list)
    for trial in trials:
        rates[trial.kind].append(trial.rate(*(next(seconds) for _ in trial.cases)))
    return DeviceMeasurement(
        measurements=Measurements(
            operator_seconds=operator_seconds,
            threads=torch.get_num_threads() if on_cpu else 0,
            **{kind: tuple(found) for kind, found in rates.items()},
        ),
        memory_bytes_per_s=memory_rate,
        busy=statistics.median(timing.usual_seconds / timing.seconds for timing in timings),
    )


def _memory_bytes(on_cpu: bool) -> tuple[float, ...]:
    return _MEMORY_BYTES if on_cpu else _ACCELERATOR_MEMORY_BYTES


class _Results:
    """Keeps results for a while, so that new ones go to memory that has left the caches, as they do in training."""

    def __init__(self, most_bytes: float) -> None:
        self._kept: deque[tuple[Tensor, int]] = deque()
        self._bytes, self._most = 0, most_bytes

    def keeping(self, case: Case) -> Case:
        return replace(case, run=lambda: self._keep(case.run()))

    def _keep(self, result: object) -> None:
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._kept.append((tensor, tensor.nbytes))
                self._bytes += tensor.nbytes
        while self._bytes > self._most:
            self._bytes -= self._kept.popleft()[1]


@dataclass(frozen=True)
class _Trial:
    """Cases to time, and what one run's seconds of each amount to: a rate among `kind` of the measurements."""

    kind: str
    cases: tuple[Case, ...]
    rate: Callable[..., object]


def _trials(device: torch.device, quick: bool, sizes: Sequence[float], pilot: Callable[[Case], float]) -> Iterator[_Trial]:
    """Everything to be timed that is a rate."""
    for product in _products(device, quick, pilot):
        yield _Trial("matmul", (_product(device, *product),), partial(_product_rate, product))
    for size in sizes:
        yield _Trial("memory", (_elementwise(device, size),), partial(_memory_rate, size))
    for convolution in _CONVOLUTIONS[:3] if quick else _CONVOLUTIONS:
        yield _Trial("conv", _convolution(device, *convolution), partial(_convolution_rate, convolution))
    for elements in _OPERATOR_ELEMENTS[-1:] if quick else _OPERATOR_ELEMENTS:
        for target, specs in _calls(elements):
            cost = measure_operator(target, specs, {}, "fp32")
            yield _Trial("operators", _operator(device, target, specs), partial(_operator_rate, target, cost))
    for variant in _VARIANTS:
        for shape in _ATTENTION_SHAPES[:1] if quick else _ATTENTION_SHAPES:
            yield _Trial("attention", _attention(device, variant, *shape), partial(_attention_rate, variant, shape))
    for optimizer in _OPTIMIZERS:
        for elements in _UPDATE_ELEMENTS:
            tensors = max(2, min(16, (1 << 23) // elements))  # several where they are small, as in a model
            case = _update(device, optimizer, elements, tensors)
            yield _Trial("updates", (case,), partial(_update_time, optimizer, elements, tensors))


def _products(device: torch.device, quick: bool, pilot: Callable[[Case], float]) -> list[tuple[str, int, int, int]]:
    """(precision, rows, columns, depth) of the products to time: all in fp32, in other precisions those that do not take too long."""
    shapes = (*_QUICK_PRODUCTS, *(() if quick else _MORE_PRODUCTS), *(() if device.type == "cpu" else _ACCELERATOR_PRODUCTS))
    chosen: list[tuple[str, int, int, int]] = []
    for precision in _DTYPES:
        rate = math.prod(_PILOT) / pilot(_product(device, precision, *_PILOT))
        chosen += [(precision, *shape) for shape in shapes if precision == "fp32" or math.prod(shape) / rate <= _LONGEST_MINOR_S]
    return chosen


def _product_rate(product: tuple[str, int, int, int], seconds: float) -> MatmulRate:
    precision, rows, columns, depth = product
    rate = 2.0 * rows * columns * depth / seconds
    return MatmulRate(precision=precision, rows=rows, columns=columns, depth=depth, flops_per_s=rate)


def _memory_rate(size: float, seconds: float) -> MemoryRate:
    return MemoryRate(bytes=size, bytes_per_s=size / seconds)


def _convolution_rate(shape: tuple[int, int, int, int, int, int], forward: float, backward: float) -> ConvRate:
    batch, inputs, outputs, size, kernel, groups = shape
    flops = 2.0 * batch * size**2 * inputs * outputs * kernel**2 / groups
    return ConvRate(
        precision="fp32",
        batch=batch,
        inputs=inputs,
        outputs=outputs,
        size=size,
        kernel=kernel,
        groups=groups,
        flops_per_s=flops / forward,
        backward_flops_per_s=2 * flops / backward,
    )


def _operator_rate(target: Any, cost: OperatorCost, forward: float, backward: float) -> OperatorRate:
    rate = cost.bytes / forward
    back = cost.backward_bytes / backward if cost.backward_bytes else rate  # a view of the gradient: nothing is moved
    return OperatorRate(operator=target._overloadpacket.__name__, bytes=cost.bytes, bytes_per_s=rate, backward_bytes_per_s=back)


def _attention_rate(variant: str, shape: tuple[int, int, int], forward: float, backward: float) -> AttentionRate:
    heads, sequence, depth = shape
    product = 2.0 * heads * sequence**2 * depth
    return AttentionRate(
        variant=variant,
        heads=heads,
        sequence=sequence,
        depth=depth,
        flops_per_s=2 * product / forward,
        backward_flops_per_s=5 * product / backward,
    )


def _update_time(optimizer: str, elements: int, tensors: int, seconds: float) -> UpdateTime:
    return UpdateTime(optimizer=optimizer, elements=elements, seconds=seconds / tensors)


def _product(device: torch.device, precision: str, rows: int, columns: int, depth: int) -> Case:
    """A linear layer's product: its inputs were just made, its weights were last seen a step ago."""
    dtype = _DTYPES[precision]
    sets = max(1, min(64, round(_OPERANDS_BYTES / (dtype.itemsize * depth * columns))))
    inputs = torch.randn(rows, depth, device=device).to(dtype)
    weights = cycle(torch.randn(sets, columns, depth, device=device).to(dtype).unbind())
    return Case(lambda: linear(inputs, next(weights)), minor=precision != "fp32")


def _convolution(device: torch.device, batch: int, inputs: int, outputs: int, size: int, kernel: int, groups: int) -> tuple[Case, Case]:
    images = torch.randn(batch, inputs, size, size, device=device, requires_grad=True)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, device=device, requires_grad=True)
    run = partial(conv2d, images, weight, padding=kernel // 2, groups=groups)
    return Case(run), _backward_case(run, [images, weight])


def _elementwise(device: torch.device, size: float) -> Case:
    """Reads two tensors and writes a fresh one, as operators of a model do: the cost of fresh memory is part of it."""
    elements = int(size / 12)
    a, b = torch.randn(elements, device=device), torch.randn(elements, device=device)
    return Case(lambda: a + b)


def _copy(device: torch.device, size: float) -> Case:
    source = torch.randn(int(size / 8), device=device)
    target = torch.empty_like(source)
    return Case(lambda: target.copy_(source))


def one_way_copy(source: torch.device, target: torch.device) -> tuple[float, Case]:
    """A copy from one device to another, with its bytes."""
    tensor = torch.zeros(16 << 20, device=source)
    place = torch.empty_like(tensor, device=target)
    return float(tensor.nbytes), Case(lambda: place.copy_(tensor))


def _chain(device: torch.device) -> Case:
    """A chain of tiny operators, forward and backward: what is left when there is nothing to compute."""
    start = torch.zeros(8, device=device, requires_grad=True)

    def run() -> None:
        x = start
        for _ in range(_CHAIN):
            x = torch.tanh(x)
        torch.autograd.grad(x.sum(), start)

    return Case(run)


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


def _backward_case(run: Callable[[], Tensor], inputs: list[Tensor]) -> Case:
    """The backward pass of what `run` computes from `inputs`, again and again."""
    out = run()
    gradient = torch.ones_like(out)
    return Case(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))


def _operator(device: torch.device, target: Any, specs: Sequence[Any]) -> tuple[Case, Case]:
    args = [_real(spec, device) for spec in specs]
    run = partial(target, *args)
    return Case(run), _backward_case(run, [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad])


def _attention(device: torch.device, variant: str, heads: int, sequence: int, depth: int) -> tuple[Case, Case]:
    """Attention forward and backward; heads lie beside each other in memory, as a projection leaves them."""
    query, key, value = (torch.randn(1, sequence, heads, depth, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    run = partial(scaled_dot_product_attention, query, key, value, **_VARIANTS[variant])
    return Case(run), _backward_case(run, [query, key, value])


def _update(device: torch.device, optimizer: str, elements: int, tensors: int) -> Case:
    """A step of an optimizer."""
    parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return Case(_OPTIMIZERS[optimizer](parameters, lr=1e-6).step)
