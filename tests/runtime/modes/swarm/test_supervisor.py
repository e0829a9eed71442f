"""Which processes of a swarm are started again, when that is no use, and how all of them end. Every process is real, its code scripted."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from atoll.errors import JobFailedError
from atoll.events import AnyEvent, Warned
from atoll.fabric.security import Authority
from atoll.runtime.modes.swarm.spec import OwnDevices
from atoll.runtime.modes.swarm.supervisor import SwarmProcesses, free_address
from atoll.runtime.supervise.hosts import OutputSource, ProcessSpec, StartedProcess, ThisMachine
from atoll.watch.describe import describe_event, importance

pytestmark = pytest.mark.timeout(60)


class Scripted(ThisMachine):
    """Its processes run lines of Python instead of what they are told: one for each time a process of a name is started."""

    def __init__(self, run: Path, code: dict[str, list[str]], name: str = "") -> None:
        self.name, self.run, self.code = name, run, code
        self.specs: list[ProcessSpec] = []
        self.processes: list[tuple[str, StartedProcess]] = []

    def start(self, spec: ProcessSpec) -> tuple[StartedProcess, Sequence[OutputSource]]:
        """The next of its lines; they know the directory of the run and the address they are told."""
        self.specs.append(spec)
        line = self.code[spec.name].pop(0)
        code = f"import os, signal, socket, sys, time\n{HELPERS}\nrun, ADDRESS = {str(self.run)!r}, {spec.command[5]!r}\n{line}"
        replaced = msgspec.structs.replace(spec, command=(sys.executable, "-c", code), terminal=False)
        process, sources = super().start(replaced)
        self.processes.append((spec.name, process))
        return process, sources

    def codes(self) -> dict[str, int | None]:
        """How the last of each name ended."""
        return {name: process.poll() for name, process in self.processes}


HELPERS = """
def mark(name): open(os.path.join(run, name), "w").close()
def wait(*names):
    while not all(os.path.exists(os.path.join(run, name)) for name in names): time.sleep(0.01)
def listen():
    host, _, port = ADDRESS.rpartition(":")
    global listening
    listening = socket.create_server((host, int(port)))
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""
SLEEP = "time.sleep(1000)"


def swarm(
    run: Path, code: dict[str, list[str]], max_restarts: int = 0, workers: int = 1, host: str = ""
) -> tuple[SwarmProcesses, Scripted, list[str]]:
    """With what was said."""
    Authority.create(run)
    said: list[str] = []

    def show(event: AnyEvent) -> None:
        if importance(event) == "warning":
            said.append(describe_event(event))

    scripted = Scripted(run, code, host)
    processes = SwarmProcesses(
        run,
        free_address("127.0.0.1"),
        workers=[(scripted, OwnDevices((3,), stages=2, planned=(0, 1)))] * workers,
        max_restarts=max_restarts,
        observer=show,
        here=scripted,
    )
    return processes, scripted, said


def test_a_feeder_that_complains_again_and_again_ends_the_run(tmp_path: Path) -> None:
    fails = "sys.exit(1)"
    feeder = [fails, "die()", fails, fails, fails]  # a kill is no complaint
    processes, scripted, said = swarm(tmp_path, {"coordinator": [f"listen(); {SLEEP}"], "feeder": feeder, "worker-0": [SLEEP]})
    with pytest.raises(JobFailedError, match="the feeder failed 3 times"):
        processes.run()
    assert not feeder
    assert len(said) == 4
    assert said[1] == "feeder died (signal 9); restarting it"
    assert scripted.codes()["coordinator"] == scripted.codes()["worker-0"] == -signal.SIGKILL


def test_workers_are_started_again_as_often_as_asked_for_and_go_where_they_are_needed(tmp_path: Path) -> None:
    code = {
        "coordinator": ["listen(); wait('stop-feeding', 'left'); sys.exit(0)"],
        "feeder": ["wait('second'); mark('stop-feeding')"],
        "worker-0": ["die()", "mark('left')"],  # the second leaves politely
        "worker-1": ["wait('left'); mark('second'); die()"],
    }
    processes, scripted, said = swarm(tmp_path, code, max_restarts=1, workers=2, host="rome-0")
    assert processes.run() == 0
    own = [msgspec.json.decode(spec.command[-2], type=OwnDevices) for spec in scripted.specs if spec.name == "worker-0"]
    assert own == [OwnDevices((3,), stages=2, planned=(0, 1)), OwnDevices((3,), stages=2)]
    assert [spec.command[-1] for spec in scripted.specs] == ["coordinator", "feeder", "worker-0", "worker-1", "worker-0-1"]
    assert said[0] == "worker-0 on rome-0 died (signal 9); restarting it"
    without = "worker-1 on rome-0 died (signal 9); the run continues without it"
    nobody = "run: no worker that was started here is left: the run waits for others to join; Ctrl-C ends it, and --resume starts new ones"
    assert said[1:] in ([], [without], [without, nobody])  # the run may be over before


def test_where_no_worker_is_left_it_is_told_who_is_waited_for(tmp_path: Path) -> None:
    code = {"coordinator": ["listen(); wait('told'); sys.exit(0)"], "feeder": [SLEEP], "worker-0": ["die()"]}
    processes, _, said = swarm(tmp_path, code)

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Warned):
            said.append(event.message)
            (tmp_path / "told").touch()

    processes._observer = hear
    assert processes.run() == 0
    assert "no worker that was started here is left: the run waits for others to join" in said[-1]


def test_a_coordinator_that_is_killed_is_started_again(tmp_path: Path) -> None:
    code = {"coordinator": ["listen(); wait('fed'); die()", "sys.exit(0)"], "feeder": ["mark('fed')"], "worker-0": [SLEEP]}
    processes, scripted, said = swarm(tmp_path, code)
    assert processes.run() == 0
    assert said == ["coordinator died (signal 9); restarting it"]
    assert scripted.codes()["worker-0"] == -signal.SIGTERM


def test_without_workers_the_coordinator_is_alone(tmp_path: Path) -> None:
    processes, scripted, _ = swarm(tmp_path, {"coordinator": ["listen(); listening.accept(); sys.exit(0)"]}, workers=0)
    assert processes.run() == 0
    assert [spec.name for spec in scripted.specs] == ["coordinator"]


def test_a_coordinator_that_never_listens_says_why_itself(tmp_path: Path) -> None:
    processes, _, _ = swarm(tmp_path, {"coordinator": ["die()"]})
    with pytest.raises(JobFailedError, match=r"the coordinator died \(signal 9\) before it listened"):
        processes.run()


def test_when_a_stopped_run_has_ended_who_still_loads_is_ended_and_who_works_leaves(tmp_path: Path) -> None:
    code = {
        "coordinator": ["listen(); wait('loads', 'works'); sys.exit(130)"],
        "feeder": [f"mark('loads'); {SLEEP}"],
        "worker-0": [f"signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); mark('works'); {SLEEP}"],
    }
    processes, scripted, _ = swarm(tmp_path, code)
    assert processes.run() == 130
    assert scripted.codes() == {"coordinator": 130, "feeder": -signal.SIGTERM, "worker-0": 0}


def test_a_run_that_is_stopped_before_its_coordinator_listens_ends_without_starting_others(tmp_path: Path) -> None:
    processes, scripted, said = swarm(tmp_path, {"coordinator": [f"os.kill({os.getpid()}, signal.SIGINT); {SLEEP}"]})
    assert processes.run() == 130
    assert scripted.codes() == {"coordinator": -signal.SIGKILL}
    assert said == ["the run ends before it has begun"]


def test_the_first_ctrl_c_asks_the_coordinator_by_a_file_and_the_second_kills(tmp_path: Path) -> None:
    asks = f"os.kill({os.getpid()}, signal.SIGTERM)"
    code = {
        "coordinator": [f"listen(); wait('works'); {asks}; wait('stop'); {asks}; {SLEEP}"],
        "feeder": [SLEEP],
        "worker-0": [f"signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('works'); {SLEEP}"],
    }
    processes, scripted, said = swarm(tmp_path, code)
    assert processes.run() == 130
    assert set(scripted.codes().values()) == {-signal.SIGKILL}
    assert said == ["the run stops after this step, if one is under way, once its state is stored; Ctrl-C again ends it at once"]


def test_ctrl_c_while_the_others_leave_ends_them(tmp_path: Path) -> None:
    asks = f"os.kill({os.getpid()}, signal.SIGINT)"
    code = {
        "coordinator": [f"listen(); wait('works'); {asks}; wait('stop'); sys.exit(130)"],
        "feeder": [SLEEP],
        "worker-0": [f"signal.signal(signal.SIGTERM, lambda *_: {asks}); mark('works'); {SLEEP}"],
    }
    processes, scripted, _ = swarm(tmp_path, code)
    assert processes.run() == 130
    assert scripted.codes()["worker-0"] == -signal.SIGKILL


def test_what_members_print_is_passed_on_with_their_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = {
        "coordinator": ["listen(); wait('said'); sys.exit(0)"],
        "feeder": [SLEEP],
        "worker-0": ["print('well', flush=True); mark('said')"],
    }
    assert swarm(tmp_path, code)[0].run() == 0
    assert capfd.readouterr().out == "worker-0: well\n"


def test_processes_that_capture_nothing_load_nothing_that_captures() -> None:
    """Starting is what takes long in a small run: the coordinator and evaluations need PyTorch and little else."""
    code = "import sys, atoll.runtime.modes.swarm.coordinator_process, atoll.runtime.modes.swarm.coordinator_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"sympy", "scipy", "torch.distributed.checkpoint", "atoll.graph.capture", "atoll.planner"} & set(loaded)
