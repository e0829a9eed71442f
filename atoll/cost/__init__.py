"""Cost: step time, memory, traffic and money of any plan, predicted."""

from atoll.cost.calibration import Calibration, LayerTime, calibration_names, load_calibration, meaning, named_calibration
from atoll.cost.context import OPTIMIZERS
from atoll.cost.cost import Cost, MemoryUse, StageCost
from atoll.cost.evaluate import Evaluator, StalenessEffect, cost, staleness_effect
from atoll.cost.layer_times import LayerTimes, read_layer_times

__all__ = [
    "OPTIMIZERS",
    "Calibration",
    "Cost",
    "Evaluator",
    "LayerTime",
    "LayerTimes",
    "MemoryUse",
    "StageCost",
    "StalenessEffect",
    "calibration_names",
    "cost",
    "load_calibration",
    "meaning",
    "named_calibration",
    "read_layer_times",
    "staleness_effect",
]
