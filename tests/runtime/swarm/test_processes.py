"""A swarm as a user starts it: real processes, real TLS, `atoll run` and `atoll join`, with a worker and the coordinator killed."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from . import swarm_job

pytestmark = pytest.mark.timeout(600)

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
JOIN = re.compile(r"atoll join (\S+) --token (\S+)")
PLAN = """plan v1 graph="swarm job" cluster=here mode=swarm schedule=1f1b batch=12 micro_batch=3
stage 0: layers 0-1: 2x(h/[0-1])=6
stage 1: layers 2-4: 2x(h/[2-3])=6
"""


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """By hand; the job is asked only for its first weights and the order of its data."""
    model = swarm_job.job.build_model("cpu")
    optimizer = swarm_job.optimizer(model.parameters())
    losses = []
    for step in range(swarm_job.STEPS):
        total, weight = swarm_job.loss(model, swarm_job.job.samples.batch(step))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses, model.state_dict()


def losses_of(run: Path) -> dict[int, float]:
    lines = (run / "events.jsonl").read_text("utf-8").splitlines() if (run / "events.jsonl").exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step_finished"}


def until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not condition():
        assert process.poll() is None, "the run ended early"
        time.sleep(0.05)


def kill(run: "subprocess.Popen[str]", name: str) -> None:
    for child in psutil.Process(run.pid).children():
        if child.cmdline()[-1] == name:
            child.send_signal(signal.SIGKILL)


def test_whoever_is_killed_or_joins_a_swarm_trains_what_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "p.plan").write_text(PLAN)
    run = tmp_path / "run"
    command = [*ATOLL, "run", swarm_job.__file__, "--plan", str(tmp_path / "p.plan"), "--mode", "swarm", "--checkpoint-every", "10"]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen([*command, "--out", str(run)], stdout=out, stderr=out, text=True) as swarm:
        until(lambda: JOIN.search(log.read_text()) is not None, swarm)
        found = JOIN.search(log.read_text())
        assert found is not None
        command = [*ATOLL, "join", found[1], "--token", found[2], "--name", "late"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as joined:
            assert joined.stdout is not None
            assert any(line.startswith("Working for") for line in joined.stdout)
            until(lambda: len(losses_of(run)) >= 5, swarm)
            kill(swarm, "worker-1")
            seen = len(losses_of(run))
            until(lambda: len(losses_of(run)) >= seen + 25, swarm)
            kill(swarm, "coordinator")
            assert swarm.wait() == 0, log.read_text()
            assert joined.stdout.read().endswith("The run is over\n")
    expected, weights = plain()
    losses = losses_of(run)
    assert sorted(losses) == list(range(1, swarm_job.STEPS + 1))
    torch.testing.assert_close(
        torch.tensor([losses[step + 1] for step in range(swarm_job.STEPS)]), torch.tensor(expected), rtol=1e-5, atol=0
    )
    subprocess.run([*ATOLL, "export", str(run), "--to", str(tmp_path / "w.safetensors")], check=True, capture_output=True)
    exported = load_file(tmp_path / "w.safetensors")
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-6)
    assert "worker-1 died (signal 9); the run goes on without it" in log.read_text()
    assert "the coordinator died (signal 9) and is started again" in log.read_text()
