"""Random fault schedules of sites that train together: none breaks the rounds, and every guard that is missing is noticed.

Seeds in `faulty.py` are of this code: when the protocol sends other messages, they are looked for anew with
`python -m atoll.simulate.rounds.fuzz`, whose `main` takes the same roles.
"""

import json

import pytest
from hypothesis import settings

from atoll.simulate.rounds.faults import draw_round_scenario
from atoll.simulate.rounds.fuzz import fuzz_rounds, main, run_round_scenario, shrink_round_scenario
from tests.simulate.rounds.faulty import DIRECTED, FAULTY

SEEDS = 20_000 if settings.get_current_profile_name() == "soak" else 2000
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_the_rounds(part: int) -> None:
    outcomes = fuzz_rounds(range(part, SEEDS, PARTS))
    assert [(outcome.seed, outcome.violations) for outcome in outcomes if outcome.violations] == []
    assert sum(outcome.commits for outcome in outcomes) > 3 * len(outcomes)
    assert sum(outcome.rollbacks for outcome in outcomes) > 0


@pytest.mark.parametrize("guard", FAULTY)
def test_the_checker_notices_what_is_missing(guard: str) -> None:
    roles, seeds = FAULTY[guard]
    assert any(run_round_scenario(draw_round_scenario(seed), roles).violations for seed in seeds)


@pytest.mark.parametrize("guard", DIRECTED)
def test_and_in_schedules_made_for_it(guard: str) -> None:
    roles, scenario = DIRECTED[guard]
    assert run_round_scenario(scenario, roles).violations
    assert not run_round_scenario(scenario).violations


def test_a_seed_replays_exactly() -> None:
    assert run_round_scenario(draw_round_scenario(11)) == run_round_scenario(draw_round_scenario(11))


def test_a_failing_scenario_shrinks_to_one_that_still_fails() -> None:
    roles, seeds = FAULTY["fence"]
    failing = next(scenario for scenario in map(draw_round_scenario, seeds) if run_round_scenario(scenario, roles).violations)
    shortest = shrink_round_scenario(failing, lambda it: bool(run_round_scenario(it, roles).violations))
    assert run_round_scenario(shortest, roles).violations
    assert len(shortest.faults) <= len(failing.faults)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seeds"], found["violations"]) == (3, 0)
    assert main(["--seeds", "3", "--stop-at-first"], FAULTY["round"][0]) == 1
    said = capsys.readouterr()
    assert "shortest" in said.out
    assert said.err.startswith("seed 0: ")
