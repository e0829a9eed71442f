"""Cost: step time, memory, traffic and money of any plan, predicted."""

from atoll.cost.calibration import Calibration, LayerTime, load_calibration
from atoll.cost.cost import Cost, MemoryUse, StageCost
from atoll.cost.evaluate import Evaluator, cost
from atoll.cost.optimizer import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Calibration", "Cost", "Evaluator", "LayerTime", "MemoryUse", "StageCost", "cost", "load_calibration"]
