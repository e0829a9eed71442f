"""Fuzz of rounds: many random fault schedules, each from a seed, each checked; a seed that fails is replayed and shrunk.

python -m atoll.simulate.rounds.fuzz --seeds 2000 --start 0 --json [--stop-at-first]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from atoll.simulate.fuzz import Pulse
from atoll.simulate.rounds.faults import HEAL_AT, RoundScenario, draw_round_scenario, schedule_round_faults
from atoll.simulate.rounds.world import RoundRoles, SitesWorld

__all__ = ["RoundOutcome", "fuzz_rounds", "main", "run_round_scenario", "shrink_round_scenario"]

PATIENCE = 400.0
ROUNDS_AFTER_HEALING = 2


class RoundOutcome(msgspec.Struct, frozen=True):
    """What one scenario led to."""

    seed: int
    violations: tuple[str, ...]
    commits: int
    rollbacks: int
    events: int
    virtual_seconds: float


def run_round_scenario(scenario: RoundScenario, roles: RoundRoles | None = None) -> RoundOutcome:
    """Runs a scenario until rounds that name every site follow the healing, or something is wrong. The same one gives the same outcome."""
    world = SitesWorld(scenario.size, scenario.seed, roles)
    checker = world.checker
    schedule_round_faults(world, scenario)
    world.start_all()
    world.run(HEAL_AT)
    before = len(checker.named_sites)
    everybody = frozenset(world.sites())

    def recovered() -> bool:
        after = checker.named_sites[before:]
        return len(after) >= ROUNDS_AFTER_HEALING and frozenset().union(*after) == everybody

    world.run(HEAL_AT + PATIENCE, recovered)
    if not checker.violations and not recovered():
        named = sorted(frozenset().union(*checker.named_sites[before:]))
        checker.wrong(f"{len(checker.named_sites) - before} rounds in {PATIENCE:.0f} s after all was healed, which name {named}")
    if not checker.violations:
        checker.at_the_end()
    return RoundOutcome(scenario.seed, tuple(checker.violations), checker.commits, checker.rollbacks, world.loop.events, world.loop.now)


def shrink_round_scenario(scenario: RoundScenario, fails: Callable[[RoundScenario], bool]) -> RoundScenario:
    """Leaves out faults, then a bad network, then sites and processes, as long as the scenario still fails."""
    shorter = True
    while shorter:
        shorter = False
        for candidate in _shorter(scenario):
            if fails(candidate):
                scenario, shorter = candidate, True
                break
    return scenario


def _shorter(scenario: RoundScenario) -> list[RoundScenario]:
    replace, faults, size = msgspec.structs.replace, scenario.faults, scenario.size
    found = [replace(scenario, faults=faults[:index] + faults[index + 1 :]) for index in range(len(faults))]
    for index, each in enumerate(scenario.network):
        if each:
            found.append(replace(scenario, network=(*scenario.network[:index], 0.0, *scenario.network[index + 1 :])))
    if size.late:
        found.append(replace(scenario, size=replace(size, late=())))
    return found


def fuzz_rounds(seeds: Sequence[int], roles: RoundRoles | None = None, stop_at_first: bool = False) -> list[RoundOutcome]:
    """The outcomes of many seeds; where that takes long, how far it is and what was found is said meanwhile."""
    outcomes = []
    pulse = Pulse()
    for count, seed in enumerate(seeds, 1):
        outcomes.append(run_round_scenario(draw_round_scenario(seed), roles))
        if outcomes[-1].violations:
            print(f"seed {seed}: {outcomes[-1].violations[0]}", file=sys.stderr, flush=True)
            if stop_at_first:
                break
        pulse.count("seeds", count, len(seeds))
    return outcomes


def main(arguments: Sequence[str] | None = None, roles: RoundRoles | None = None) -> int:
    """Exit code 0: no violation; 1: there were some; 2: wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulate.rounds.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON (default: lines for people)")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first violation (default: run all seeds)")
    options = parser.parse_args(arguments)
    began = time.process_time()
    outcomes = fuzz_rounds(range(options.start, options.start + options.seeds), roles, options.stop_at_first)
    failing = [outcome for outcome in outcomes if outcome.violations]
    found: dict[str, object] = {
        "seeds": len(outcomes),
        "violations": len(failing),
        "rounds": sum(outcome.commits for outcome in outcomes),
        "rollbacks": sum(outcome.rollbacks for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "processor_seconds": round(time.process_time() - began, 2),
    }
    if failing:
        first = draw_round_scenario(failing[0].seed)
        shortest = shrink_round_scenario(first, lambda scenario: bool(run_round_scenario(scenario, roles).violations))
        found["failing"] = [{"seed": outcome.seed, "violation": outcome.violations[0]} for outcome in failing[:20]]
        found["shortest"] = {"scenario": msgspec.to_builtins(shortest), "violations": run_round_scenario(shortest, roles).violations}
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
