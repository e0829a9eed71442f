"""What an optimizer costs: the state it keeps for a parameter and the memory traffic of updating it."""

from typing import NamedTuple

from atoll.errors import PlanError

__all__ = ["OPTIMIZERS", "OptimizerCost", "optimizer_cost"]


class OptimizerCost(NamedTuple):
    """Bytes of state an optimizer keeps for a parameter, and bytes it reads and writes to update it."""

    state_bytes: float
    update_bytes: float


OPTIMIZERS = {
    "sgd": OptimizerCost(0, 12),
    "momentum": OptimizerCost(4, 20),
    "adam": OptimizerCost(8, 28),
    "adamw": OptimizerCost(8, 28),
    "adagrad": OptimizerCost(4, 20),
    "rmsprop": OptimizerCost(4, 20),
    "adafactor": OptimizerCost(0.1, 20),
    "lion": OptimizerCost(4, 20),
}


def optimizer_cost(name: str) -> OptimizerCost:
    """What an optimizer costs, by its class's name in any case."""
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise PlanError(f"optimizer {name!r}: unknown to the cost model; it knows {', '.join(OPTIMIZERS)}") from None
