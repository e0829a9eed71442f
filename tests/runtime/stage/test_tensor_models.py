"""Tensor parallelism in real processes: loss and every gradient of divided models against the eager, undivided ones."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

from .tensor_cases import CASES

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
WHOLE = {"tied-half": ["table.weight"], "logits-used-twice": ["head.weight"]}  # parameters that no rule divides


# Much like another case: only `make soak` runs them.
MORE = ("gpt2", "llama", "roberta", "bart", "qwen2", "gemma3", "mixtral", "phi", "olmo2", "smoothed", "total")
TWO = tuple(name for name in CASES if name not in MORE or settings.get_current_profile_name() == "soak")
THREE = ("gpt2-dropout", "weighed", "tied", "encoder")
LANES = ("classifier", "rows", "likelihood", "gate", "tied-in-one-layer", "llama")


@cache
def results(kind: str) -> dict[str, list[Any]]:
    """What every process said of every case."""
    names, shares = {"two": (TWO, [[1, 1], [3, 1]]), "three": (THREE, [[2, 1, 1]]), "lanes": (LANES, [[2, 1], [2, 2]])}[kind]
    mode = "lanes" if kind == "lanes" else "tensor"
    size = len(shares[0])
    cases = json.dumps(dict.fromkeys(names, shares))
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.runtime.stage.tensor_ranks", str(Path(folder) / "store")]
        given = [[*command, str(rank), cases, mode] for rank in range(size)]
        started = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, cwd=ROOT) for one in given]
        said = [process.communicate()[0] for process in started]
    answers: dict[str, list[Any]] = {name: [] for name in names}
    for lines in said:
        for line in lines.splitlines():
            answer = json.loads(line)
            answers[answer["case"]].append(answer)
    return answers


def check(name: str, kind: str) -> None:
    answers = results(kind)[name]
    assert len(answers) == (3 if kind == "three" else 2)
    for answer in answers:
        assert answer["wrong"] == []
        assert answer["divided"]
        assert not set(answer["divided"]) & set(WHOLE.get(name, []))
    assert len({tuple(answer["divided"]) for answer in answers}) == 1


@pytest.mark.parametrize("name", TWO)
@pytest.mark.timeout(600)
def test_two_processes_compute_what_one_does(name: str) -> None:
    check(name, "two")


@pytest.mark.parametrize("name", THREE)
@pytest.mark.timeout(600)
def test_three_processes_compute_what_one_does(name: str) -> None:
    check(name, "three")


@pytest.mark.parametrize("name", LANES)
@pytest.mark.timeout(600)
def test_lanes_with_their_own_samples_compute_what_one_process_does(name: str) -> None:
    check(name, "lanes")
