"""Measuring a device: matrix products, convolutions, elementwise work, attention, optimizers and the cost of an operator."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from atoll.cluster import timing
from atoll.cluster.cluster import AttentionRate, ConvRate, MatmulRate, Measurements, MemoryRate, OperatorRate, UpdateTime
from atoll.cluster.kinds import ATTENTION_VARIANTS
from atoll.cluster.timing import Case, Timing, interleaved

__all__ = ["DeviceMeasurement", "measure_device", "one_way_copy"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RESULTS_BYTES = 64e6  # more than the caches of a core and what it shares with others
_OPERANDS_BYTES = 32e6  # operands take turns over this much, so that small products do not find theirs in the nearest cache every time
_FULL_S, _QUICK_S = 40.0, 7.0
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
# (batch, inputs, outputs, size, kernel, groups)
_CONVOLUTIONS = (
    (8, 64, 64, 32, 3, 1),
    (8, 64, 256, 16, 1, 1),
    (8, 3, 64, 64, 7, 1),
    (8, 256, 64, 16, 1, 1),
    (8, 128, 128, 16, 3, 1),
    (8, 256, 256, 8, 3, 1),
    (8, 512, 128, 8, 1, 1),
    (8, 32, 32, 32, 3, 1),
    (8, 64, 64, 32, 3, 64),
)
_MEMORY_BYTES = (48e3, 192e3, 768e3, 3e6, 12e6, 48e6, 192e6)
_ACCELERATOR_MEMORY_BYTES = (*_MEMORY_BYTES, 768e6)
_CHAIN = 32  # operators in the chain that tells what the smallest one costs


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
    tick: Callable[[float], None] = lambda share: None,
) -> DeviceMeasurement:
    """What a device with so much free memory does. Takes about 40 s, quick 7 s, or the budget given; each case is run in any event."""
    on_cpu = device.type == "cpu"
    synchronize = (lambda: None) if on_cpu else torch.accelerator.synchronize
    # One thread's own processor time leaves out the time others took; several threads wait for each other, so only the clock tells.
    stopwatch = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    agenda = _Agenda(
        device, available_bytes, quick, lambda case: interleaved([case], budget_s=0.0, synchronize=synchronize, stopwatch=stopwatch)[0]
    )
    budget_s = budget_s if budget_s is not None else _QUICK_S if quick else _FULL_S
    timings = interleaved(agenda.cases, budget_s=budget_s, synchronize=synchronize, tick=tick, stopwatch=stopwatch)
    busy = statistics.median(timing.usual_seconds / timing.seconds for timing in timings)
    return agenda.measured([timing.seconds for timing in timings], busy)


Shape = tuple[int, int, int, int, int, int]


def _memory_bytes(on_cpu: bool) -> tuple[float, ...]:
    return _MEMORY_BYTES if on_cpu else _ACCELERATOR_MEMORY_BYTES


class _Results:
    """Keeps results for a while, so that new ones go to memory that has left the caches, as they do in training."""

    def __init__(self, most_bytes: float) -> None:
        self._kept: deque[tuple[Tensor, int]] = deque()
        self._bytes, self._most = 0, most_bytes

    def keep(self, result: object) -> None:
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self._kept.append((tensor, tensor.nbytes))
                self._bytes += tensor.nbytes
        while self._bytes > self._most:
            self._bytes -= self._kept.popleft()[1]


class _Agenda:
    """Everything to be timed, and where each stands among the cases."""

    def __init__(self, device: torch.device, available_bytes: float, quick: bool, pilot: Callable[[Case], Timing]) -> None:
        on_cpu = device.type == "cpu"
        sizes = [size for size in _memory_bytes(on_cpu) if size <= max(available_bytes / 8, _MEMORY_BYTES[0])]
        self.threads = torch.get_num_threads() if on_cpu else 0
        self.cases: list[Case] = []
        self._results = _Results(min(_RESULTS_BYTES, available_bytes / 8))
        self.copied_bytes = sizes[-1]
        self.chain = self._add(_chain(device))
        self.copy = self._add(_copy(device, sizes[-1]))
        self.products = [(shape, self._add(_product(device, *shape))) for shape in _products(device, quick, pilot)]
        self.elementwise = [(size, self._add(_elementwise(device, size))) for size in sizes]
        self._with_backward(device, quick)

    def _with_backward(self, device: torch.device, quick: bool) -> None:
        """What is timed forward and backward, and the optimizers."""
        self.convolutions = [(shape, self._pair(_convolution(device, *shape))) for shape in (_CONVOLUTIONS[:3] if quick else _CONVOLUTIONS)]
        elements = timing.OPERATOR_ELEMENTS[-1:] if quick else timing.OPERATOR_ELEMENTS
        cases = [case for size in elements for case in timing.operators(device, size)]
        self.operators = [(case, self._pair((case.forward, case.backward))) for case in cases]
        shapes = timing.ATTENTION_SHAPES[:1] if quick else timing.ATTENTION_SHAPES
        self.attention = [
            (variant, shape, self._pair(timing.attention_cases(device, variant, *shape)))
            for variant in ATTENTION_VARIANTS
            for shape in shapes
        ]
        updates = [(name, size, timing.update(device, name, size)) for name in timing.OPTIMIZERS for size in timing.UPDATE_ELEMENTS]
        self.updates = [(name, size, tensors, self._add(case)) for name, size, (case, tensors) in updates]

    def _add(self, case: Case) -> int:
        self.cases.append(replace(case, run=lambda: self._results.keep(case.run())))
        return len(self.cases) - 1

    def _pair(self, cases: tuple[Case, Case]) -> tuple[int, int]:
        return self._add(cases[0]), self._add(cases[1])

    def measured(self, seconds: Sequence[float], busy: float) -> DeviceMeasurement:
        """What the times of the cases mean."""
        measurements = Measurements(
            operator_seconds=seconds[self.chain] / (2 * _CHAIN),
            matmul=tuple(_product_rate(shape, seconds[i]) for shape, i in self.products),
            conv=tuple(_convolution_rate(shape, seconds[i], seconds[j]) for shape, (i, j) in self.convolutions),
            memory=tuple(MemoryRate(bytes=size, bytes_per_s=size / seconds[i]) for size, i in self.elementwise),
            operators=tuple(_operator_rate(case, seconds[i], seconds[j]) for case, (i, j) in self.operators),
            attention=tuple(_attention_rate(variant, shape, seconds[i], seconds[j]) for variant, shape, (i, j) in self.attention),
            updates=tuple(UpdateTime(optimizer=n, elements=size, seconds=seconds[i] / tensors) for n, size, tensors, i in self.updates),
            threads=self.threads,
        )
        return DeviceMeasurement(measurements=measurements, memory_bytes_per_s=self.copied_bytes / seconds[self.copy], busy=busy)


def _products(device: torch.device, quick: bool, pilot: Callable[[Case], Timing]) -> list[tuple[str, int, int, int]]:
    """(precision, rows, columns, depth) of the products to time: all in fp32, in other precisions those that do not take too long."""
    shapes = (*_QUICK_PRODUCTS, *(() if quick else _MORE_PRODUCTS), *(() if device.type == "cpu" else _ACCELERATOR_PRODUCTS))
    chosen: list[tuple[str, int, int, int]] = []
    for precision in _DTYPES:
        rate = math.prod(_PILOT) / pilot(_product(device, precision, *_PILOT)).seconds
        chosen += [(precision, *shape) for shape in shapes if precision == "fp32" or math.prod(shape) / rate <= _LONGEST_MINOR_S]
    return chosen


def _product_rate(product: tuple[str, int, int, int], seconds: float) -> MatmulRate:
    precision, rows, columns, depth = product
    rate = 2.0 * rows * columns * depth / seconds
    return MatmulRate(precision=precision, rows=rows, columns=columns, depth=depth, flops_per_s=rate)


def _convolution_rate(shape: Shape, forward: float, backward: float) -> ConvRate:
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


def _operator_rate(case: timing.OperatorCase, forward: float, backward: float) -> OperatorRate:
    rate = case.bytes / forward
    back = case.backward_bytes / backward if case.backward_bytes else rate  # a view of the gradient: nothing is moved
    return OperatorRate(operator=case.name, bytes=case.bytes, bytes_per_s=rate, backward_bytes_per_s=back)


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


def _product(device: torch.device, precision: str, rows: int, columns: int, depth: int) -> Case:
    """A linear layer's product: its inputs were just made, its weights were last seen a step ago."""
    dtype = _DTYPES[precision]
    sets = max(1, min(64, round(_OPERANDS_BYTES / (dtype.itemsize * depth * columns))))
    inputs = torch.randn(rows, depth, device=device).to(dtype)
    weights = cycle(torch.randn(sets, columns, depth, device=device).to(dtype).unbind())
    return Case(lambda: torch.nn.functional.linear(inputs, next(weights)), minor=precision != "fp32")


def _convolution(device: torch.device, batch: int, inputs: int, outputs: int, size: int, kernel: int, groups: int) -> tuple[Case, Case]:
    images = torch.randn(batch, inputs, size, size, device=device, requires_grad=True)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, device=device, requires_grad=True)
    run = partial(torch.nn.functional.conv2d, images, weight, padding=kernel // 2, groups=groups)
    return Case(run), timing.backward_case(run, [images, weight])


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
