"""The fork server in a process of its own: what it forks looks like a started process, and nothing outlives whoever asked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

_ASKER = """
import os, signal, sys, time
from pathlib import Path
from atoll.runtime.supervise.fork_server import ForkServer, open_files, unsafe
from atoll.runtime.supervise.hosts import ProcessSpec, ThisMachine
from atoll.runtime.supervise.supervisor import Supervisor

os.environ["OPENBLAS_NUM_THREADS"] = "1"
opened = open_files()
import torch
torch.set_num_threads(1)
held = {"shared": "found before the fork"}

def hello(arguments):
    print(arguments, held["shared"], os.environ["NAME"], torch.get_num_threads(), os.getpid() == os.getsid(0), sys.stdin.read() == "")
    print("a complaint", file=sys.stderr)
    return 7

def sleep(arguments):
    Path(arguments[0]).write_text(str(os.getpid()))
    time.sleep(600)

assert unsafe(opened) == "", unsafe(opened)
with open(__file__) as script:
    assert unsafe(opened) == f"the script has {__file__} open"
server = ForkServer({"m.hello": hello, "m.sleep": sleep}, lambda: held.update(shared="prepared in the server"))

class Policy:
    def __init__(self): self.ends = []
    def ended(self, spec, code, how):
        self.ends.append(how)
        print(spec.name, code, how, flush=True)
    def asked_to_stop(self, number): pass
    def look(self, now):
        if len(self.ends) == 1 and Path(sys.argv[1]).exists(): supervisor.signal(signal.SIGKILL, "slow")
        if len(self.ends) == 2: supervisor.finish()

supervisor, policy, here = Supervisor(), Policy(), ThisMachine(server)
here.python = sys.executable
command = lambda *words: (sys.executable, "-m", *words)
supervisor.start(ProcessSpec(name="slow", role="r", host=here, command=command("m.sleep", sys.argv[1])))
surroundings = dict(environment={"NAME": "own"}, defaults={"OMP_NUM_THREADS": "2", "NAME": "none"}, prefix="[q] ")
supervisor.start(ProcessSpec(name="quick", role="r", host=here, command=command("m.hello", "a", "b"), **surroundings))
supervisor.run(policy)
Path(sys.argv[1]).unlink()
supervisor.start(ProcessSpec(name="left behind", role="r", host=here, command=command("m.sleep", sys.argv[1])))
while not Path(sys.argv[1]).exists() or not Path(sys.argv[1]).read_text(): time.sleep(0.01)
print("leaving", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_process_is_like_a_started_one(tmp_path: Path) -> None:
    script, pid = tmp_path / "asker.py", tmp_path / "pid"
    script.write_text(_ASKER)
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NAME")}
    done = subprocess.run([sys.executable, script, pid], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "[q] ['a', 'b'] prepared in the server own 2 True True\n" in done.stdout
    assert "[q] a complaint\n" in done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("[q]")] == [
        "quick 7 exit code 7",
        "slow -9 signal 9",
        "leaving",
    ]
    until = time.monotonic() + 120
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid.read_text()}").exists(), "it outlives whoever asked for it"
