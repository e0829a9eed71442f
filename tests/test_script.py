"""From a script's path to its Job, or to the user's own line."""

import sys
from pathlib import Path

import pytest
import torch

from atoll.cluster import load_cluster
from atoll.errors import ClusterError, JobError, PlanError
from atoll.job import Job
from atoll.plan import load_plan
from atoll.script import imported_scripts, load_job

GOOD = """
import torch, atoll
def loss(model, batch): return model(batch).mean()
def make(steps): return atoll.Job(model=torch.nn.Sigmoid, loss=loss, data=range(3), optimizer=torch.optim.SGD, batch_size=1, steps=steps)
"""


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    (directory / name).write_text(text)
    return directory / name


def failure(path: str | Path) -> str:
    with pytest.raises(JobError) as caught:
        load_job(path)
    return str(caught.value)


def test_the_one_job_is_found_whatever_its_name(tmp_path: Path) -> None:
    assert load_job(script(tmp_path, GOOD + "mine = make(3)\nalias = mine\n")).steps == 3


def test_job_wins_over_others(tmp_path: Path) -> None:
    assert load_job(script(tmp_path, GOOD + "other = make(3)\njob = make(4)\n")).steps == 4


def test_it_is_imported_not_run_and_sees_its_neighbours_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["atoll", "plan", "x"])
    script(tmp_path, "import sys\nSTEPS = 10 * len(sys.argv) + int(sys.argv[-1])\n", "a_neighbour_of_the_script.py")
    text = GOOD + "import a_neighbour_of_the_script as n\njob = make(n.STEPS)\nif __name__ == '__main__':\n    raise SystemExit('ran')\n"
    path = script(tmp_path, f"import sys\n{text}SEEN = sys.argv\n")
    assert load_job(path, ["--steps", "3"]).steps == 33
    assert [str(path), "--steps", "3"] == sys.modules["atoll_script_train"].SEEN
    assert sys.argv == ["atoll", "plan", "x"]


def test_a_script_with_a_loop_of_its_own_sees_its_neighbours(tmp_path: Path) -> None:
    script(tmp_path, "from torch.nn import Sigmoid\n", "a_neighbour_of_the_loop.py")
    text = """
import torch, atoll
from a_neighbour_of_the_loop import Sigmoid
atoll.step(Sigmoid, loss=lambda model, batch: model(batch).mean(), data=range(3), optimizer=torch.optim.SGD, batch_size=1, steps=7)
"""
    assert load_job(script(tmp_path, text, "loop.py")).steps == 7


def test_dataclasses_and_future_annotations_work_in_scripts(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass C:\n    n: int = 5\n"
        + GOOD
        + "job = make(C().n)\n"
    )
    assert load_job(script(tmp_path, text)).steps == 5


def test_a_model_built_at_import_is_the_same_everywhere(tmp_path: Path) -> None:
    path = script(tmp_path, GOOD + "import dataclasses\njob = dataclasses.replace(make(1), model=torch.nn.Linear(3, 3))\n")
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = load_job(path).model
        assert isinstance(model, torch.nn.Linear)
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_no_job_and_several_jobs(tmp_path: Path) -> None:
    assert failure(script(tmp_path, "x = 1\n")).startswith(f"{tmp_path}/train.py: defines no atoll.Job; add at module level: job = ")
    assert "defines several Jobs: a (line 5), b (line 6); call the one to use 'job'" in failure(
        script(tmp_path, GOOD + "a = make(1)\nb = make(2)\n")
    )


def test_missing_files_and_directories(tmp_path: Path) -> None:
    script(tmp_path, GOOD)
    assert failure(tmp_path / "trian.py") == f"{tmp_path}/trian.py: there is no such file; there are {tmp_path}/train.py"
    assert "is a directory" in failure(tmp_path)
    assert failure(tmp_path / "no" / "x.py") == f"{tmp_path}/no/x.py: there is no such file"


def test_other_files_of_ours_are_known(tmp_path: Path) -> None:
    assert "is no training script; give the script first, and a cluster with --cluster" in failure(script(tmp_path, "", "here.toml"))
    (tmp_path / "plan.txt").write_text("plan v1 graph=g cluster=c mode=lockstep schedule=1f1b batch=2 micro_batch=1\n")
    with pytest.raises(ClusterError, match="is a plan, not a cluster file; give it with --plan"):
        load_cluster(tmp_path / "plan.txt")
    with pytest.raises(PlanError, match="is a cluster file, not a plan; give it with --cluster"):
        load_plan(script(tmp_path, 'name = "c"', "c.toml"))


def test_syntax_errors_and_what_is_not_text(tmp_path: Path) -> None:
    assert failure(script(tmp_path, "a = 1\nb = (2\n")) == f"{tmp_path}/train.py:2: '(' was never closed: b = (2"
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert "cannot read it as a Python script" in failure(tmp_path / "binary.py")


def test_an_exception_shows_the_users_own_line(tmp_path: Path) -> None:
    path = script(tmp_path, "import torch\n\ntorch.zeros(2) @ torch.zeros(3)\n")
    message = failure(path)
    assert message.startswith(f"{path}:3: RuntimeError: ")
    assert message.endswith("\n    torch.zeros(2) @ torch.zeros(3)")
    assert "Traceback" not in message


def test_an_exception_in_a_neighbour_shows_that_line(tmp_path: Path) -> None:
    script(tmp_path, "def broken():\n    return 1 / 0\n", "another_neighbour.py")
    message = failure(script(tmp_path, "import another_neighbour\nanother_neighbour.broken()\n"))
    assert message == f"{tmp_path}/another_neighbour.py:2: ZeroDivisionError: division by zero\n    return 1 / 0"


def test_a_wrong_job_shows_its_line(tmp_path: Path) -> None:
    path = script(tmp_path, "import atoll\njob = atoll.Job(model=3)\n")
    assert failure(path) == f"{path}:2: Job needs loss and data and optimizer and batch_size: " + (
        "Job(loss=…, data=…, optimizer=…, batch_size=…)\n    job = atoll.Job(model=3)"
    )


def test_a_script_that_exits_is_told_where_to_put_that(tmp_path: Path) -> None:
    message = failure(script(tmp_path, "import sys\nsys.exit(3)\n"))
    assert "train.py:2: it exits (3) while being imported; move what runs under" in message


def test_arguments_that_a_script_refuses_are_not_taken_for_an_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--layers')\nparser.parse_args()\n")
    with pytest.raises(JobError, match=r"train\.py:4: it does not accept its arguments, --depth 3; give them after `--`"):
        load_job(path, ["--depth", "3"])
    assert "unrecognized arguments: --depth 3" in capsys.readouterr().err


def test_a_failed_script_can_be_mended_and_loaded_again(tmp_path: Path) -> None:
    failure(script(tmp_path, "1 / 0\n"))
    assert isinstance(load_job(script(tmp_path, GOOD + "job = make(1)\n")), Job)


def test_a_script_that_is_gone_since_is_imported_by_no_other_process(tmp_path: Path) -> None:
    path = script(tmp_path, GOOD + "job = make(3)\n", "gone_since.py")
    load_job(path)
    assert str(path) in {each.file for each in imported_scripts()}
    path.unlink()
    assert str(path) not in {each.file for each in imported_scripts()}
