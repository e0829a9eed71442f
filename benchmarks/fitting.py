"""Fitting the constants of the cost model to measured steps: robust to a stray row, held near what is physically known.

Predictions are nearly linear in the logarithms of the constants, so a fit is a few rounds of: take the slopes of every row at the present
constants, solve the robust problem on those slopes, move there. All fits begin at what is expected of the constants, so that a part that
is left out has had no say, and they share the slopes of the first round.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from megatron import Run
from numpy.typing import NDArray
from scipy.optimize import least_squares

from atoll.cost import Calibration

__all__ = ["FITTED", "Constant", "Fitting", "mean_error", "measured", "predict", "regret"]

Array = NDArray[np.float64]


class Constant(NamedTuple):
    """A constant that is fitted: what is expected of it, how far it may go, and how freely (a factor of e^spread is one deviation)."""

    name: str
    expected: float
    least: float
    most: float
    spread: float


# expected: large cuBLAS matmuls, STREAM-like kernels and NCCL on 8 A100 reach about so much; a wave is 108 units × 128×256 outputs
FITTED = (
    Constant("matmul_efficiency", 0.75, 0.5, 0.95, 0.15),
    Constant("matmul_half_depth", 96.0, 16.0, 400.0, 0.5),
    Constant("wave_outputs", 1.3e-7, 1e-8, 1e-6, 0.5),
    Constant("memory_efficiency", 0.80, 0.4, 0.95, 0.12),
    Constant("host_link_efficiency", 0.76, 0.4, 1.0, 0.1),
    Constant("network_efficiency", 0.70, 0.1, 1.0, 0.5),
    Constant("straggler_seconds", 0.05, 0.002, 0.3, 0.7),
)
ROBUST_FROM = 0.04  # errors beyond this count by their size, not its square
PRIOR_WEIGHT = 0.5  # of one deviation from what is expected, against one row that is off by ROBUST_FROM
ROUNDS = 3
LONGEST_MOVE = 0.7  # of a constant's logarithm in one round: slopes are true only nearby
_EXPECTED, _LEAST, _MOST = (np.log([constant[i] for constant in FITTED]) for i in (1, 2, 3))
_SPREAD = np.array([constant.spread for constant in FITTED])


class Slopes(NamedTuple):
    """Logarithms of predicted seconds, and their derivatives by the logarithms of the constants, at one point."""

    at: Array
    values: Array  # by row
    slopes: Array  # by row and constant


class Fitting:
    """Fits to any part of the runs."""

    def __init__(self, runs: Sequence[Run], fixed: Calibration) -> None:
        """Constants that are not fitted are those of `fixed`."""
        self._runs = list(runs)
        self._fixed = fixed
        self._target = np.log(measured(runs))
        self._first = self._slopes(_EXPECTED, range(len(self._runs)))

    def fit(self, rows: Sequence[int]) -> Calibration:
        """The constants that explain these rows best."""
        picked = list(rows)
        near = self._first._replace(values=self._first.values[picked], slopes=self._first.slopes[picked])
        point = self._solve(near, self._target[picked])
        for _ in range(ROUNDS - 1):
            near = self._slopes(point, picked)
            point = self._solve(near, self._target[picked])
        return self._calibration(point)

    def left_out(self, parts: Sequence[Sequence[int]]) -> Array:
        """Each run as predicted by constants fitted without the part it belongs to."""
        predicted = np.full(len(self._runs), np.nan)
        for part in parts:
            rest = sorted(set(range(len(self._runs))) - set(part))
            predicted[list(part)] = predict([self._runs[i] for i in part], self.fit(rest))
        return predicted

    def _slopes(self, at: Array, rows: Sequence[int]) -> Slopes:
        runs = [self._runs[i] for i in rows]
        values = np.log(predict(runs, self._calibration(at)))
        step = 1e-3
        columns = [(np.log(predict(runs, self._calibration(at + step * unit))) - values) / step for unit in np.eye(len(FITTED))]
        return Slopes(at, values, np.stack(columns, axis=1))

    def _solve(self, near: Slopes, target: Array) -> Array:
        def residuals(point: Array) -> Array:
            errors = (near.values + near.slopes @ (point - near.at) - target) / ROBUST_FROM
            robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
            return np.concatenate([robust, PRIOR_WEIGHT * (point - _EXPECTED) / _SPREAD])

        bounds = np.maximum(_LEAST, near.at - LONGEST_MOVE), np.minimum(_MOST, near.at + LONGEST_MOVE)
        point: Array = least_squares(residuals, np.clip(near.at, *bounds), bounds=bounds).x
        return point

    def _calibration(self, logs: Array) -> Calibration:
        values = {constant.name: float(value) for constant, value in zip(FITTED, np.exp(logs), strict=True)}
        return msgspec.structs.replace(self._fixed, **values)


def predict(runs: Sequence[Run], calibration: Calibration) -> Array:
    """Seconds of every run."""
    return np.array([run.predict(calibration) for run in runs])


def measured(runs: Sequence[Run]) -> Array:
    """Seconds of every run, as measured."""
    return np.array([run.row.seconds for run in runs])


def mean_error(runs: Sequence[Run], predicted: Array) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted / measured(runs) - 1)))


def regret(runs: Sequence[Run], predicted: Array) -> dict[str, float]:
    """By model, device count and batch: how much slower the run that would be chosen is than the best measured."""
    batches: dict[tuple[object, ...], list[int]] = {}
    for i, run in enumerate(runs):
        row = run.row
        batches.setdefault((row.billions, row.layers, row.hidden_size, row.num_gpus, row.global_batch, row.seq_len), []).append(i)
    found = {}
    for key, members in batches.items():
        if len(members) > 1:
            chosen = min(members, key=lambda i: predicted[i])
            best = min(runs[i].row.seconds for i in members)
            found[f"{key[0]}B ({key[1]} layers of {key[2]}) on {key[3]}, batch {key[4]}"] = runs[chosen].row.seconds / best - 1
    return found
