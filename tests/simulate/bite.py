"""Bite: takes every guard away, one after another, and counts the seeds until the checker notices.

    python -m tests.simulate.bite [--only freeze] [--start 0] [--factor 3] [--json]

A checker that finds nothing proves nothing until it is seen to find what is there.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import msgspec

from atoll.simulate.faults import draw_scenario
from atoll.simulate.fuzz import Pulse, run_scenario
from tests.simulate.faulty import FAULTY, without

__all__ = ["EXPECTED_SEEDS", "Bite", "main", "seeds_until_caught"]

EXPECTED_SEEDS = {
    "completeness": 17,
    "once": 19,
    "duplicate-filter": 20,
    "message-order": 21,
    "disjointness": 21,
    "atomic-manifest": 40,
    "out-of-place": 79,
    "journal-fence": 130,
    "token": 143,
    "all-stages": 171,
    "round-digest": 171,
    "checkpoint-version": 208,
    "stage": 265,
    "version": 357,
    "journal-first": 360,
    "fetch-version": 378,
    "term-digest": 400,
    "freeze": 441,
    "round-match": 625,
    "clear": 649,
    "incarnation": 1000,
    "epoch": 1000,
    "same-weights": 10,
    "survived": 400,
    "set-aside": 10,
}
"""Seeds within which an earlier simulation of the protocol noticed; incarnation and epoch are rare and have directed tests. The last three
are of staleness, which it did not have."""


class Bite(msgspec.Struct, frozen=True):
    """After how many seeds a check that was off was noticed, and by what; None: not at all."""

    check: str
    seeds: int | None
    violation: str


def seeds_until_caught(check: str, start: int, most: int) -> Bite:
    """Runs seeds without the check until something is wrong."""
    roles = without(check)
    pulse = Pulse()
    for count in range(most):
        pulse(f"without {check}: {count:,} seeds, nothing noticed yet; at most {most:,}")
        violations = run_scenario(draw_scenario(start + count), roles).violations
        if violations:
            return Bite(check, count + 1, violations[0])
    return Bite(check, None, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where a check that is off was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulate.bite", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], choices=list(FAULTY), help="this check; may be given several times (default: all)"
    )
    parser.add_argument("--start", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=3.0, help="times the expected seeds, before giving up (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON (default: lines for people)")
    options = parser.parse_args(arguments)
    bites = []
    for check, expected in EXPECTED_SEEDS.items():
        if options.only and check not in options.only:
            continue
        bite = seeds_until_caught(check, options.start, round(options.factor * expected))
        bites.append(bite)
        if not options.json:
            print(f"{check:<20} expected within {expected:>5}  caught after {bite.seeds or 'never':>5}  {bite.violation}", flush=True)
    if options.json:
        print(json.dumps([msgspec.to_builtins(bite) for bite in bites], indent=1))
    return 0 if all(bite.seeds is not None for bite in bites) else 1


if __name__ == "__main__":
    sys.exit(main())
