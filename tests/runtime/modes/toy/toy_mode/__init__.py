"""A mode that another package brings: the job in one process of its own, at a lower priority, whole batches only. Its rules."""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from atoll.cluster import Cluster
from atoll.plan import Plan
from atoll.plan.modes import Failures, ModeRules
from atoll.plan.plan import Mark, Problem

__all__ = ["TOY", "ToyOptions"]

_KEPT = 0.5  # of the time, whatever happens


class ToyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Its flags, and its section of run.json."""

    niceness: Annotated[
        int,
        msgspec.Meta(
            description="How far the process steps back for others.",
            extra={"min": 0, "max": 19, "only": "only the toy's process has a priority of its own"},
        ),
    ] = 1


class Toy(ModeRules):
    """One polite process."""

    name = "toy"
    summary = "one process that steps back for others"
    runtime = "toy_mode.runtime:ToyRuntime"
    options = ToyOptions
    most_devices = 1
    least_gain = 10.0
    limits = "The toy trains on one device. "

    def is_candidate(self, cluster: Cluster) -> bool:
        """Always: it is never taken, as it would have to be ten times as fast."""
        return True

    def problems(self, plan: Plan) -> Iterator[Problem]:
        """A batch is one micro-batch."""
        yield from super().problems(plan)
        if plan.micro_batches > 1:
            yield Problem("the toy takes whole batches; make the micro-batch as large as the batch", Mark("micro_batch"))

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """It is slower than predicted wherever others want the processor."""
        return ("the toy steps back for others: the prediction is of a device of its own",)

    def goodput(self, plan: Plan, failures: Failures) -> float:
        """It wastes half of the time."""
        return _KEPT


TOY = Toy()
