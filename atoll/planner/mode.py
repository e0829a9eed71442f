"""Choice of the execution mode, from what each keeps when devices are taken away. Pure; says why.

Every mode's rules say what share of the time ends up in committed steps (`ModeRules.goodput`). The default mode is taken unless a plan of
another is faster with that accounted for, by at least what the other asks for. A mode that goes on when a host dies does so only if every
stage is on several hosts, so of its plans only such are chosen, unless it was asked for and there are none.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from atoll.cost import Evaluator
from atoll.plan import Plan
from atoll.plan.modes import Failures, ModeRules, default_rules, installed_modes, mode_rules
from atoll.planner.search import Found
from atoll.units import format_seconds

__all__ = ["ModeChoice", "choose_mode"]


class ModeChoice(NamedTuple):
    """The plan in the mode chosen, and why that mode."""

    plan: Plan
    reason: str


class _Candidate(NamedTuple):
    """The best plan of a mode, and its step's seconds with what failures add to it on average."""

    rules: ModeRules
    found: Found
    seconds: float


def choose_mode(
    found: Sequence[Found], rivals: Sequence[tuple[ModeRules, Sequence[Found]]], evaluator: Evaluator, *, asked: bool
) -> ModeChoice:
    """The mode and the plan for it: of plans of the mode asked for, or the default one, and of plans of its rivals, all best first."""
    rules = mode_rules(found[0].plan.mode)
    own = _best(rules, found, evaluator) or _Candidate(rules, found[0], _effective(rules, found[0], evaluator))
    if asked:
        return ModeChoice(own.found.plan, _asked_for(own, evaluator) + _not_faster(own, found[0]))
    others = [(best, plans[0]) for rival, plans in rivals if (best := _best(rival, plans, evaluator)) is not None]
    better = [(best, fastest) for best, fastest in others if best.seconds * best.rules.least_gain < own.seconds]
    if not better:
        return ModeChoice(own.found.plan, _why_not_others(own, [best for best, _ in others], evaluator))
    best, fastest = min(better, key=lambda one: one[0].seconds)
    return ModeChoice(best.found.plan, f"{best.rules.name}: {_steps(best, own.rules, own.seconds, evaluator)}" + _not_faster(best, fastest))


def _best(rules: ModeRules, found: Sequence[Found], evaluator: Evaluator) -> _Candidate | None:
    """The fastest plan; where a mode is meant to survive, the best of those that do."""
    if rules.hosts_per_stage == 1:
        found = found[:1]
    candidates = [_Candidate(rules, one, _effective(rules, one, evaluator)) for one in found if rules.survives(one.plan)]
    return min(candidates, key=lambda one: one.seconds, default=None)


def _failures(plan: Plan, evaluator: Evaluator) -> float:
    return sum(evaluator.devices[name].preemptions_per_hour for name in {name for stage in plan.stages for name in stage.devices})


def _effective(rules: ModeRules, found: Found, evaluator: Evaluator) -> float:
    """The step's seconds, and what failures add to it on average."""
    return found.seconds / rules.goodput(found.plan, Failures(_failures(found.plan, evaluator), found.seconds))


def _in_mode(rules: ModeRules, found: Found, evaluator: Evaluator) -> Found:
    """A plan with what its step would take in another mode: by what both are where long steps are extrapolated, since leaders' are not."""
    plan = replace(found.plan, mode=rules.name)
    return Found(found.seconds + evaluator.seconds(plan) - evaluator.seconds(found.plan), plan)


def _asked_for(own: _Candidate, evaluator: Evaluator) -> str:
    """For a mode that is meant to survive: with what it brings, against the same plan in the default mode."""
    name, default = own.rules.name, default_rules()
    if own.rules.hosts_per_stage == 1:
        return f"{name}: asked for"
    other = _effective(default, _in_mode(default, own.found, evaluator), evaluator)
    reason = f"{name}: asked for; {_steps(own, default, other, evaluator)}, by the same plan"
    if not own.rules.survives(own.found.plan):
        reason += "; a stage on a single host has to be restored from a checkpoint when it dies"
    return reason


def _steps(one: _Candidate, other: ModeRules, seconds: float, evaluator: Evaluator) -> str:
    rate = _failures(one.found.plan, evaluator)
    both = f"{format_seconds(one.seconds)} in {one.rules.name} mode and {format_seconds(seconds)} in {other.name} mode"
    return f"at {rate:.2g} preemptions an hour a step takes {both}"


def _why_not_others(own: _Candidate, others: Sequence[_Candidate], evaluator: Evaluator) -> str:
    name, rate = own.rules.name, _failures(own.found.plan, evaluator)
    if rate <= 0:
        return f"{name}: no device it uses is said to be preemptible"
    if not others:
        surviving = [rules for rules in installed_modes() if rules.hosts_per_stage > 1]
        needs = " or ".join(f"{rules.hosts_per_stage} hosts, as {rules.name} mode needs" for rules in surviving)
        return f"{name}: {rate:.2g} preemptions an hour" + (f", but no plan found has every stage on {needs}" if surviving else "")
    best = min(others, key=lambda one: one.seconds)
    gain = f"that has to be {best.rules.least_gain - 1:.0%} faster to be worth it"
    return f"{name}: {_steps(own, best.rules, best.seconds, evaluator)}; {gain}"


def _not_faster(best: _Candidate, fastest: Found) -> str:
    """Why a plan that is faster as long as nobody dies is not taken."""
    if fastest.seconds >= 0.99 * best.found.seconds:
        return ""
    share = 1 - fastest.seconds / best.found.seconds
    return f"; a plan whose step is {share:.0%} shorter is not taken, as it has a stage on one host only and would stop when that dies"
