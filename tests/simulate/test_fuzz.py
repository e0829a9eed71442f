"""Random fault schedules: none breaks the protocol, every check that is switched off is noticed, and failures replay and shrink.

What runs long says so, on standard error and not all the time.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from atoll.control.messages import Committed
from atoll.control.worker import Worker
from atoll.events import AnyEvent, CheckpointSaved, MemberChanged, StepFinished, StepRepaired
from atoll.simulate.faults import draw_scenario
from atoll.simulate.fuzz import Pulse, fuzz, main, run_scenario, shrink_scenario
from atoll.simulate.swarm import ExactSwarm, SwarmSize
from tests.simulate import bite
from tests.simulate.bite import EXPECTED_SEEDS, seeds_until_caught
from tests.simulate.faulty import FAULTY, without

# Rare orders of events are for the soak, and for `python -m atoll.simulate.fuzz`, which tries as many as one likes.
SEEDS = 5000 if settings.get_current_profile_name() == "soak" else 800
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_the_protocol(part: int) -> None:
    outcomes = fuzz(range(part, SEEDS, PARTS))
    assert [(outcome.seed, outcome.violations) for outcome in outcomes if outcome.violations] == []
    assert sum(outcome.commits for outcome in outcomes) > 2 * len(outcomes)


QUICK = (
    "completeness", "once", "duplicate-filter", "message-order", "disjointness", "atomic-manifest", "out-of-place", "token", "clear",
    "same-weights", "set-aside", "epoch",
)  # fmt: skip


@pytest.mark.parametrize("check", QUICK)
def test_the_checker_notices_what_is_missing(check: str) -> None:
    assert seeds_until_caught(check, 0, 3 * EXPECTED_SEEDS[check]).seeds is not None


def test_every_guard_that_can_be_missing_has_an_expectation() -> None:
    assert set(EXPECTED_SEEDS) == set(FAULTY)


def test_a_seed_replays_exactly() -> None:
    assert run_scenario(draw_scenario(11)) == run_scenario(draw_scenario(11))


def test_what_happens_to_a_simulated_swarm_is_told_in_the_events_of_a_real_one() -> None:
    heard: list[AnyEvent] = []
    for seed in range(60):
        run_scenario(draw_scenario(seed), observe=heard.append)
    assert {event.kind for event in heard} >= {
        "coordinator_started", "member_changed", "member_moved", "step_finished", "step_repaired", "checkpoint_saved", "stage_lost",
    }  # fmt: skip
    assert {event.state for event in heard if isinstance(event, MemberChanged)} >= {"active", "silent"}
    assert {"no progress", "a coordinator took over"} <= {event.reason for event in heard if isinstance(event, StepRepaired)}
    assert all(event.seconds > 0 for event in heard if isinstance(event, CheckpointSaved | StepFinished))
    for event in heard:
        assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event


def test_a_steps_loss_is_the_mean_of_what_its_commit_adds_up() -> None:
    steps: list[StepFinished] = []
    swarm = ExactSwarm(SwarmSize(), 0, observe=lambda event: steps.append(event) if isinstance(event, StepFinished) else None)
    swarm.start_all()
    swarm.run_to_version(3)
    commits = [record for record in swarm.journal_disk.records if isinstance(record, Committed)]
    assert [(step.step, step.loss, step.applied) for step in steps] == [
        (commit.version + 1, commit.loss / commit.weight, not commit.skipped) for commit in commits[: len(steps)]
    ]
    assert steps


def test_in_a_quarter_of_the_seeds_states_are_slow_and_those_who_miss_a_commit_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [scenario for scenario in map(draw_scenario, range(200)) if scenario.state_seconds]
    assert 30 <= len(scenarios) <= 70
    caught_up, apply = [0], Worker._apply

    async def count(self: Worker, *rest: Any) -> None:
        caught_up[0] += self._catching is not None
        await apply(self, *rest)

    monkeypatch.setattr(Worker, "_apply", count)
    assert not any(run_scenario(scenario).violations for scenario in scenarios)
    assert caught_up[0] >= 3


def test_a_failing_scenario_shrinks_to_one_that_still_fails() -> None:
    roles = without("once")
    failing = next(seed for seed in range(60) if run_scenario(draw_scenario(seed), roles).violations)
    scenario = draw_scenario(failing)
    shortest = shrink_scenario(scenario, lambda it: bool(run_scenario(it, roles).violations))
    assert run_scenario(shortest, roles).violations
    assert len(shortest.faults) <= len(scenario.faults)


@pytest.mark.parametrize("command", [main, bite.main])
def test_the_help_says_what_happens_without_options(command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    options = capsys.readouterr().out.partition("show this help message and exit")[2]
    assert options.count("(default:") == len(re.findall(r"^  --", options, re.MULTILINE)) >= 4


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seeds"], found["violations"]) == (3, 0)
    assert main(["--seeds", "40", "--stop-at-first", "--json"], without("once")) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["shortest"]["violations"]
    assert re.match(r"seed \d+: ", said.err)


def test_it_speaks_when_it_is_time_and_leaves_answers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Pulse(3600.0).count("seeds", 1, 100)
    Pulse(0.0).count("seeds", 20, 100)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "seeds: 20 of 100, about 0 s left\n"
