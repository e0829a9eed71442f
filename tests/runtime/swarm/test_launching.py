"""Which processes of a swarm are started again, and when that is no use."""

import os
import signal
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
    monkeypatch.setattr(SwarmProcesses, "_wait_for_coordinator", lambda self: True)
    monkeypatch.setattr(SwarmProcesses, "_look_after", lambda self: 0)
    Authority.create(tmp_path)
    assert SwarmProcesses(tmp_path, "127.0.0.1:1", workers=workers, max_restarts=0, say=print).run() == 0
    assert names == started


class Acted(SwarmProcesses):
    """Its processes run these lines of Python instead. Each is begun once the one before has printed something."""

    def __init__(self, run: Path, code: dict[str, str]) -> None:
        Authority.create(run)
        self.said: list[str] = []
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._code = code
        super().__init__(run, "127.0.0.1:1", workers=["{}"], max_restarts=0, say=self.said.append)

    def _start(self, name: str, role: str, restarts: int = 0) -> None:
        code = f"import os, signal, time\n{self._code[name]}"
        process = self.started[name] = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self._children[name] = _Child(name, role, process, restarts)
        assert process.stdout is not None
        with process.stdout as printed:
            printed.readline()

    def codes(self) -> dict[str, int]:
        """How all of them ended."""
        return {name: process.wait() for name, process in self.started.items()}


LOADS = "print(flush=True); time.sleep(1000)"
STOPPED = "print(flush=True); os._exit(130)"


def test_when_a_stopped_run_has_ended_who_still_loads_is_ended_and_who_works_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acted, "_wait_for_coordinator", lambda self: True)
    works = f"signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); {LOADS}"
    swarm = Acted(tmp_path, {"coordinator": STOPPED, "feeder": LOADS, "worker-0": works})
    assert swarm.run() == 130
    assert swarm.codes() == {"coordinator": 130, "feeder": -signal.SIGTERM, "worker-0": 0}


def test_a_run_that_is_stopped_before_its_coordinator_listens_ends_without_starting_others(tmp_path: Path) -> None:
    asks = f"os.kill({os.getpid()}, signal.SIGINT); print(flush=True); time.sleep(20)"
    swarm = Acted(tmp_path, {"coordinator": asks})
    assert swarm.run() == 130
    assert swarm.codes() == {"coordinator": -signal.SIGKILL}
    assert swarm.said == ["the run ends before it has begun"]


def test_ctrl_c_while_the_others_leave_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acted, "_wait_for_coordinator", lambda self: True)
    stays = f"signal.signal(signal.SIGTERM, lambda *_: os.kill({os.getpid()}, signal.SIGINT)); {LOADS}"
    swarm = Acted(tmp_path, {"coordinator": STOPPED, "feeder": LOADS, "worker-0": stays})
    swarm._asked_to_stop = True
    with pytest.raises(KeyboardInterrupt):
        swarm.run()
    assert swarm.codes()["worker-0"] == -signal.SIGKILL


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
