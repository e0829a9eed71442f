"""The numeric contract, in real processes: whatever the plan, ten steps give the losses and weights of one process in plain PyTorch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.warm import run_warm_beside

from .equality_cases import CASES, MORE_CASES
from .equality_models import STEPS

pytestmark = pytest.mark.timeout(1200)  # of the first test, which waits for all processes

TOLERANCE = 1e-5
LOOSER = {"bf16": 3e-2, "fp16": 1e-2}  # rounding of half the digits, at other places in pieces than in the whole
TIGHTER = {"doubled": 1e-12}  # of weights: in twice the digits rounding hides nothing

TRIED = (*CASES, *MORE_CASES) if settings.get_current_profile_name() == "soak" else CASES

# Plans drawn by these seeds, each for the job beside it: `python -m tests.runtime.modes.lockstep.equality_soak` tries many more.
DRAWN: tuple[tuple[str, int], ...] = (
    *(("doubled", seed) for seed in range(6)),
    *(("mixtral", seed) for seed in range(3)),
    *(("repeats", seed) for seed in range(3)),
)


def in_halves(tasks: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """By job, about equally many tasks each: two sets of processes keep two cores busy while one of them captures."""
    halves: list[list[tuple[str, Any]]] = [[], []]
    for name in dict.fromkeys(name for name, _ in tasks):
        min(halves, key=len).extend(task for task in tasks if task[0] == name)
    return halves


def run_tasks(folder: Path, tasks: list[tuple[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every task's plan found."""
    script = str(Path(__file__).with_name("equality_ranks.py"))
    places = [folder / str(number) for number in range(2)]
    for place, half in zip(places, in_halves(tasks), strict=True):
        place.mkdir()
        (place / "tasks.json").write_text(json.dumps(half), encoding="utf-8")
    run_warm_beside([[sys.executable, script, place, place / "tasks.json"] for place in places])
    found: dict[str, list[dict[str, Any]]] = {}
    for place in places:
        found |= json.loads((place / "found.json").read_text(encoding="utf-8"))
    return found


def is_exact(job: str, result: dict[str, Any]) -> bool:
    """Whether a result is within the tolerance of its job."""
    tolerance = LOOSER.get(job, TOLERANCE)
    close = max(result["losses"], result.get("evaluations", 0.0)) <= tolerance and result["weights"] <= TIGHTER.get(job, tolerance)
    return close and result["missing"] == 0


def is_refused(results: list[dict[str, Any]]) -> bool:
    """Whether a plan was refused with a sentence, maybe by some ranks only, whose going the others noticed."""
    left = [result.get("error", "") for result in results if "refused" not in result]
    return len(left) < len(results) and all("Connection closed by peer" in error for error in left)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All cases in one go: capturing models and starting processes is what takes long."""
    return run_tasks(tmp_path_factory.mktemp("equality"), [*TRIED, *DRAWN])


@pytest.mark.parametrize(("job", "plan"), TRIED)
def test_a_plan_computes_what_one_process_computes(found: dict[str, list[dict[str, Any]]], job: str, plan: str) -> None:
    results = found[f"{job} {plan}"]
    for result in results:
        assert not result.keys() & {"refused", "error"}, result.get("refused") or result.get("error")
        assert result["steps"] == STEPS
        assert is_exact(job, result), result


@pytest.mark.parametrize(("job", "seed"), DRAWN)
def test_a_drawn_plan_is_exact_or_refused(found: dict[str, list[dict[str, Any]]], job: str, seed: int) -> None:
    results = found[f"{job} {seed}"]
    assert is_refused(results) or all("steps" in result and is_exact(job, result) for result in results), results


def test_the_cases_cover_what_they_claim() -> None:
    text = " ".join(plan for _, plan in CASES)
    assert len(CASES) >= 40
    assert len({*CASES, *MORE_CASES}) == len(CASES) + len(MORE_CASES)
    assert len({job for job, _ in CASES}) >= 25
    for word in ("tensor=2", "tensor=3", "sharded", "expert", "split=", "recompute", "gpipe", "interleaved", "@3:1"):
        assert word in text
