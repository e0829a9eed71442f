"""A coordinator that is lost for good: another, at another address, goes on from the journal on a real nats-server."""

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import default_collate

from tests.runtime.modes.swarm import swarm_job
from tests.runtime.modes.swarm.nats_server import nats_server, needs_nats
from tests.runtime.modes.swarm.test_processes import ATOLL, PLAN, check_trained, events_of, losses_of, until

pytestmark = [needs_nats, pytest.mark.timeout(600)]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_another_coordinates_when_the_first_is_lost_for_good(tmp_path: Path) -> None:
    (tmp_path / "p.plan").write_text(PLAN)
    run, copy, log, log_of_standby = tmp_path / "run", tmp_path / "copy", tmp_path / "log", tmp_path / "log of standby"
    allowed, second = tmp_path / "allowed", free_address()
    allowed.write_text("3")
    with nats_server(tmp_path / "nats") as server:
        swarm_is = ["--mode", "swarm", "--checkpoint-every", "5", "--nats", server.address, "--standby", second]
        command = [*ATOLL, "run", swarm_job.__file__, "--plan", str(tmp_path / "p.plan"), *swarm_is, "--out", str(run), "--", str(allowed)]
        with (
            log.open("w") as out,
            log_of_standby.open("w") as said,
            subprocess.Popen(command, stdout=out, stderr=out, text=True) as swarm,
        ):
            until(lambda: len(losses_of(run)) == 3, swarm, log)
            shutil.copytree(run, copy)
            (copy / "events.jsonl").unlink()
            command = [*ATOLL, "standby", str(copy), "--listen", second]
            with subprocess.Popen(command, stdout=said, stderr=said, text=True) as standby:
                until(lambda: "standing by: " in log_of_standby.read_text(), standby, log_of_standby)
                members = psutil.Process(swarm.pid).children(recursive=True)
                swarm.send_signal(signal.SIGSTOP)  # who would start it again hangs for good, and does not take feeder and workers along
                next(member for member in members if "coordinator" in (member.name(), member.cmdline()[-1])).send_signal(signal.SIGKILL)
                allowed.write_text(str(swarm_job.STEPS))
                assert standby.wait() == 0, log_of_standby.read_text()
            swarm.kill()
            psutil.wait_procs(members)
    made = [event["step"] for event in events_of(copy) if event["event"] == "step_finished"]
    assert made == list(range(made[0], swarm_job.STEPS + 1))
    assert made[0] <= 5
    check_trained(copy, tmp_path, since=made[0])


def test_a_run_on_nats_is_stopped_evaluated_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "p.plan").write_text(PLAN.replace("mode=swarm", "mode=swarm staleness=1"))  # states that are stored hold both weights
    run, log, allowed = tmp_path / "run", tmp_path / "log", tmp_path / "allowed"
    allowed.write_text("3")
    with nats_server(tmp_path / "nats") as server:
        begin = ["--plan", str(tmp_path / "p.plan"), "--mode", "swarm", "--nats", server.address, "--out", str(run)]
        arguments = ["--", str(allowed), "evaluate"]
        with log.open("w") as out:
            with subprocess.Popen([*ATOLL, "run", swarm_job.__file__, *begin, *arguments], stdout=out, stderr=out, text=True) as swarm:
                until(lambda: len(losses_of(run)) == 3, swarm, log)
                swarm.send_signal(signal.SIGINT)
                until(lambda: "the run stops after this step" in log.read_text(), swarm, log)
                for step in range(4, swarm_job.STEPS):  # the step it stops after waits for its samples, and the feeder for those after it
                    allowed.write_text(str(step))
                    while swarm.poll() is None and len(losses_of(run)) < step:
                        time.sleep(0.05)
                assert swarm.wait() == 130, log.read_text()
            allowed.write_text(str(swarm_job.STEPS))
            command = [*ATOLL, "run", swarm_job.__file__, "--resume", str(run), *arguments]
            assert subprocess.run(command, stdout=out, stderr=out, timeout=500, check=False).returncode == 0, log.read_text()
    assert "going on after step " in log.read_text()
    first, again = [event for event in events_of(run) if event["event"] == "run_started"]
    stopped, done = [event for event in events_of(run) if event["event"] == "run_finished"]
    assert 0.0 <= first["at_seconds"] < stopped["at_seconds"]
    began = json.loads((run / "started.json").read_text())["at_seconds"]  # this start, in the run's own time, which goes on
    assert stopped["at_seconds"] <= began <= again["at_seconds"]
    assert done["seconds"] == pytest.approx(done["at_seconds"] - began)  # what this start took, its loading too
    assert f"done: {swarm_job.STEPS} steps, {swarm_job.STEPS - stopped['steps']} of them now, in " in log.read_text()
    assert not (run / "journal.jsonl").exists()
    check_trained(run, tmp_path, staleness=1)
    (found,) = [event for event in events_of(run) if event["event"] == "evaluated"]
    assert (found["step"], found["loss"]) == (swarm_job.STEPS, pytest.approx(loss_of(load_file(tmp_path / "w.safetensors")), rel=1e-5))


def loss_of(weights: dict[str, Tensor]) -> float:
    model = swarm_job.Model()
    model.load_state_dict(weights)
    with torch.no_grad():
        total, count = swarm_job.loss(model, default_collate([swarm_job.Data(None)[index] for index in range(len(swarm_job.Data(None)))]))
    return (total / count).item()


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, timeout=120).stderr

    script = swarm_job.__file__
    assert "`--nats` needs `--mode swarm`: only a swarm has a journal" in error(
        "run", script, "--cluster", "c.toml", "--nats", "nats://127.0.0.1:9"
    )
    assert "give --nats URL too" in error("run", script, "--cluster", "c.toml", "--mode", "swarm", "--standby", "h:1")
    assert "run.json" in error("standby", str(tmp_path), "--listen", "127.0.0.1:0")
