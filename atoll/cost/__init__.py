"""Cost: step time, memory, traffic and money of any plan, predicted."""

from atoll.cost.calibration import Calibration, LayerTime, calibration_names, load_calibration, meaning, named_calibration
from atoll.cost.context import OPTIMIZERS
from atoll.cost.evaluate import Cost, Evaluator, cost, staleness_effect

__all__ = [
    "OPTIMIZERS",
    "Calibration",
    "Cost",
    "Evaluator",
    "LayerTime",
    "calibration_names",
    "cost",
    "load_calibration",
    "meaning",
    "named_calibration",
    "staleness_effect",
]
