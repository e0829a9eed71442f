"""Choice of the execution mode, from how reliable the devices are and how wide the links between sites. Pure; says why.

Lockstep stops when one device does: it loses what was done since the last checkpoint and the time to start again, so its goodput falls with
the number of devices. A swarm loses one replica's work and goes on with the rest. Islands exchange parameters every so many steps instead
of gradients every step, which changes the numbers, so they are chosen only where the links leave no other way.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.plan import Mode, Plan
from atoll.planner.search import Found
from atoll.units import format_seconds

__all__ = ["ModeChoice", "choose_mode", "goodput", "island_plan"]

RESTART_SECONDS = 120.0  # noticing a death, rendezvous, loading the checkpoint
REPLACEMENT_SECONDS = 600.0  # until a preempted device is back or replaced
CHECKPOINT_SECONDS = 5.0  # what an asynchronous checkpoint holds the step up for
MOST_SECONDS_BETWEEN_CHECKPOINTS = 86400.0
SWARM_OVERHEAD = 0.05  # routing, seals and manifests, against lockstep on the same layout
ISLAND_GAIN = 2.0  # how much faster islands must be before they are worth other numbers than one process gives
OUTER_STEPS = (4, 8, 16, 32, 64, 128, 256)


class ModeChoice(NamedTuple):
    """The plan in the mode chosen, and why that mode."""

    plan: Plan
    reason: str


def goodput(mode: Mode, failures_per_hour: float, step_seconds: float, devices: int) -> float:
    """The share of time that ends up in committed steps."""
    rate = failures_per_hour / 3600.0
    if rate <= 0:
        return 1.0 if mode != "swarm" else 1.0 - SWARM_OVERHEAD
    if mode == "swarm":
        lost = rate * (step_seconds / max(1, devices) + REPLACEMENT_SECONDS / max(1, devices))
        return max(0.0, (1.0 - SWARM_OVERHEAD) / (1.0 + lost))
    interval = max(step_seconds, min(MOST_SECONDS_BETWEEN_CHECKPOINTS, sqrt(2 * CHECKPOINT_SECONDS / rate)))  # Young's interval
    lost = CHECKPOINT_SECONDS / interval + rate * (interval / 2 + RESTART_SECONDS)
    return 1.0 / (1.0 + lost)


def choose_mode(found: Sequence[Found], evaluator: Evaluator, islands: tuple[Plan, float] | None, forced: Mode | None) -> ModeChoice:
    """The mode and the plan for it: of the plans found, best first, and the best plan for islands if there is one."""
    best = found[0]
    failures = _failures(best.plan, evaluator)
    lockstep = best.seconds / _goodput_of("lockstep", best, evaluator)
    alive = [one for one in found if all(len(stage.replicas) > 1 for stage in one.plan.stages)] or ([best] if forced == "swarm" else [])
    swarm = min(alive, key=lambda one: one.seconds / _goodput_of("swarm", one, evaluator), default=None)
    swarm_seconds = swarm.seconds / _goodput_of("swarm", swarm, evaluator) if swarm is not None else float("inf")
    if swarm is not None and (forced == "swarm" or (forced is None and swarm_seconds < 0.95 * lockstep)):
        spare = all(len(stage.replicas) > 1 for stage in swarm.plan.stages)
        reason = _swarm_reason(failures, lockstep, swarm_seconds, spare, forced)
        return ModeChoice(replace(swarm.plan, mode="swarm"), reason)
    if islands is not None and (forced == "islands" or (forced is None and islands[1] * ISLAND_GAIN < lockstep)):
        said = "asked for" if forced else f"{lockstep / islands[1]:.1f}× faster than synchronising every step over these links"
        reason = f"islands: {said}; sites exchange every {islands[0].outer_steps} steps, so the numbers are not those of one process"
        return ModeChoice(islands[0], reason)
    return ModeChoice(best.plan, _lockstep_reason(failures, lockstep, swarm_seconds, forced))


def _failures(plan: Plan, evaluator: Evaluator) -> float:
    return sum(evaluator.devices[name].preemptions_per_hour for name in {name for stage in plan.stages for name in stage.devices})


def _goodput_of(mode: Mode, found: Found, evaluator: Evaluator) -> float:
    devices = len({name for stage in found.plan.stages for name in stage.devices})
    return goodput(mode, _failures(found.plan, evaluator), found.seconds, devices)


def _swarm_reason(failures: float, lockstep: float, swarm: float, spare: bool, forced: Mode | None) -> str:
    steps = f"a lockstep step {format_seconds(lockstep)}, a swarm's {format_seconds(swarm)}"
    reason = f"swarm: {failures:.2g} preemptions an hour would make {steps}"
    if forced and not spare:
        reason += "; a stage with a single replica has to be restored from a checkpoint when it dies"
    return reason


def _lockstep_reason(failures: float, lockstep: float, swarm: float, forced: Mode | None) -> str:
    if forced == "lockstep":
        return "lockstep: asked for"
    if failures <= 0:
        return "lockstep: no device is said to be preemptible"
    if swarm == float("inf"):
        return f"lockstep: {failures:.2g} preemptions an hour, but no plan found has two replicas of every stage, as a swarm needs"
    steps = f"its step is {format_seconds(lockstep)}, a swarm's {format_seconds(swarm)}"
    return f"lockstep: at {failures:.2g} preemptions an hour {steps}; a swarm has to be 5% faster to be worth it"


def island_plan(plan: Plan, evaluator: Evaluator) -> tuple[Plan, float]:
    """A plan for islands that exchange no oftener than it takes for the links to cost under a tenth of the step."""
    alone = evaluator.seconds(replace(plan, outer_steps=10**9))
    seconds = 0.0
    for steps in OUTER_STEPS:
        plan = replace(plan, outer_steps=steps)
        seconds = evaluator.seconds(plan)
        if seconds <= 1.1 * alone:
            break
    return plan, seconds
