"""Callbacks of a run of sites: one that asks to stop ends it with a whole round, and what they remember outlives a restart."""

import shutil
from pathlib import Path

import pytest

from atoll.callbacks import EarlyStopping
from atoll.events import CheckpointSaved, Evaluated, StopTraining
from atoll.runtime.modes.islands.callback_memory import CallbackMemory
from atoll.runtime.run_directory import RunDirectory
from tests.warm import run_warm

from . import island_job
from .test_faults import events_of
from .test_islands import ATOLL, EVERY_STEP, ISLANDS, check_equal, cluster, one_process

SCRIPT = """
from dataclasses import replace
import atoll
from island_job import data, job as plain

def stop(event):
    if isinstance(event, atoll.events.StepFinished) and event.step == 5:
        raise atoll.events.StopTraining

early = atoll.EarlyStopping(patience=1, min_delta=1e9)
job = replace(plain, callbacks=[early], eval_data=data, eval_every=2) if plain.total_steps > 100 else replace(plain, callbacks=[stop])
"""


def run_script(folder: Path, command: list[str], steps: int) -> tuple[str, int]:
    """Why the run ended, and after how many steps."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    shutil.copy(island_job.__file__, folder)
    done = run_warm([*ATOLL, "run", str(script), *command, "--", "sgd", str(steps)])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    finished = [event for event in events_of(folder / "run" / "events.jsonl") if event["event"] == "run_finished"][-1]
    return finished["reason"], finished["steps"]


def evaluated(loss: float) -> Evaluated:
    return Evaluated(step=4, loss=loss, metrics={}, samples=1, seconds=1.0)


@pytest.mark.timeout(300)
def test_a_callback_ends_the_run_with_a_round_and_it_goes_on_from_there(tmp_path: Path) -> None:
    given = ["-c", str(cluster(tmp_path / "c.toml", (1, 1))), *ISLANDS, *EVERY_STEP]
    assert run_script(tmp_path, [*given, "--out", str(tmp_path / "run")], 12) == ("stopped", 5)
    check_equal(tmp_path / "run", "sgd", *one_process(5))
    assert run_script(tmp_path, [*given[2:], "--resume", str(tmp_path / "run")], 12) == ("done", 12)
    check_equal(tmp_path / "run", "sgd", *one_process())


@pytest.mark.timeout(300)
def test_evaluations_of_the_first_site_stop_a_run_early(tmp_path: Path) -> None:
    given = ["-c", str(cluster(tmp_path / "c.toml", (1, 1))), *ISLANDS, *EVERY_STEP, "--out", str(tmp_path / "run")]
    reason, steps = run_script(tmp_path, given, 2000)
    assert reason == "stopped"
    assert 4 <= steps < 2000
    early = EarlyStopping(patience=1)
    CallbackMemory(RunDirectory(tmp_path / "run"), (early,), 0).remind()
    assert early.waited >= 1


def test_what_callbacks_knew_is_of_the_checkpoint_that_the_run_goes_on_from(tmp_path: Path) -> None:
    directory, early = RunDirectory(tmp_path), EarlyStopping(patience=9)
    (tmp_path / "checkpoints").mkdir()
    memory = CallbackMemory(directory, (early,), 0)
    for loss in (1.0, 2.0, 2.0):
        early(evaluated(loss))
    memory.keep(evaluated(1.0))  # no checkpoint
    memory.remind()
    assert early.waited == 2
    memory.keep(CheckpointSaved(step=4, path="x", size_bytes=1, blocked_seconds=0.0, seconds=1.0))
    another = EarlyStopping(patience=9)
    CallbackMemory(directory, (another,), 1).remind()  # a run that begins anew
    assert another.waited == 0
    CallbackMemory(directory, (another,), 0).remind()  # a coordinator in the place of the one before
    assert (another.best, another.waited) == (1.0, 2)
    another.patience = 3
    with pytest.raises(StopTraining):
        another(evaluated(2.0))
