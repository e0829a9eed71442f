"""Tensor parallelism in real processes: loss and every gradient of divided models against the eager, undivided ones."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tensor_cases import CASES

pytest.importorskip("transformers")

HERE = Path(__file__).parent
WHOLE = {"tied-half": ["table.weight"], "logits-used-twice": ["head.weight"]}  # parameters that no rule divides


@cache
def results(size: int) -> dict[str, list[Any]]:
    """What every process said of every case: two processes run all of them, three some."""
    shares = [[1, 1], [3, 1]] if size == 2 else [[2, 1, 1]]
    names = CASES if size == 2 else ("gpt2-dropout", "phi3", "bloom", "t5", "weighed", "tied", "encoder")
    cases = json.dumps({name: shares for name in names})
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "tensor_ranks.py"), str(Path(folder) / "store")]
        started = [subprocess.Popen([*command, str(rank), cases], stdout=subprocess.PIPE, text=True) for rank in range(size)]
        said = [process.communicate()[0] for process in started]
    answers: dict[str, list[Any]] = {name: [] for name in names}
    for lines in said:
        for line in lines.splitlines():
            answer = json.loads(line)
            answers[answer["case"]].append(answer)
    return answers


def check(name: str, size: int) -> None:
    answers = results(size)[name]
    assert len(answers) == size
    for answer in answers:
        assert answer["wrong"] == []
        assert answer["divided"]
        assert not set(answer["divided"]) & set(WHOLE.get(name, []))
    assert len({tuple(answer["divided"]) for answer in answers}) == 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(600)
def test_two_processes_compute_what_one_does(name: str) -> None:
    check(name, 2)


@pytest.mark.parametrize("name", ["gpt2-dropout", "phi3", "bloom", "t5", "weighed", "tied", "encoder"])
@pytest.mark.timeout(600)
def test_three_processes_compute_what_one_does(name: str) -> None:
    check(name, 3)
