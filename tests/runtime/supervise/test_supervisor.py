"""Supervision as every mode has it: signals, output, ends and orphans. Real processes; every moment is scripted, none is timed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.runtime.supervise.hosts import ProcessSpec, ThisMachine
from atoll.runtime.supervise.supervisor import Supervisor
from tests.gone import wait_until_gone

pytestmark = pytest.mark.timeout(60)


class Noted:
    """Finishes when nobody runs."""

    def __init__(self) -> None:
        self.supervisor = Supervisor()
        self.ends: dict[str, str] = {}
        self.asked: list[int] = []
        self.specs: list[ProcessSpec] = []

    def start(self, name: str, code: str) -> None:
        """Once signals are obeyed: these processes send some."""
        command = (sys.executable, "-c", f"import os, signal, sys, time\n{code}")
        self.specs.append(ProcessSpec(name=name, role="test", command=command, host=ThisMachine(), prefix=f"{name}: "))

    def run(self) -> None:
        with self.supervisor.obeying_signals():
            try:
                for spec in self.specs:
                    self.supervisor.start(spec)
                self.supervisor.run(self)
            finally:
                self.supervisor.end()

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        self.ends[spec.name] = how

    def asked_to_stop(self, number: int) -> None:
        self.asked.append(number)
        self.supervisor.signal(number, "one")

    def look(self, now: float) -> None:
        if not self.supervisor.running:
            self.supervisor.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_the_policys_and_each_end_is_told_in_words(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    noted = Noted()
    noted.start(
        "one", f"signal.signal({number}, lambda *_: sys.exit(3)); print('half', end=' '); os.kill({os.getpid()}, {number}); signal.pause()"
    )
    noted.start("two", "print('a\\nb'); sys.exit(0)")
    noted.run()
    assert noted.asked == [number]
    assert noted.ends == {"one": "exit code 3", "two": "exit code 0"}
    assert sorted(capfd.readouterr().out.splitlines()) == ["one: half ", "two: a", "two: b"]


PAUSED = """
import sys
from tests.runtime.supervise.test_supervisor import Noted
noted = Noted()
noted.start("one", "print(os.getpid(), flush=True); signal.pause()")
noted.run()
"""


def wait_for(pid: int, *states: str) -> None:
    """Fails by the test's time-out."""
    while psutil.Process(pid).status() not in states:
        time.sleep(0.01)


def test_ctrl_z_stops_everybody_and_going_on_goes_on() -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().removeprefix("one: "))
        process.send_signal(signal.SIGTSTP)
        wait_for(process.pid, psutil.STATUS_STOPPED)
        wait_for(child, psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGCONT)
        wait_for(child, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_supervisor_leaves_nobody_behind() -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().removeprefix("one: "))
        process.kill()
    wait_until_gone([child])
