"""What staleness would bring a plan: the step and the memory, with it and without. Whether it is worth other numbers, the user decides."""

from typing import NamedTuple

from msgspec.structs import replace

from atoll.cost.evaluate import Evaluator
from atoll.plan import Plan
from atoll.units import format_bytes, format_seconds

__all__ = ["StalenessEffect", "staleness_effect"]


class StalenessEffect(NamedTuple):
    """A swarm's plan with staleness=1, against the same without. It prints as a part of a sentence."""

    without_seconds: float
    with_seconds: float
    more_bytes: float  # on the device that needs most of them
    lacking_bytes: float  # of the device that has least room; 0 where all have enough

    @property
    def gain(self) -> float:
        """How many times as fast steps are."""
        return self.without_seconds / self.with_seconds

    def __str__(self) -> str:
        gain = f"{self.gain:.2f}× as fast" if self.gain > 1.005 else "nothing is gained by it here"
        step = f"{format_seconds(self.with_seconds)} a step instead of {format_seconds(self.without_seconds)}, {gain}"
        lack = f", of which one lacks {format_bytes(self.lacking_bytes)}" if self.lacking_bytes else ""
        return f"{step}, for up to {format_bytes(self.more_bytes)} more memory a device{lack}; gradients are of the weights one step before"


def staleness_effect(evaluator: Evaluator, plan: Plan) -> StalenessEffect:
    """For a plan of a swarm, whatever staleness it has."""
    without, with_it = (evaluator.cost(replace(plan, mode="swarm", staleness=staleness)) for staleness in (0, 1))
    more = max(use.total_bytes - without.memory[name].total_bytes for name, use in with_it.memory.items())
    return StalenessEffect(without.step_seconds, with_it.step_seconds, more, max(with_it.over_memory.values(), default=0.0))
