"""Stopped under one plan, continued under another with another number of devices: the losses are those of a run that was never stopped."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.events import AnyEvent, MemberChanged, Observer, Restarted, RunFinished, StepFinished, StopTraining, WorkerFailed, read_events
from atoll.graph.capture import capture
from atoll.script import load_job
from tests.warm import run_warm, run_warm_beside

from .equality_cases import EQUAL, PIPE, plan_of
from .resume_ranks import CASES, FIRSTS_STATISTICS, SINGLE

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
SCRIPT = HERE / "resume_job.py"
TOLERANCE = 1e-5
ROUNDING = {"fp16": 1e-2}  # half the digits, rounded at other places


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found at the end of all cases. Capturing is what takes long: every job once, on two cores."""
    jobs = list(dict.fromkeys(job for job, _, _ in CASES))
    folders = [tmp_path_factory.mktemp("resume") for _ in range(2)]
    halves = zip(folders, (jobs[::2], jobs[1::2]), strict=True)
    run_warm_beside([[sys.executable, HERE / "resume_ranks.py", folder, *half] for folder, half in halves])
    found: list[dict[str, Any]] = [{}, {}, {}, {}]
    for folder in folders:
        for rank, of_rank in enumerate(found):
            of_rank |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("job", "before", "after"), CASES)
def test_a_run_goes_on_under_another_plan(found: list[dict[str, Any]], job: str, before: str, after: str) -> None:
    results = [result for rank in found if (result := rank.get(f"{job}: {before} → {after}"))]
    assert results
    for result in results:
        assert "error" not in result, result["error"]
        assert result["steps"] == 10
        assert result["missing"] == 0
        assert max(result["losses"], result["weights"]) <= ROUNDING.get(job, TOLERANCE)
        if (job, before, after) not in FIRSTS_STATISTICS:
            assert result.get("evaluations", 0.0) <= TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "batch-norm"], ids=str)
def test_what_is_evaluated_is_what_is_exported(found: list[dict[str, Any]], case: tuple[str, str, str]) -> None:
    """Running statistics differ between replicas; those that evaluation uses on every rank are those that a checkpoint holds."""
    assert found[0]["{}: {} → {}".format(*case)]["exported"] <= TOLERANCE


def atoll_run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from atoll.cli import main; main()", "run", *map(str, arguments)]
    return run_warm(command)


def losses_of(run: Path) -> dict[int, float]:
    """By step; of a step that was run twice, the later."""
    return {event.step: event.loss for event in read_events(run / "events.jsonl") if isinstance(event, StepFinished)}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plans of the script's job, as files."""
    graph, folder = capture(load_job(SCRIPT)), tmp_path_factory.mktemp("plans")
    texts = {"pipeline": PIPE, "data parallel": EQUAL, "sharded": "4 | sharded: (a b c)=4,2,2", "single": SINGLE}
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(plan_of(graph, text, 8).to_json(), encoding="utf-8")
    return {name: folder / f"{name}.json" for name in texts}


@pytest.fixture(scope="module")
def alone() -> dict[int, float]:
    """Losses of the script's job in one process."""
    return dict(enumerate(load_job(SCRIPT).run(progress=False).losses, start=1))


def test_the_command_line_stops_and_resumes(plans: dict[str, Path], alone: dict[int, float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = atoll_run(SCRIPT, "--plan", plans["pipeline"], "--out", run, "--", "stop", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(losses_of(run)) == [1, 2, 3]
    done = atoll_run(SCRIPT, "--plan", plans["sharded"], "--resume", run)
    assert done.returncode == 0, done.stderr
    assert losses_of(run) == pytest.approx(alone, rel=TOLERANCE)
    steps = [event.step for event in read_events(run / "events.jsonl") if isinstance(event, StepFinished)]
    assert steps == list(range(1, 9)), "no step is run twice"
    assert_time_goes_on(run)
    done = atoll_run(SCRIPT, "--plan", plans["single"], "--resume", run, "--", "reseeded")
    assert done.returncode == 0, done.stderr
    assert "resuming after step 8: the seed was 0 and is 1" in done.stderr
    assert "nothing was left to do: all 8 steps had been made before" in done.stdout


def test_a_run_goes_on_alone_and_in_lockstep_again(plans: dict[str, Path], alone: dict[int, float], tmp_path: Path) -> None:
    """Three steps as a pipeline, three in one process, the rest with sharded weights; and from one process to a pipeline."""
    run, other = tmp_path / "run", tmp_path / "other"
    done = atoll_run(SCRIPT, "--plan", plans["pipeline"], "--out", run, "--", "stop", "3")
    assert done.returncode == 0, done.stderr
    job = load_job(SCRIPT)
    result = dataclasses.replace(job, callbacks=[stopping(6)]).run(resume=run, progress=False)
    assert result.losses == pytest.approx([alone[step] for step in range(1, 7)], rel=TOLERANCE)
    dataclasses.replace(job, callbacks=[stopping(2)]).run(out=other, progress=False)
    for directory, plan in ((run, "sharded"), (other, "pipeline")):
        done = atoll_run(SCRIPT, "--plan", plans[plan], "--resume", directory)
        assert done.returncode == 0, done.stderr
        assert losses_of(directory) == pytest.approx(alone, rel=TOLERANCE)
        assert_time_goes_on(directory)


def stopping(after: int) -> Observer:
    def stop(event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == after:
            raise StopTraining

    return stop


def assert_time_goes_on(run: Path) -> None:
    """However often the run was started, no event is earlier than the one before it."""
    moments = [event.at_seconds for event in read_events(run / "events.jsonl")]
    assert moments == sorted(moments)


def test_a_killed_rank_costs_a_restart_and_no_accuracy(plans: dict[str, Path], alone: dict[int, float], tmp_path: Path) -> None:
    run, mark = tmp_path / "run", tmp_path / "died"
    options = ["--out", run, "--max-restarts", "1", "--checkpoint-every", "2", "--", "die", "5", mark]
    done = atoll_run(SCRIPT, "--plan", plans["data parallel"], *options)
    assert done.returncode == 0, done.stderr
    events = list(read_events(run / "events.jsonl"))
    assert mark.exists()
    assert [event.rank for event in events if isinstance(event, WorkerFailed)] == [1]
    assert len([event for event in events if isinstance(event, Restarted)]) == 1
    assert losses_of(run) == pytest.approx(alone, rel=TOLERANCE)
    last = [event for event in events if isinstance(event, RunFinished)][-1]
    assert (last.reason, last.steps) == ("done", 8)
    assert_time_goes_on(run)
    kinds = [event.kind for event in events]
    told = ["plan_chosen", "process_started", "run_started", "step_finished", "checkpoint_begun", "checkpoint_saved", "worker_failed"]
    assert [kinds.index(kind) for kind in told] == sorted(kinds.index(kind) for kind in told)
    again = kinds[kinds.index("restarted") :]
    told = ["restarted", "process_started", "run_started", "checkpoint_restored", "step_finished", "run_finished", "process_ended"]
    assert [again.index(kind) for kind in told] == sorted(again.index(kind) for kind in told)
    assert {event.state for event in events if isinstance(event, MemberChanged)} >= {"active", "dead"}
