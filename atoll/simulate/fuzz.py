"""Fuzz: many random fault schedules, each from a seed, each checked; a seed that fails is replayed and shrunk to the shortest that fails.

python -m atoll.simulate.fuzz --seeds 2000 --start 0 --json [--stop-at-first]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from atoll.control.journal import replay
from atoll.events import Observer
from atoll.simulate.faults import Scenario, draw_scenario, schedule
from atoll.simulate.swarm import ExactSwarm, SwarmRoles

__all__ = ["Pulse", "fuzz", "main", "run_scenario", "shrink_scenario"]

SECONDS = 5.0


class Pulse:
    """Called as often as one likes; says something at most every `seconds`. Answers stay alone on standard output."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._began = self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        """What is being done, if it is time to say so."""
        now = time.monotonic()
        if now - self._said >= self._seconds:
            self._said = now
            print(text, file=sys.stderr, flush=True)

    def count(self, what: str, done: int, total: int) -> None:
        """So many of so many, and how long the rest will take at this rate."""
        left = (time.monotonic() - self._began) / max(done, 1) * (total - done)
        self(f"{what}: {done:,} of {total:,}, about {_clock(left)} left")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def shrink_scenario(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leaves out faults, then kinds of bad network, then hosting, feeders and workers, as long as the scenario still fails."""
    shorter = True
    while shorter:
        shorter = False
        for candidate in _shorter(scenario):
            if fails(candidate):
                scenario, shorter = candidate, True
                break
    return scenario


def _shorter(scenario: Scenario) -> list[Scenario]:
    faults, shape = scenario.faults, scenario.shape
    found = [msgspec.structs.replace(scenario, faults=faults[:index] + faults[index + 1 :]) for index in range(len(faults))]
    for name in ("duplicate", "reorder", "delay", "corrupt", "state_seconds", "stop_at"):
        if getattr(scenario, name):
            found += [msgspec.structs.replace(scenario, **{name: 0.0})]
    if shape.hosting and shape.workers >= shape.stages:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, hosting=())))
    if shape.feeders > 1:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, feeders=shape.feeders - 1)))
    if shape.workers > shape.stages:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, workers=shape.workers - 1)))
    if shape.micro_batches > 1:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, micro_batches=shape.micro_batches - 1)))
    return found


COMMITS_AFTER_HEALING = 2
PATIENCE_AFTER_HEALING = 600.0


class ScenarioOutcome(msgspec.Struct, frozen=True):
    """What one scenario led to."""

    seed: int
    violations: tuple[str, ...]
    commits: int
    rollbacks: int
    events: int
    virtual_seconds: float


def run_scenario(scenario: Scenario, roles: SwarmRoles | None = None, observe: Observer = lambda event: None) -> ScenarioOutcome:
    """Runs a scenario until two commits follow the healing or the run is stopped, or something is wrong.

    The same scenario gives the same outcome.
    """
    swarm = ExactSwarm(scenario.shape, scenario.seed, roles=roles, observe=observe)
    checker = swarm.checker
    schedule(swarm, scenario)
    swarm.start_all()
    if scenario.stop_at:
        _run_to_its_end(swarm, scenario.heal_at + PATIENCE_AFTER_HEALING)
    else:
        _run_past_healing(swarm, scenario.heal_at)
    if not checker.violations:
        checker.at_the_end()
    violations = tuple(checker.violations)
    return ScenarioOutcome(scenario.seed, violations, checker.commits, checker.rollbacks, swarm.loop.events, swarm.loop.now)


def _run_past_healing(swarm: ExactSwarm, heal_at: float) -> None:
    checker = swarm.checker
    swarm.run(heal_at)
    if checker.violations:
        return
    enough = checker.commits + COMMITS_AFTER_HEALING
    swarm.run(heal_at + PATIENCE_AFTER_HEALING, lambda: checker.commits >= enough)
    if not checker.violations and checker.commits < enough:
        checker.wrong(f"only {checker.commits - enough + COMMITS_AFTER_HEALING} commits follow the healing")


def _run_to_its_end(swarm: ExactSwarm, until: float) -> None:
    """A run that is asked to stop ends, by the word of whoever coordinates last, with the state of its last commit stored."""
    swarm.run(until, swarm.ended)
    if swarm.checker.violations:
        return
    history = replay(swarm.journal_disk.records)
    if not swarm.ended():
        swarm.checker.wrong("it does not stop")
    elif not history.stored:
        swarm.checker.wrong(f"it stopped at version {history.version}, which is not stored")


def fuzz(seeds: Sequence[int], roles: SwarmRoles | None = None, stop_at_first: bool = False) -> list[ScenarioOutcome]:
    """The outcomes of many seeds; where that takes long, how far it is and what was found is said meanwhile."""
    outcomes = []
    pulse = Pulse()
    for count, seed in enumerate(seeds, 1):
        outcomes.append(run_scenario(draw_scenario(seed), roles))
        if outcomes[-1].violations:
            print(f"seed {seed}: {outcomes[-1].violations[0]}", file=sys.stderr, flush=True)
            if stop_at_first:
                break
        pulse.count("seeds", count, len(seeds))
    return outcomes


def summary(outcomes: Sequence[ScenarioOutcome], seconds: float, roles: SwarmRoles | None = None) -> dict[str, object]:
    """Counts, and the failing seeds; the first of them with its shortest schedule."""
    failing = [outcome for outcome in outcomes if outcome.violations]
    found: dict[str, object] = {
        "seeds": len(outcomes),
        "violations": len(failing),
        "commits": sum(outcome.commits for outcome in outcomes),
        "rollbacks": sum(outcome.rollbacks for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "seconds": round(seconds, 2),
        "events_per_second": round(sum(outcome.events for outcome in outcomes) / max(seconds, 1e-9)),
        "failing": [{"seed": outcome.seed, "violation": outcome.violations[0]} for outcome in failing[:20]],
    }
    if failing:
        shortest = shrink_scenario(draw_scenario(failing[0].seed), lambda scenario: bool(run_scenario(scenario, roles).violations))
        found["shortest"] = {"scenario": msgspec.to_builtins(shortest), "violations": run_scenario(shortest, roles).violations}
    return found


def main(arguments: Sequence[str] | None = None, roles: SwarmRoles | None = None) -> int:
    """Exit code 0: no violation; 1: there were some; 2: wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m atoll.simulate.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON (default: lines for people)")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first violation (default: run all seeds)")
    parser.add_argument("--verbose", action="store_true", help="print what the coordinator says of each seed (default: only counts)")
    options = parser.parse_args(arguments)
    seeds = range(options.start, options.start + options.seeds)
    if options.verbose:
        for seed in seeds:
            print(draw_scenario(seed))
            print(run_scenario(draw_scenario(seed), roles, print))
        return 0
    began = time.perf_counter()
    outcomes = fuzz(seeds, roles, options.stop_at_first)
    found = summary(outcomes, time.perf_counter() - began, roles)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 1 if found["violations"] else 0


def _print(found: dict[str, object]) -> None:
    print(", ".join(f"{name} {value}" for name, value in found.items() if name not in ("failing", "shortest")))
    failing = found["failing"]
    assert isinstance(failing, list)
    for row in failing:
        print(f"  seed {row['seed']}: {row['violation']}")
    shortest = found.get("shortest")
    if isinstance(shortest, dict):
        print("The first, shortened:")
        for name, value in shortest["scenario"].items():
            print(f"  {name}: {value}")
        print(f"  {shortest['violations'][0]}")


if __name__ == "__main__":
    sys.exit(main())
