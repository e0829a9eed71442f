"""Tensor parallelism in real processes: loss and every gradient of divided models against the eager, undivided ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.warm import run_warm_beside

from .tensor_cases import CASES

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)  # of the first test, which waits for all processes

Answers = dict[tuple[str, str], list[dict[str, Any]]]  # kind and name → of every process

ROOT = Path(__file__).parents[3]
RANKS = "import runpy; runpy.run_module('tests.runtime.stage.tensor_ranks', run_name='__main__', alter_sys=True)"
WHOLE = {"tied-half": ["table.weight"], "logits-used-twice": ["head.weight"]}  # parameters that no rule divides


# Much like another case: only `make soak` runs them.
MORE = ("gpt2", "llama", "roberta", "bart", "qwen2", "gemma3", "mixtral", "phi", "olmo2", "smoothed", "total")
TWO = tuple(name for name in CASES if name not in MORE or settings.get_current_profile_name() == "soak")
THREE = ("gpt2-dropout", "weighed", "tied", "encoder")
LANES = ("classifier", "rows", "likelihood", "gate", "tied-in-one-layer", "llama")


SHARES = {"two": (TWO, [[1, 1], [3, 1]]), "three": (THREE, [[2, 1, 1]]), "lanes": (LANES, [[2, 1], [2, 2]])}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What every process said of every case of every kind. Capturing is what takes long: each model once, on two cores."""
    names = list(dict.fromkeys(name for of_kind, _ in SHARES.values() for name in of_kind))
    folders = [tmp_path_factory.mktemp("tensor") for _ in range(2)]
    commands = []
    for folder, half in zip(folders, (names[::2], names[1::2]), strict=True):
        cases = {kind: {name: shares for name in half if name in of_kind} for kind, (of_kind, shares) in SHARES.items()}
        commands.append([sys.executable, "-c", RANKS, folder, json.dumps(cases)])
    run_warm_beside(commands, cwd=ROOT)
    answers: Answers = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            for name, answer in json.loads(path.read_text(encoding="utf-8")).items():
                answers.setdefault((path.name.partition(".")[0], name), []).append(answer)
    return answers


def check(answers: list[dict[str, Any]], name: str, kind: str) -> None:
    assert len(answers) == (3 if kind == "three" else 2)
    for answer in answers:
        assert answer["wrong"] == []
        assert answer["divided"]
        assert not set(answer["divided"]) & set(WHOLE.get(name, []))
    assert len({tuple(answer["divided"]) for answer in answers}) == 1


@pytest.mark.parametrize("name", TWO)
def test_two_processes_compute_what_one_does(found: Answers, name: str) -> None:
    check(found["two", name], name, "two")


@pytest.mark.parametrize("name", THREE)
def test_three_processes_compute_what_one_does(found: Answers, name: str) -> None:
    check(found["three", name], name, "three")


@pytest.mark.parametrize("name", LANES)
def test_lanes_with_their_own_samples_compute_what_one_process_does(found: Answers, name: str) -> None:
    check(found["lanes", name], name, "lanes")
