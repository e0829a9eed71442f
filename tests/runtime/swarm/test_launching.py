"""Which processes of a swarm are started again, and when that is no use."""

import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from atoll.errors import JobFailedError
from atoll.fabric.security import Authority
from atoll.runtime.swarm.launching import SwarmProcesses, _Child
from atoll.runtime.swarm.own_devices import OwnDevices


class Noted(SwarmProcesses):
    """Starts nothing."""

    def __init__(self, run: Path, max_restarts: int) -> None:
        Authority.create(run)
        self.said: list[str] = []
        super().__init__(run, "127.0.0.1:1", workers=["{}"], max_restarts=max_restarts, say=self.said.append)

    def _start(self, name: str, role: str, restarts: int = 0) -> None:
        self._children[name] = _Child(name, role, cast("subprocess.Popen[bytes]", None), restarts)

    def end(self, name: str, code: int) -> bool:
        """Whether it is started again."""
        self._ended(self._children[name], code)
        return name in self._children


def test_a_feeder_that_complains_again_and_again_ends_the_run(tmp_path: Path) -> None:
    swarm = Noted(tmp_path, 0)
    swarm._start("feeder", "feeder")
    assert swarm.end("feeder", 1)
    assert swarm.end("feeder", -9)  # a kill is no complaint
    assert swarm.end("feeder", 1)
    assert swarm.end("feeder", 1)
    with pytest.raises(JobFailedError, match="the feeder failed 3 times"):
        swarm.end("feeder", 1)


def test_workers_are_started_again_as_often_as_asked_for(tmp_path: Path) -> None:
    swarm = Noted(tmp_path, 1)
    for name in ("worker-0", "worker-1"):
        swarm._start(name, "worker")
    assert swarm.end("worker-0", -9)
    assert not swarm.end("worker-1", -9)
    assert not swarm.end("worker-0", 0)  # it left politely
    assert swarm.said == ["worker-0 died (signal 9); it is started again", "worker-1 died (signal 9); the run goes on without it"]


@pytest.mark.parametrize(("workers", "started"), [([], ["coordinator"]), (["{}"], ["coordinator", "feeder", "worker-0"])])
def test_without_workers_the_coordinator_is_alone(
    workers: list[str], started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(SwarmProcesses, "_start", lambda self, name, role: names.append(name))
    monkeypatch.setattr(SwarmProcesses, "_wait_for_coordinator", lambda self: None)
    monkeypatch.setattr(SwarmProcesses, "_look_after", lambda self: 0)
    Authority.create(tmp_path)
    assert SwarmProcesses(tmp_path, "127.0.0.1:1", workers=workers, max_restarts=0, say=print).run() == 0
    assert names == started


def test_a_worker_is_told_its_devices_and_how_many_stages_it_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command))
    Authority.create(tmp_path)
    swarm = SwarmProcesses(tmp_path, "127.0.0.1:1", workers=['{"stages":2}', "{}"], max_restarts=0, say=print)
    for number in (0, 1):
        swarm._start(f"worker-{number}", "worker")
    assert [command[command.index("127.0.0.1:1") + 1 :] for command in commands] == [['{"stages":2}', "worker-0"], ["{}", "worker-1"]]


def test_one_that_is_started_again_goes_where_it_is_needed_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: list[OwnDevices] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: own.append(msgspec.json.decode(command[-2], type=OwnDevices)))
    Authority.create(tmp_path)
    planned = OwnDevices((3,), stages=2, planned=(0, 1))
    swarm = SwarmProcesses(tmp_path, "127.0.0.1:1", workers=[msgspec.json.encode(planned).decode()], max_restarts=1, say=print)
    swarm._start("worker-0", "worker")
    swarm._start("worker-0", "worker", 1)
    assert own == [planned, OwnDevices((3,), stages=2)]


def test_processes_that_capture_nothing_load_nothing_that_captures() -> None:
    """Starting is what takes long in a small run: the coordinator and evaluations need PyTorch and little else."""
    code = "import sys, atoll.runtime.swarm.coordinating, atoll.runtime.swarm.evaluating; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"sympy", "scipy", "torch.distributed.checkpoint", "atoll.graph.capture", "atoll.planner"} & set(loaded)
