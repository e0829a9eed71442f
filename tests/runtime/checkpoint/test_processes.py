"""Checkpoints between real processes over Gloo: three of them are started once and go through all cases."""

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atoll.runtime.checkpoint.checkpointer import Checkpointer
from tests.warm import run_warm

from .layouts import tensors
from .processes import IDENTITY, held_by

_RANKS = 3


class _Run:
    """What the ranks said in each scenario, and where they worked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        code = "import runpy; runpy.run_module('tests.runtime.checkpoint.processes', run_name='__main__', alter_sys=True)"
        commands = [[sys.executable, "-c", code, str(rank), str(_RANKS), str(directory)] for rank in range(_RANKS)]
        with ThreadPoolExecutor(_RANKS) as all_ranks:
            ended = list(all_ranks.map(lambda command: run_warm(command, cwd=Path(__file__).parents[3]), commands))
        self.codes = [process.returncode for process in ended]
        assert set(self.codes) <= {0, -signal.SIGKILL}, "".join(process.stderr[-2000:] for process in ended)
        self.said = [[json.loads(line) for line in process.stdout.splitlines()] for process in ended]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    return _Run(tmp_path_factory.mktemp("processes"))


def test_any_layout_on_any_number_of_ranks(run: _Run) -> None:
    assert all(len(said[0]) == 8 for said in run.said)


def test_sharded_data_parallelism(run: _Run) -> None:
    assert [said[1] for said in run.said] == [["step 2"]] * 3


def test_a_failure_on_one_rank_is_everybodys(run: _Run) -> None:
    assert run.said[0][2] == run.said[1][2] == run.said[2][2]
    late, final, loaded, damaged = run.said[0][2]
    assert late.startswith("rank 1: ")
    assert "File too large" in late
    assert final.startswith("step 3: the last checkpoint could not be saved: rank 1: ")
    assert loaded == "loaded 1"
    assert "safetensors: it has" in damaged
    assert sorted(path.name for path in (run.directory / "failures").iterdir()) == ["latest", "step-00000001"]


def test_a_rank_is_killed_while_it_writes(run: _Run) -> None:
    assert run.codes == [0, 0, -signal.SIGKILL]
    for said in run.said[:2]:
        error, when = said[3]
        assert "another rank is gone" in error
        assert when == "soon"
    blank = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
    held = held_by(0, 0, 1, blank, trained=False)
    loaded = Checkpointer(run.directory / "killed", identity=IDENTITY).load(held)
    assert loaded is not None
    assert loaded.step == 1
    assert all(torch.equal(part.tensor.view(-1), tensors(0)[part.name].view(-1)) for part in held)
    assert not list((run.directory / "killed").glob("*.partial")), "what the crash left is cleaned"
