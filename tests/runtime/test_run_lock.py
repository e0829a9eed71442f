"""A run's directory is held by one process, and by nobody once that is gone."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import AtollError, JobError
from atoll.runtime.run_lock import LOCK, run_lock

HOLD = """
import sys, time
from pathlib import Path
from atoll.runtime.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_who_holds_it_is_named_and_the_dead_hold_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        where = f"process {process.pid} on {socket.gethostname()}"
        with (
            pytest.raises(JobError, match=rf"{tmp_path}: a run is under way in it \({where}\); wait until it has ended"),
            run_lock(tmp_path),
        ):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
        with pytest.raises(JobError, match="a run is under way"), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_what_it_cannot_say_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("rubbish of another program")
    with run_lock(tmp_path):
        (tmp_path / LOCK).write_text("{")
        with pytest.raises(JobError, match="a run is under way in it; wait"), run_lock(tmp_path):
            pass
    with pytest.raises(AtollError, match="cannot write the run there"), run_lock(tmp_path / LOCK / "inside"):
        pass
