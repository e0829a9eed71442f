"""Modes are found by name, Atoll's own and others'; one that is not there, or cannot be loaded, is told in a sentence."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import PlanError
from atoll.plan import Plan, parse_plan, validate
from atoll.plan import modes as registry
from atoll.plan.modes import default_rules, find_rules, installed_modes, mode_names, mode_rules

HEAD = "plan v1 graph=g cluster=c mode={mode} batch=4 micro_batch=2\nstage 0: layers 0-1: a/0=4\n"
OWN = ("lockstep", "swarm", "islands", "alone", "parts")


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is installed beside Atoll."""
    package = tmp_path / "extra-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for found in (registry._places, mode_rules):
        found.cache_clear()  # type: ignore[attr-defined]
    yield package
    for found in (registry._places, mode_rules):
        found.cache_clear()  # type: ignore[attr-defined]


def test_atolls_own_modes_are_there_and_can_be_run() -> None:
    assert mode_names() == OWN == tuple(rules.name for rules in installed_modes())
    assert all(rules.summary and ":" in rules.runtime for rules in installed_modes())
    assert default_rules().name == OWN[0]


@pytest.mark.parametrize("mode", ["tables", "swarn"])
def test_a_plan_of_a_mode_that_is_not_there_is_refused_with_those_that_are(mode: str) -> None:
    with pytest.raises(PlanError, match=r"plan:1:\d+: expected a mode \(lockstep, swarm, islands, alone, parts\)"):
        parse_plan(HEAD.format(mode=mode))
    good = parse_plan(HEAD.format(mode="lockstep"))
    with pytest.raises(PlanError, match=f"mode: '{mode}' is not one of its values"):
        Plan.from_json(good.to_json().replace('"lockstep"', f'"{mode}"'))
    with pytest.raises(PlanError, match=f"there is no mode '{mode}'; there are lockstep, swarm, islands, alone, parts"):
        validate(Plan(graph="g", cluster="c", batch_size=4, micro_batch_size=2, stages=good.stages, mode=mode))


def test_a_package_brings_a_mode(brought: Path) -> None:
    (brought / "entry_points.txt").write_text("[atoll.modes]\nextra = extra_mode:RULES\n")
    source = "from atoll.plan.modes import ModeRules\nclass Rules(ModeRules):\n    name = 'extra'\n    summary = ''\n    runtime = ''\n"
    (brought.parent / "extra_mode.py").write_text(f"{source}RULES = Rules()\n")
    assert mode_names() == (*OWN, "extra")
    assert mode_rules("extra").name == "extra"
    assert parse_plan(HEAD.format(mode="extra")).mode == "extra"


def test_a_mode_that_cannot_be_loaded_says_why_and_keeps_nobody_else_from_running(brought: Path) -> None:
    (brought / "entry_points.txt").write_text("[atoll.modes]\nbroken = there_is_no_such_module:RULES\nalone = os:name\nother = os:name\n")
    with pytest.raises(PlanError, match="mode broken: its rules, there_is_no_such_module:RULES, cannot be loaded: ModuleNotFoundError"):
        mode_rules("broken")
    with pytest.raises(PlanError, match="mode other: os:name is not the rules of a mode of this name"):
        mode_rules("other")
    assert find_rules("broken") is None
    assert tuple(rules.name for rules in installed_modes()) == OWN
