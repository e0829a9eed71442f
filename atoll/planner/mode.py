"""Choice of the execution mode, from how reliable the devices are and how wide the links between sites. Pure; says why.

Lockstep stops when one device does: it loses what was done since the last checkpoint and the time to start again, so its goodput falls with
the number of devices. A swarm loses one replica's work and goes on with the rest, if every stage has replicas on another host; a replica
that spans hosts would die with any of them, so a swarm has none. Islands exchange parameters every so many steps instead of gradients
every step, which changes the numbers, so they are chosen only where the links leave no other way.
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
REPLACEMENT_SECONDS = 600.0  # until a preempted device is back or replaced; meanwhile the others work
REBALANCE_SECONDS = 60.0  # until a swarm's workers have moved to a stage that lost one
CHECKPOINT_SECONDS = 5.0  # what an asynchronous checkpoint holds the step up for
MOST_SECONDS_BETWEEN_CHECKPOINTS = 86400.0
SWARM_OVERHEAD = 0.05  # routing, seals and manifests, against lockstep on the same layout
SWARM_GAIN = 1.05  # how much faster a swarm must be: its overhead is an estimate too
ISLAND_GAIN = 2.0  # how much faster islands must be before they are worth other numbers than one process gives
OUTER_STEPS = (4, 8, 16, 32, 64, 128, 256)


class ModeChoice(NamedTuple):
    """The plan in the mode chosen, and why that mode."""

    plan: Plan
    reason: str


def goodput(mode: Mode, failures_per_hour: float, step_seconds: float, lost: float, lost_of_stage: float = 1.0) -> float:
    """The share of time that ends up in committed steps, where a failure takes the part `lost` of all devices away until they are replaced.

    `lost_of_stage` is the part of its stage, which a swarm lacks until it has rebalanced.
    """
    rate = failures_per_hour / 3600.0
    if mode == "swarm":
        waste = rate * (lost * (step_seconds + REPLACEMENT_SECONDS) + lost_of_stage * REBALANCE_SECONDS)
        return (1.0 - SWARM_OVERHEAD) / (1.0 + waste)
    if rate <= 0:
        return 1.0
    interval = max(step_seconds, min(MOST_SECONDS_BETWEEN_CHECKPOINTS, sqrt(2 * CHECKPOINT_SECONDS / rate)))  # Young's interval
    waste = CHECKPOINT_SECONDS / interval + rate * (interval / 2 + RESTART_SECONDS + lost * REPLACEMENT_SECONDS)
    return 1.0 / (1.0 + waste)


def choose_mode(
    found: Sequence[Found], swarms: Sequence[Found], evaluator: Evaluator, islands: tuple[Plan, float] | None, forced: Mode | None
) -> ModeChoice:
    """The mode and the plan for it: of plans for lockstep and of plans that a swarm can run, best first, and the best plan for islands.

    Where a swarm is asked for, `found` are its plans too, as there are no others.
    """
    surviving = [one for one in swarms if _survives(one.plan, evaluator)] or (list(swarms[:1]) if forced == "swarm" else [])
    swarm = min(surviving, key=lambda one: _effective("swarm", one, evaluator), default=None)
    best = swarm if forced == "swarm" and swarm is not None else found[0]
    failures = _failures(best.plan, evaluator)
    lockstep = _effective("lockstep", _in_lockstep(best, evaluator), evaluator)
    swarm_seconds = _effective("swarm", swarm, evaluator) if swarm is not None else float("inf")
    is_swarm = forced == "swarm" or (forced is None and swarm_seconds * SWARM_GAIN < lockstep)
    exact = swarm_seconds if is_swarm else lockstep
    apart = _effective("islands", Found(islands[1], islands[0]), evaluator) if islands is not None else float("inf")
    if islands is not None and (forced == "islands" or (forced is None and apart * ISLAND_GAIN < exact)):
        said = "asked for" if forced else f"{exact / apart:.1f}× faster than synchronising every step over these links"
        reason = f"islands: {said}; sites exchange every {islands[0].outer_steps} steps, so the numbers are not those of one process"
        return ModeChoice(islands[0], reason)
    beside = _not_islands(exact / apart) if forced is None else ""
    if is_swarm and swarm is not None:
        reason = _swarm_reason(failures, lockstep, swarm_seconds, _survives(swarm.plan, evaluator), forced)
        return ModeChoice(swarm.plan, reason + _not_faster(swarm, swarms[0]) + beside)
    return ModeChoice(best.plan, _lockstep_reason(failures, lockstep, swarm_seconds, forced) + beside)


def _in_lockstep(found: Found, evaluator: Evaluator) -> Found:
    """A plan with what its step would take in lockstep: by what both are where long steps are extrapolated, since leaders' are not."""
    if found.plan.mode == "lockstep":
        return found
    plan = replace(found.plan, mode="lockstep")
    return Found(found.seconds + evaluator.seconds(plan) - evaluator.seconds(found.plan), plan)


def _failures(plan: Plan, evaluator: Evaluator) -> float:
    return sum(evaluator.devices[name].preemptions_per_hour for name in {name for stage in plan.stages for name in stage.devices})


def _effective(mode: Mode, found: Found, evaluator: Evaluator) -> float:
    """The step's seconds, and what failures add to it on average. A failure stops one island, not the others."""
    plan, failures = found.plan, _failures(found.plan, evaluator)
    names = {name for stage in plan.stages for name in stage.devices}
    if mode == "swarm":
        largest = max(stage.lanes * stage.tensor for stage in plan.stages)
        return found.seconds / goodput(mode, failures, found.seconds, largest / len(names), 1 / min(len(s.replicas) for s in plan.stages))
    if mode == "islands":
        failures /= len({evaluator.devices[name].site for name in names})
    return found.seconds / goodput("lockstep", failures, found.seconds, 1 / len(names))


def _survives(plan: Plan, evaluator: Evaluator) -> bool:
    """Whether every replica lives on one host, and every stage on two or more."""
    for stage in plan.stages:
        homes = [{evaluator.devices[name].host for name in replica.devices} for replica in stage.replicas]
        if any(len(home) > 1 for home in homes) or len(set.union(*homes)) < 2:
            return False
    return True


def _swarm_reason(failures: float, lockstep: float, swarm: float, spare: bool, forced: Mode | None) -> str:
    same = " of the same plan" if forced else ""
    steps = f"a lockstep step{same} {format_seconds(lockstep)}, a swarm's {format_seconds(swarm)}"
    reason = f"swarm: {'asked for; ' if forced else ''}{failures:.2g} preemptions an hour would make {steps}"
    if not spare:
        reason += "; a stage on a single host has to be restored from a checkpoint when it dies"
    return reason


def _not_faster(swarm: Found, fastest: Found) -> str:
    """Why a plan that is faster as long as nobody dies is not taken."""
    if fastest.seconds >= 0.99 * swarm.seconds:
        return ""
    share = 1 - fastest.seconds / swarm.seconds
    return f"; a plan whose step is {share:.0%} shorter is not taken, as it has a stage on one host only and would stop when that dies"


def _lockstep_reason(failures: float, lockstep: float, swarm: float, forced: Mode | None) -> str:
    if forced == "lockstep":
        return "lockstep: asked for"
    if failures <= 0:
        return "lockstep: no device it uses is said to be preemptible"
    if swarm == float("inf"):
        return (
            f"lockstep: {failures:.2g} preemptions an hour, but no plan found has every stage on two hosts, whole on each, as a swarm needs"
        )
    steps = f"its step is {format_seconds(lockstep)}, a swarm's {format_seconds(swarm)}"
    return f"lockstep: at {failures:.2g} preemptions an hour {steps}; a swarm has to be {SWARM_GAIN - 1:.0%} faster to be worth it"


def _not_islands(gain: float) -> str:
    """Why islands that would be faster are not taken."""
    if gain < 1.05:
        return ""
    why_not = f"but do not compute what one process would (taken from {ISLAND_GAIN:.0f}×, or if asked for)"
    return f"; islands would be {gain:.2g}× as fast, {why_not}"


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
