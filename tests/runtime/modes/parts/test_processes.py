"""Parts as a user starts them: real processes, TLS, `atoll run`; against one process, with a part killed, and a teacher that returns."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.collaboration import Collaboration
from atoll.script import load_job
from tests.warm import run_warm

pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).parent / "parts_job.py"
STEPS, MANY = 8, 3000
TOLERANCE = 1e-6


def atoll(*arguments: str, folder: Path, code: int = 0) -> str:
    done = run_warm([sys.executable, "-c", "from atoll.cli import main; main()", *arguments], cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stderr + done.stdout


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    return [event for event in found if event["event"] == kind]


def job_of(steps: int) -> Collaboration:
    job = load_job(JOB, [str(steps)])
    assert isinstance(job, Collaboration)
    return job


def test_parts_at_two_sites_are_one_process_though_one_of_them_is_killed(tmp_path: Path) -> None:
    """Frozen, sampled, with a gradient and with another's gradient: everything crosses. It begins and ends in one process."""
    (tmp_path / "who").mkdir()
    whole = job_of(STEPS + 2).run(progress=False)
    job_of(1).run(out=tmp_path / "run", progress=False)
    told = ["--", str(STEPS), str(tmp_path / "who"), "generator", "5"]
    saving = ["--checkpoint-every", "2", "--max-restarts", "1", "--resume", "run", "--mode", "parts"]
    cluster = str(JOB.parents[4] / "examples" / "clusters" / "two_sites.toml")
    said = atoll("run", str(JOB), "--cluster", cluster, *saving, *told, folder=tmp_path)
    assert "generator: on oslo-0/0 at oslo, as it says" in said
    assert "learner: on rome-0/0 at rome, where its steps end soonest" in said
    (restarted,) = events_of(tmp_path / "run", "restarted")
    assert restarted["reason"] == "generator died (signal 9)"
    losses = {event["step"]: event["losses"] for event in events_of(tmp_path / "run", "step_finished")}
    assert list(losses) == list(range(1, STEPS + 1))
    for step, expected in enumerate(whole.losses[:STEPS], 1):
        assert sum(losses[step].values()) == pytest.approx(expected, rel=TOLERANCE)
    evaluated = {event["step"]: event["metrics"]["learner.twice"] for event in events_of(tmp_path / "run", "evaluated")}
    assert set(evaluated) == {1, 4, 8}
    assert evaluated[4] == pytest.approx(whole.evaluations[0].metrics["learner.twice"])
    edges = {(edge["name"], edge["gradient"]): edge for edge in json.loads(atoll("report", "run", "--json", folder=tmp_path))["edges"]}
    assert edges["sampled", False]["bytes_per_position"] == 8.0  # whole numbers of 64 bits
    assert edges["logits", False]["bytes_per_position"] == 300 * 4
    assert set(edges) == {("logits", False), ("sampled", False), ("features", False), ("said", False), ("features", True), ("said", True)}
    rest = job_of(STEPS + 2).run(resume=tmp_path / "run", progress=False)
    assert rest.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert rest.model is not None
    assert whole.model is not None
    for (name, value), expected in zip(rest.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE), name


def test_a_student_goes_on_without_its_teacher_and_has_it_again_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "who").mkdir()
    told = ["--", str(MANY), str(tmp_path / "who"), "teacher", "4"]
    said = atoll("run", str(JOB), "--out", "run", "--max-restarts", "1", *told, folder=tmp_path)
    assert "goes on without 'logits' from step" in said
    assert "'logits' is there again from step" in said
    steps = [event["step"] for event in events_of(tmp_path / "run", "step_finished")]
    assert steps[-1] < MANY  # the callback stopped it once the teacher was back
    (edge,) = [one for one in json.loads(atoll("report", "run", "--json", folder=tmp_path))["edges"] if one["name"] == "logits"]
    assert edge["missed"] > 0
    assert edge["steps"] + edge["missed"] == steps[-1]
    assert f"learner made {edge['missed']} step" in atoll("report", "run", folder=tmp_path)
