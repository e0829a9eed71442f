"""A swarm as a user starts it: real processes, real TLS, `atoll run` and `atoll join`, with a worker and the coordinator killed."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.export import export
from atoll.runtime.modes.swarm.report import read_members
from atoll.runtime.run_directory import RunDirectory

from . import swarm_job

pytestmark = pytest.mark.timeout(600)

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
JOIN = re.compile(r"atoll join (\S+) --token (\S+)")
PLAN = """plan v1 graph="swarm job" cluster=here mode=swarm schedule=1f1b batch=12 micro_batch=3
stage 0: layers 0-1: h/0=12
stage 1: layers 2-4: h/1=12
"""
HOSTING = """plan v1 graph="swarm job" cluster=here mode=swarm schedule=interleaved batch=12 micro_batch=3
stage 0: layers 0-1: h/0=12
stage 1: layers 2-4: h/0=6 h/1=6
"""


def plain(staleness: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """By hand; the job is asked only for its first weights and the order of its data."""
    model = swarm_job.job.build_model("cpu")
    optimizer = swarm_job.optimizer(model.parameters())
    losses, history = [], []
    for step in range(swarm_job.STEPS):
        history.append(deepcopy(model))
        seen = history[max(0, step - staleness)]
        total, weight = swarm_job.loss(seen, swarm_job.job.samples.batch(step))
        gradients = torch.autograd.grad(total / weight, list(seen.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses, model.state_dict()


def events_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text("utf-8").splitlines() if (run / "events.jsonl").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses_of(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run) if event["event"] == "step_finished"}


def stages_of(run: Path) -> dict[str, int]:
    return {event["name"]: event["stages"][0] for event in events_of(run) if event["event"] == "member_changed" and event["stages"]}


def having_a_state(run: Path) -> set[str]:
    """Workers a stage can go on with when others die."""
    return {name for name, account in read_members(RunDirectory(run)).items() if account.state_seconds is not None}


def until(condition: Callable[[], bool], process: "subprocess.Popen[str]", log: Path) -> None:
    while not condition():
        assert process.poll() is None, f"the run ended early:\n{log.read_text()}"
        time.sleep(0.05)


def kill(run: "subprocess.Popen[str]", name: str) -> None:
    for child in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # who has ended meanwhile, or not been asked how
            if name == child.name() or name in child.cmdline()[-2:]:  # forked, or started; the number of stages may follow
                child.send_signal(signal.SIGKILL)


@contextmanager
def started(command: list[str], out: IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process, and nothing left of it or its children when the test fails."""
    with subprocess.Popen(command, stdout=out, stderr=out, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()


def test_whoever_is_killed_or_joins_a_swarm_trains_what_one_process_does(tmp_path: Path) -> None:
    """A process that hosts both stages is killed; another that hosts both has joined; the third has one."""
    (tmp_path / "p.plan").write_text(HOSTING)
    run, log, allowed = tmp_path / "run", tmp_path / "log", tmp_path / "allowed"
    allowed.write_text("3")
    everybody = {"worker-0", "worker-0+1", "worker-1", "late", "late+1"}
    command = [*ATOLL, "run", swarm_job.__file__, "--plan", str(tmp_path / "p.plan"), "--mode", "swarm", "--checkpoint-every", "5"]
    with log.open("w") as out, started([*command, "--out", str(run), "--", str(allowed)], out) as swarm:
        until(lambda: JOIN.search(log.read_text()) is not None, swarm, log)
        found = JOIN.search(log.read_text())
        assert found is not None
        with (
            (tmp_path / "late").open("w") as told,
            started([*ATOLL, "join", found[1], "--token", found[2], "--name", "late", "--stages", "2"], told) as late,
        ):
            until(lambda: everybody <= having_a_state(run) and len(losses_of(run)) == 3, swarm, log)
            allowed.write_text("5")
            kill(swarm, "worker-0")
            until(lambda: len(losses_of(run)) == 5, swarm, log)
            kill(swarm, "coordinator")
            allowed.write_text(str(swarm_job.STEPS))
            assert swarm.wait() == 0, log.read_text()
            assert late.wait() == 0
    check_trained(run, tmp_path)
    kinds = [event["event"] for event in events_of(run)]
    told = ["plan_chosen", "process_started", "run_started", "coordinator_started", "member_changed", "step_finished", "run_finished"]
    assert [kinds.index(kind) for kind in told] == sorted(kinds.index(kind) for kind in told)
    ended = [(event["name"], event["then"]) for event in events_of(run) if event["event"] == "process_ended"]
    assert {("worker-0", "continue"), ("coordinator", "restart"), ("coordinator", "done"), ("feeder", "done")} <= set(ended)
    assert {"checkpoint_saved", "state_fetched", "links_measured"} <= set(kinds)
    assert "2 workers, 1 of which hosts several stages, on this machine" in log.read_text()
    assert [stages_of(run)[name] for name in ("worker-0", "worker-0+1", "worker-1")] == [0, 1, 1]  # as planned
    assert {stages_of(run)[name] for name in ("late", "late+1")} == {0, 1}
    assert all(read_members(RunDirectory(run))[name].kernels for name in ("late", "late+1"))
    assert (tmp_path / "late").read_text().endswith("The run is over\n")
    assert "worker-0 died (signal 9); the run continues without it" in log.read_text()
    assert "coordinator died (signal 9); restarting it" in log.read_text()
    assert f"done: {swarm_job.STEPS} steps in " in log.read_text()  # all of them now, whoever coordinated


def check_trained(run: Path, folder: Path, since: int = 1, staleness: int = 0) -> None:
    """Losses and exported weights are those of a plain loop, and every step since then was made once."""
    expected, weights = plain(staleness)
    made = [event["step"] for event in events_of(run) if event["event"] == "step_finished"]
    assert made == list(range(since, swarm_job.STEPS + 1))
    losses = torch.tensor([losses_of(run)[step] for step in made])
    torch.testing.assert_close(losses, torch.tensor(expected[since - 1 :]), rtol=1e-5, atol=0)
    export(run, folder / "w.safetensors")
    exported = load_file(folder / "w.safetensors")
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-6)
