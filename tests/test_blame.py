"""How a script ends that lets Atoll's error pass, and that nothing changes for programs that use Atoll as a library."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import AtollError
from atoll.job import Job
from tests.warm import run_warm

SCRIPT = """import sys, torch, atoll
def loss(model, batch):
    return model(batch).mean() / FACTOR
def make(**changes):
    return atoll.Job(**{"model": lambda: torch.nn.Linear(4, 2), "loss": loss, "data": [torch.ones(4)] * 8,
                        "optimizer": torch.optim.SGD, "batch_size": 4, "steps": 2, **changes})
"""


def run(folder: Path, rest: str, *, factor: str = "1", name: str = "train.py") -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(SCRIPT.replace("FACTOR", factor) + rest)
    return run_warm([sys.executable, name], cwd=folder)


def test_a_wrong_job_is_a_sentence_with_its_line_and_exit_code_2(tmp_path: Path) -> None:
    ended = run(tmp_path, "job = make(batch_size=-4)\n")
    assert ended.returncode == 2
    assert ended.stderr == "error: train.py:5: Job: batch_size: must be a positive whole number, got -4\n"


def test_a_run_that_fails_is_a_sentence_with_the_users_line_and_exit_code_1(tmp_path: Path) -> None:
    ended = run(tmp_path, "if __name__ == '__main__': make().run()\n", factor="int('zero')")
    assert ended.returncode == 1
    assert "error: step 1: the loss failed: ValueError: invalid literal for int()" in ended.stderr
    assert ended.stderr.endswith("\n  train.py:3 in loss: return model(batch).mean() / int('zero')\n")
    assert "Traceback" not in ended.stderr


def test_a_script_may_catch_the_error_and_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "try:\n    make(seed=-1)\nexcept atoll.AtollError:\n    print('caught')\nundefined\n")
    assert ended.returncode == 1
    assert ended.stdout == "caught\n"
    assert "Traceback" in ended.stderr
    assert "NameError" in ended.stderr


@pytest.mark.parametrize("before", ["sys.excepthook = lambda *error: print('mine')\n", "sys.ps1 = '> '\n"])
def test_who_shows_errors_otherwise_keeps_doing_so(tmp_path: Path, before: str) -> None:
    ended = run(tmp_path, f"{before}make(seed=-1)\n")
    assert ended.returncode == 1
    assert "error: train.py" not in ended.stderr


def test_a_program_that_uses_it_as_a_library_gets_the_exception_and_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import train\ntrain.make(seed=-1)\n")
    ended = run(tmp_path, "", name="program.py")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "atoll.errors.JobError" in ended.stderr


def test_nothing_is_hooked_here() -> None:
    hook = sys.excepthook
    with pytest.raises(AtollError):
        Job(batch_size=0)  # type: ignore[call-arg]
    assert sys.excepthook is hook
