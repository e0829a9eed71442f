"""Times from what `atoll probe` measured of a device: they go before the roofline of peak figures.

Products and convolutions are priced by their shapes, forward and both of backward's; operators, attention and updates by their sizes.
Between measured sizes times are interpolated on logarithmic axes, outside them they grow in proportion. At a measured size the measured
time comes out, except where a smaller one was measured to take longer.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import exp, log
from typing import NamedTuple

from atoll.cluster import DeviceKind, MatmulRate, Measurements
from atoll.cost.context import OPTIMIZERS
from atoll.graph import Work

__all__ = ["MeasuredTimes", "Passes"]

_ALIKE = {
    "reshape": "contiguous",
    "flatten": "contiguous",
    "clone": "contiguous",
    "mean": "sum",
    "softplus": "exp",
    "log_softmax": "softmax",
}
_MOST_CORRECTION = log(1.4)  # of the fitted time of a product towards its neighbours: less than the growth when a side doubles


_RIGHT = 2  # among the terms of a product: the elements of its right operand
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Passes(NamedTuple):
    """Seconds of one piece of work, forward and backward."""

    forward: float
    backward: float


class Curve:
    """Seconds by size, through measured points; never falling."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """Points are (size, seconds), both positive; at least one."""
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        for size, seconds in sorted(points):
            self._sizes.append(log(size))
            self._seconds.append(max([log(seconds), *self._seconds[-1:]]))
        self.largest = exp(self._sizes[-1])

    def __call__(self, size: float) -> float:
        """Seconds at a size; in proportion to it outside what was measured."""
        if size <= 0:
            return 0.0
        at, sizes, seconds = log(size), self._sizes, self._seconds
        if at <= sizes[0]:
            return exp(seconds[0] + at - sizes[0])
        if at >= sizes[-1]:
            return exp(seconds[-1] + at - sizes[-1])
        i = bisect_left(sizes, at)
        share = (at - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return exp(seconds[i - 1] + share * (seconds[i] - seconds[i - 1]))


_Point = tuple[tuple[float, ...], float]


def _nearby(points: Sequence[_Point], at: tuple[float, ...]) -> float:
    """The mean of values at points, those near by (the distance is one of logarithms) weighing more; exact at a point."""
    total = weights = 0.0
    for place, value in points:
        squared = sum((a - b) ** 2 for a, b in zip(place, at, strict=True))
        if squared < 1e-12:
            return value
        weight = squared**-2
        total += value * weight
        weights += weight
    return total / weights


class Products:
    """Seconds of a matrix product by its shape.

    A fit of what products cost (a constant, elements read, written and packed, arithmetic) carries to shapes that were not measured; how
    far it misses the measured ones corrects it near them.
    """

    def __init__(self, rates: Sequence[MatmulRate]) -> None:
        """At least one rate."""
        from scipy.optimize import nnls  # takes a moment to load, and only clusters that were measured need it

        shapes = [(float(rate.rows), float(rate.columns), float(rate.depth)) for rate in rates]
        seconds = [2.0 * rate.rows * rate.columns * rate.depth / rate.flops_per_s for rate in rates]
        rows = [[term / taken for term in _terms(*shape)] for shape, taken in zip(shapes, seconds, strict=True)]  # relative errors count
        scale = [max(column) for column in zip(*rows, strict=True)]
        scaled = [[value / most for value, most in zip(row, scale, strict=True)] for row in rows]
        weights, _ = nnls(scaled, [1.0] * len(rows))
        self._weights: list[float] = [float(weight) / most for weight, most in zip(weights, scale, strict=True)]
        self._misses = [(_logs(shape), log(taken / self._fit(*shape))) for shape, taken in zip(shapes, seconds, strict=True)]

    def _fit(self, rows: float, columns: float, depth: float) -> float:
        return sum((weight * term for weight, term in zip(self._weights, _terms(rows, columns, depth), strict=True)), 0.0)

    def __call__(self, rows: float, columns: float, depth: float, *, right_at_hand: bool = False) -> float:
        """Seconds of (rows × depth) by (depth × columns); less when the right operand need not be fetched from memory."""
        if min(rows, columns, depth) <= 0:
            return 0.0
        miss = _nearby(self._misses, _logs((rows, columns, depth)))
        fetching = self._weights[_RIGHT] * depth * columns if right_at_hand else 0.0
        return (self._fit(rows, columns, depth) - fetching) * exp(max(-_MOST_CORRECTION, min(_MOST_CORRECTION, miss)))


def _terms(rows: float, columns: float, depth: float) -> tuple[float, ...]:
    return (1.0, rows * depth, depth * columns, rows * columns, rows * columns * depth)


def _logs(shape: Sequence[float]) -> tuple[float, ...]:
    return tuple(log(side) for side in shape)


class MeasuredTimes:
    """Prices work on one kind of device by its measurements."""

    def __init__(self, kind: DeviceKind, measured: Measurements, precision: str) -> None:
        self._operator_s = measured.operator_seconds
        own = [rate for rate in measured.matmul if rate.precision == precision] or list(measured.matmul)
        self._product = Products(own) if own else None
        self._memory = Curve(
            [(rate.bytes, rate.bytes / rate.bytes_per_s) for rate in measured.memory] or [(1.0, 1 / kind.memory_bytes_per_s)]
        )
        self._operators = _operator_curves(measured)
        self._convolutions = _convolution_points(measured)
        self._attention = _attention_points(measured)
        self._updates = _update_curves(measured)
        self._peak = kind.peak(precision)
        self._element_bytes = 4.0 if precision == "fp32" else 2.0

    def work(self, work: Work, samples: float, fraction: float, expert_lanes: int) -> Passes:
        """Seconds of a work item for so many samples, where the device holds a fraction of what is split."""
        price = self._price(work)
        one = price(work, samples, fraction if work.split else 1.0)
        count = work.count / (expert_lanes if work.expert else 1)
        gradient = self._operator_s if work.backward else 0.0
        return Passes(count * max(one.forward, self._operator_s), count * max(one.backward, gradient))

    def update(self, tensors: Sequence[float], update_bytes: float) -> float:
        """Seconds of an optimizer that moves so many bytes a parameter, over tensors of these sizes."""
        if not self._updates:
            return sum(self._memory(elements * update_bytes) for elements in tensors)
        name = min(self._updates, key=lambda name: abs(OPTIMIZERS[name].update_bytes - update_bytes))
        curve, least = self._updates[name]
        scale = update_bytes / OPTIMIZERS[name].update_bytes
        return sum(max(curve(elements), least) * scale for elements in tensors if elements)

    def _price(self, work: Work) -> Callable[[Work, float, float], Passes]:
        if work.kind == "attention" and work.operator and self._attention:
            return self._fused_attention
        if work.kind == "conv" and self._convolutions[0]:
            return self._convolution
        if work.kind in ("matmul", "attention") and self._product is not None and work.depth:
            return self._matmul if work.kind == "matmul" else self._batched
        if work.flops:
            return self._arithmetic
        return self._gather if work.kind == "gather" else self._elementwise

    def _both(self, rows: float, columns: float, depth: float, backward: float) -> Passes:
        """A product forward, and backward those for the gradients of its left and of its right operand."""
        assert self._product is not None, "asked only when products were measured"
        left, right = self._product(rows, depth, columns), self._product(columns, depth, rows)
        return Passes(self._product(rows, columns, depth), (left + right) * backward / 2)

    def _matmul(self, work: Work, samples: float, part: float) -> Passes:
        rows = work.rows * samples * (part if work.split == "rows" else 1.0)
        columns = work.columns * (part if work.split == "columns" else 1.0)
        depth = work.depth * (part if work.split == "depth" else 1.0)
        if work.operator.partition(".")[0] in _RECURRENT and work.count > 1:
            return self._step_of_recurrence(rows, columns, depth, work)
        passes = self._both(rows, columns, depth, work.backward)
        if work.operator.endswith(".bias"):
            gradient = Work(kind="memory", bytes=rows * columns * self._element_bytes, operator="sum")
            return Passes(passes.forward, passes.backward + self._elementwise(gradient, 1.0, 1.0).forward)
        return passes

    def _step_of_recurrence(self, rows: float, columns: float, depth: float, work: Work) -> Passes:
        """Each step finds the weights where the last one left them; their gradient is one product over all steps."""
        assert self._product is not None, "asked only when products were measured"
        forward = self._product(rows, columns, depth, right_at_hand=True)
        inputs = self._product(rows, depth, columns, right_at_hand=True)
        weights = self._product(columns, depth, rows * work.count) / work.count
        return Passes(forward, (inputs + weights) * work.backward / 2)

    def _batched(self, work: Work, samples: float, part: float) -> Passes:
        """Products of activations, one for every sample, head or expert; the size of their right operand tells how many."""
        rows = work.rows * samples * part
        right = work.bytes * samples * part / self._element_bytes - rows * (work.columns + work.depth)
        batch = max(1.0, round(right / (work.columns * work.depth)))
        one = self._both(rows / batch, work.columns, work.depth, work.backward)
        spared = self._operator_s * (batch - 1)  # the batch is one operator
        return Passes(max(batch * one.forward - spared, one.forward), max(batch * one.backward - spared, one.backward))

    def _arithmetic(self, work: Work, samples: float, part: float) -> Passes:
        seconds = max(work.flops * samples * part / self._peak, self._memory(work.bytes * samples * part + work.weight_bytes * part))
        return Passes(seconds, seconds * work.backward)

    def _convolution(self, work: Work, samples: float, part: float) -> Passes:
        at = _logs((max(work.rows * samples, 1.0), max(work.columns, 1), max(work.depth, 1)))
        flops = work.flops * samples * part
        forward, backward = (exp(_nearby(points, at)) for points in self._convolutions)
        return Passes(flops / forward, flops * work.backward / backward)

    def _fused_attention(self, work: Work, samples: float, part: float) -> Passes:
        variant = work.operator.partition(".")[2]
        forward, backward = self._attention.get(variant) or next(iter(self._attention.values()))
        at = _logs((max(work.columns, 1), max(work.depth, 1)))
        flops = work.flops * samples * part
        return Passes(flops / exp(_nearby(forward, at)), flops * work.backward / exp(_nearby(backward, at)))

    def _elementwise(self, work: Work, samples: float, part: float) -> Passes:
        size = work.bytes * samples * part + work.weight_bytes * part
        curves = self._operators.get(_ALIKE.get(work.operator, work.operator))
        if curves is None:
            return Passes(self._memory(size), self._memory(size * work.backward))
        return Passes(self._beyond(curves[0], size), self._beyond(curves[1], size) * work.backward)

    def _beyond(self, curve: Curve, size: float) -> float:
        """A curve; past its end, memory slows an operator down as much as it slows plain elementwise work down."""
        if size <= curve.largest:
            return curve(size)
        slower = self._memory(size) - self._memory(curve.largest) * size / curve.largest
        return curve(size) + max(0.0, slower)

    def _gather(self, work: Work, samples: float, part: float) -> Passes:
        """Backward makes a gradient of the whole table, nearly all zeros, and adds the rows to it."""
        size = work.bytes * samples * part
        table = work.columns * work.depth * 4.0 * part if work.backward else 0.0
        return Passes(self._memory(size), self._memory(size * work.backward) + self._memory(table))


def _operator_curves(measured: Measurements) -> dict[str, tuple[Curve, Curve]]:
    """By operator, seconds by the bytes of forward, for as many bytes forward and as many backward."""
    forward: dict[str, list[tuple[float, float]]] = {}
    backward: dict[str, list[tuple[float, float]]] = {}
    for rate in measured.operators:
        forward.setdefault(rate.operator, []).append((rate.bytes, rate.bytes / rate.bytes_per_s))
        backward.setdefault(rate.operator, []).append((rate.bytes, rate.bytes / rate.backward_bytes_per_s))
    return {name: (Curve(forward[name]), Curve(backward[name])) for name in forward}


def _convolution_points(measured: Measurements) -> tuple[list[_Point], list[_Point]]:
    """Logarithms of rates forward and backward, by the product a convolution amounts to."""
    forward: list[_Point] = []
    backward: list[_Point] = []
    for rate in measured.conv:
        at = _logs((rate.batch * rate.size**2, rate.outputs, rate.inputs / rate.groups * rate.kernel**2))
        forward.append((at, log(rate.flops_per_s)))
        backward.append((at, log(rate.backward_flops_per_s or rate.flops_per_s)))
    return forward, backward


def _attention_points(measured: Measurements) -> dict[str, tuple[list[_Point], list[_Point]]]:
    found: dict[str, tuple[list[_Point], list[_Point]]] = {}
    for rate in measured.attention:
        forward, backward = found.setdefault(rate.variant, ([], []))
        at = _logs((rate.sequence, rate.depth))
        forward.append((at, log(rate.flops_per_s)))
        backward.append((at, log(rate.backward_flops_per_s)))
    return found


def _update_curves(measured: Measurements) -> dict[str, tuple[Curve, float]]:
    """By optimizer, seconds by elements of a tensor, and what the smallest tensor takes."""
    points: dict[str, list[tuple[float, float]]] = {}
    for time in measured.updates:
        if time.optimizer in OPTIMIZERS:
            points.setdefault(time.optimizer, []).append((float(time.elements), time.seconds))
    return {name: (Curve(found), min(seconds for _, seconds in found)) for name, found in points.items()}
