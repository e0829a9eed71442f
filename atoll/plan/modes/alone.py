"""Alone: the job in one process on one device, uncut — the reference every other mode is compared with."""

from collections.abc import Iterator

from atoll.plan.modes.rules import ModeRules
from atoll.plan.plan import Mark, Plan, Problem

__all__ = ["ALONE", "Alone"]


class Alone(ModeRules):
    """One process, one device, no cut."""

    name = "alone"
    summary = "one process on one device, uncut: the reference for every plan"
    runtime = "atoll.runtime.modes.alone.runtime:AloneRuntime"
    needs_devices = False
    runs_loops = True
    most_devices = 1
    schedules = ("1f1b",)
    limits = "Mode alone trains on one device. "

    def problems(self, plan: Plan) -> Iterator[Problem]:
        """What is in a plan beside one stage on one device, whole."""
        if len(plan.stages) > 1:
            yield Problem("mode alone runs the model uncut, the plan has several stages", Mark("layers", 1))
        yield from super().problems(plan)


ALONE = Alone()
