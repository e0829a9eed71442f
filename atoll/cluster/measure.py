"""Measuring a device: matrix products, convolutions, elementwise work and the cost of an operator.

Machines are shared and noisy, so every case is timed in many short turns that alternate with all other cases: a disturbance of some seconds
then touches a few turns of every case instead of ruining one. Disturbances only ever add time, so the fastest tenth of the turns counts;
how much slower the usual turn was tells how busy the machine is.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from atoll.cluster.cluster import ConvRate, MatmulRate, Measurements, MemoryRate

__all__ = ["Case", "Measured", "Timing", "interleaved", "measure", "one_way_copy"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPERANDS_BYTES = 8e6  # operands take turns over this much, so that small products do not find theirs in the nearest cache every time
_FULL_S, _QUICK_S = 40.0, 7.0
_MOST_TURNS = 60
_TURN_S = 0.004  # about a scheduler's time slice: longer turns are rarely left alone
_MINOR_EVERY = 4
_LONGEST_MINOR_S = 0.03  # products that would take longer in a precision without fast units are left out: the rate no longer changes
_PILOT = (256, 256, 256)

# (rows, columns, depth)
_QUICK_PRODUCTS = (
    (64, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (1, 1024, 1024),
    (32, 1024, 1024),
    (1024, 64, 64),
    (1024, 256, 256),
    (512, 3072, 768),
)
_MORE_PRODUCTS = (
    (128, 128, 64),
    (128, 128, 128),
    (2048, 2048, 2048),
    (8, 1024, 1024),
    (128, 1024, 1024),
    (64, 256, 256),
    (4096, 256, 256),
    (8192, 64, 64),
    (512, 128, 128),
    (512, 768, 768),
    (512, 768, 3072),
    (256, 256, 4096),
    (512, 8192, 256),
)
_ACCELERATOR_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (64, 8192, 8192))
# (batch, inputs, outputs, size, kernel)
_CONVOLUTIONS = ((8, 64, 64, 32, 3), (8, 64, 256, 32, 1), (8, 128, 128, 16, 3), (8, 256, 256, 8, 3), (8, 3, 64, 64, 7))
_MEMORY_BYTES = (48e3, 192e3, 768e3, 3e6, 12e6, 48e6, 192e6)
_ACCELERATOR_MEMORY_BYTES = (*_MEMORY_BYTES, 768e6)
_CHAIN = 32  # operators in the chain that tells what the smallest one costs


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


@dataclass(frozen=True)
class Measured:
    """What was measured of a device. `busy` is how many times slower than undisturbed the usual turn was: 1 on a quiet machine."""

    measurements: Measurements
    memory_bytes_per_s: float
    busy: float


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
    turns = [[_turn(case.run, 1, synchronize, stopwatch, clock)] for case in cases]
    order = ((turn, i) for turn in range(_MOST_TURNS) for i, case in enumerate(cases) if not (case.minor and turn % _MINOR_EVERY))
    for turn, i in order:
        elapsed = clock() - start
        if elapsed >= budget_s:
            break
        tick(max(elapsed / budget_s, turn / _MOST_TURNS))
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


def measure(
    device: torch.device,
    available_bytes: float,
    *,
    quick: bool = False,
    budget_s: float | None = None,
    tick: Callable[[float], None] = lambda share: None,
) -> Measured:
    """What a device with so much free memory does. Takes about 40 s, quick 7 s, or the budget given; each case is run in any event."""
    on_cpu = device.type == "cpu"
    synchronize = (lambda: None) if on_cpu else torch.accelerator.synchronize
    # One thread's own processor time leaves out the time others took; several threads wait for each other, so only the clock tells.
    stopwatch = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    products = _products(device, quick, lambda case: interleaved([case], budget_s=0.0, synchronize=synchronize, stopwatch=stopwatch)[0])
    convolutions = _CONVOLUTIONS[:2] if quick else _CONVOLUTIONS
    sizes = [
        size for size in (_MEMORY_BYTES if on_cpu else _ACCELERATOR_MEMORY_BYTES) if size <= max(available_bytes / 8, _MEMORY_BYTES[0])
    ]
    cases = [
        _chain(device),
        _copy(device, sizes[-1]),
        *(_product(device, *product) for product in products),
        *(_convolution(device, *shape) for shape in convolutions),
        *(_elementwise(device, size) for size in sizes),
    ]
    budget_s = budget_s if budget_s is not None else _QUICK_S if quick else _FULL_S
    timings = interleaved(cases, budget_s=budget_s, synchronize=synchronize, tick=tick, stopwatch=stopwatch)
    chain, copy, *others = timings
    measurements = Measurements(
        operator_seconds=chain.seconds / (2 * _CHAIN),
        matmul=tuple(_product_rates(products, others)),
        conv=tuple(_convolution_rates(convolutions, others[len(products) :])),
        memory=tuple(MemoryRate(bytes=size, bytes_per_s=size / t.seconds) for size, t in zip(sizes, others[-len(sizes) :], strict=True)),
        threads=torch.get_num_threads() if on_cpu else 0,
    )
    busy = statistics.median(timing.usual_seconds / timing.seconds for timing in timings)
    return Measured(measurements=measurements, memory_bytes_per_s=sizes[-1] / copy.seconds, busy=busy)


def _products(device: torch.device, quick: bool, pilot: Callable[[Case], Timing]) -> list[tuple[str, int, int, int]]:
    """(precision, rows, columns, depth) of the products to time: all in fp32, in other precisions those that do not take too long."""
    shapes = (*_QUICK_PRODUCTS, *(() if quick else _MORE_PRODUCTS), *(() if device.type == "cpu" else _ACCELERATOR_PRODUCTS))
    chosen: list[tuple[str, int, int, int]] = []
    for precision in _DTYPES:
        rate = math.prod(_PILOT) / pilot(_product(device, precision, *_PILOT)).seconds
        chosen += [(precision, *shape) for shape in shapes if precision == "fp32" or math.prod(shape) / rate <= _LONGEST_MINOR_S]
    return chosen


def _product_rates(products: Sequence[tuple[str, int, int, int]], timings: Sequence[Timing]) -> Iterator[MatmulRate]:
    for (precision, rows, columns, depth), timing in zip(products, timings, strict=False):
        rate = 2.0 * rows * columns * depth / timing.seconds
        yield MatmulRate(precision=precision, rows=rows, columns=columns, depth=depth, flops_per_s=rate)


def _convolution_rates(shapes: Sequence[tuple[int, int, int, int, int]], timings: Sequence[Timing]) -> Iterator[ConvRate]:
    for (batch, inputs, outputs, size, kernel), timing in zip(shapes, timings, strict=False):
        flops = 2.0 * batch * size**2 * inputs * outputs * kernel**2
        yield ConvRate(
            precision="fp32",
            batch=batch,
            inputs=inputs,
            outputs=outputs,
            size=size,
            kernel=kernel,
            flops_per_s=flops / timing.seconds,
        )


def _product(device: torch.device, precision: str, rows: int, columns: int, depth: int) -> Case:
    """A linear layer's product."""
    dtype = _DTYPES[precision]
    sets = max(1, min(16, round(_OPERANDS_BYTES / (dtype.itemsize * depth * (rows + columns)))))
    inputs = cycle([torch.randn(rows, depth, device=device).to(dtype) for _ in range(sets)])
    weights = cycle([torch.randn(columns, depth, device=device).to(dtype) for _ in range(sets)])
    return Case(lambda: torch.nn.functional.linear(next(inputs), next(weights)), minor=precision != "fp32")


def _convolution(device: torch.device, batch: int, inputs: int, outputs: int, size: int, kernel: int) -> Case:
    images = torch.randn(batch, inputs, size, size, device=device)
    weight = torch.randn(outputs, inputs, kernel, kernel, device=device)
    return Case(lambda: torch.nn.functional.conv2d(images, weight, padding=kernel // 2))


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
