"""Lockstep: synchronous training in process groups; any parallelism inside stages, any schedule. It is what the defaults describe."""

from atoll.plan.division import has_empty_lane
from atoll.plan.modes.rules import ModeRules
from atoll.plan.plan import Plan

__all__ = ["LOCKSTEP", "Lockstep"]


class Lockstep(ModeRules):
    """For reliable devices."""

    name = "lockstep"
    summary = "synchronous, in process groups: for devices that stay"
    runtime = "atoll.runtime.modes.lockstep.runtime:LockstepRuntime"
    runs_loops = True

    def runs_as_priced(self, plan: Plan) -> bool:
        """Lanes exchange tensors, so each needs a sample of every micro-batch."""
        return not has_empty_lane(plan) and super().runs_as_priced(plan)


LOCKSTEP = Lockstep()
